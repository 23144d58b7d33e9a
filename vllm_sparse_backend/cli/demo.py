# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill demo`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vllm_sparse_backend.cli.common import exit_on_sigterm


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A model folder; by default the small one of this package.")
    ] = None,
    method: Annotated[str, typer.Option(help="The sparse method to show.")] = "vertical_slash",
    work_dir: Annotated[
        Path | None, typer.Option(help="Where a model is made if the package has none; by default in the venv.")
    ] = None,
) -> None:
    """Ask about a long text, through stock vLLM and this backend, and show the answers and what ran sparse."""
    from vllm_sparse_backend.demo import run
    from vllm_sparse_backend.measure.server import ServerError
    from vllm_sparse_backend.settings.errors import ConfigurationError
    from vllm_sparse_kernels.methods import sparse_names

    if method not in sparse_names():
        raise typer.BadParameter(f"{method!r}; expected one of {', '.join(sparse_names())}", param_hint="--method")
    exit_on_sigterm()
    try:
        run.run_demo(model, method, work_dir, Console())
    except (run.DemoError, ServerError, ConfigurationError) as error:
        Console(stderr=True).print(f"[red]The demo failed.[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
