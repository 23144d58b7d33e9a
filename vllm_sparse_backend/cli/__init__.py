# SPDX-License-Identifier: Apache-2.0
"""The `sparse-prefill` command: one file for each of its parts."""

import typer

from vllm_sparse_backend.cli import bench, calibrate, demo, doctor, eval, profiles, servers

app = typer.Typer(
    name="sparse-prefill",
    help="Sparse prefill for vLLM: look at an installation, try it out, measure it, check and import profiles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (doctor, demo, profiles, calibrate, bench, servers, eval):
    part.add_to(app)
