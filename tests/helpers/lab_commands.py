# SPDX-License-Identifier: Apache-2.0
"""Run `bench crossover` and the timing programs of the lab as from a shell."""

import typer
from typer.testing import CliRunner

from benchmarks import attend, methods
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.cli.commands import add_command

LAB = {"attend": attend.Attend, "methods": methods.MeasureMethods}


def run(command: str, *args: object):
    """Run `bench crossover` or a program of the lab."""
    arguments, to_run = list(map(str, args)), app
    if command in LAB:
        to_run = typer.Typer()
        add_command(to_run, LAB[command])
    else:
        arguments = ["bench", command, *arguments]
    return CliRunner().invoke(to_run, arguments, catch_exceptions=False)
