# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_sparse_backend``: the command `sparse-prefill`, for use without installing the package."""

from vllm_sparse_backend.cli import app

app(prog_name="sparse-prefill")
