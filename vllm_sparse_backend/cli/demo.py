# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill demo`: show sparse prefill on a long text."""

from typing import Annotated

import typer
from rich.console import Console

from vllm_sparse_backend.cli.common import MaybeModel, exit_on_sigterm, failures


def demo(
    model: MaybeModel = None,
    method: Annotated[str, typer.Option(help="The sparse method to show.")] = "vertical_slash",
) -> None:
    """Ask stock vLLM and this backend about a long text, and show their answers and the sparse work.

    Uses the package's small model without MODEL. Exit code 1 if nothing ran sparse, or if the small model's answers are
    wrong.
    """
    from vllm_sparse_backend.demo import run
    from vllm_sparse_kernels.methods import sparse_names

    if method not in sparse_names():
        raise typer.BadParameter(f"{method!r}; expected one of {', '.join(sparse_names())}", param_hint="--method")
    exit_on_sigterm()
    with failures():
        run.run_demo(model, method, Console())
