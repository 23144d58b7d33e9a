# SPDX-License-Identifier: Apache-2.0
"""The `sparse-prefill` command: one file for each of its parts."""

import signal
import sys
from typing import Annotated

import typer

from vllm_sparse_backend.cli import bench, demo, doctor, eval, profile
from vllm_sparse_backend.cli.common import group


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from vllm_sparse_backend.identity import PACKAGE, package_version

        typer.echo(f"{PACKAGE} {package_version(PACKAGE)}")
        raise typer.Exit


app = group("Sparse prefill for vLLM.")


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    # SystemExit, so that servers stop and release their GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


app.command(epilog="Example: sparse-prefill doctor meta-llama/Llama-3.1-8B-Instruct")(doctor.doctor)
app.command(epilog="Example: sparse-prefill demo")(demo.demo)
app.add_typer(profile.profile_app, name="profile")
app.add_typer(bench.bench, name="bench")
app.add_typer(eval.evaluate, name="eval")
