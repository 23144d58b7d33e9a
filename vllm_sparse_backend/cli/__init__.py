# SPDX-License-Identifier: Apache-2.0
"""The `sparse-prefill` command: one file for each of its parts."""

import typer

from vllm_sparse_backend.cli import bench, demo, doctor, eval, profile, switch

app = typer.Typer(
    name="sparse-prefill",
    help="Sparse prefill for vLLM: look at an installation, try it out, measure it, check and import profiles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor.doctor)
app.command()(demo.demo)
app.command()(switch.switch)
app.add_typer(profile.profile_app, name="profile")
app.add_typer(bench.bench, name="bench")
app.add_typer(eval.evaluate, name="eval")
