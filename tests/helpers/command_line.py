# SPDX-License-Identifier: Apache-2.0
"""All commands of `sparse-prefill`, by their paths."""

from typing import Any

import typer

from vllm_sparse_backend.cli import app


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return (path, command) of each command that can be run."""
    if not hasattr(command, "commands"):
        return [(path, command)]
    return [leaf for name, subcommand in command.commands.items() for leaf in leaves(subcommand, (*path, name))]


COMMANDS = leaves(typer.main.get_command(app))
