# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill demo`: show sparse prefill on a long text."""

from vllm_sparse_backend.cli.common import failures, say


def demo() -> None:
    """Compare stock vLLM and this backend on a small model.

    Both answer the same questions inside a prompt. Exit code 1 if nothing ran sparse, or if an answer is wrong.
    """
    from vllm_sparse_backend.demo import run

    with failures():
        run.run_demo(say)
