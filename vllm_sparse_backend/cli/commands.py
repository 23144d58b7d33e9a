# SPDX-License-Identifier: Apache-2.0
"""Commands with many options: a frozen dataclass holds the options, and its method ``run`` does the work.

The dataclass's fields have the annotations of typer's parameters, its docstring is the help, and a derived class
inherits options. Each option therefore has one declaration and one type, and no function takes many parameters.

typer 0.27 names an option after its metavar if both differ only in case: ``--LEVEL``. Such options declare their name.
"""

from typing import Any, Protocol

import typer
from typer.core import TyperCommand


class Command(Protocol):
    """Options of one command, parsed and checked."""

    def run(self) -> None:
        """Run the command."""


class OptionsCommand(TyperCommand):
    """A command whose callback returns an options object, which then runs."""

    def invoke(self, ctx: Any) -> None:
        super().invoke(ctx).run()


def add_command(app: typer.Typer, options: type[Command], epilog: str | None = None) -> None:
    """Add a command with the class's name in lower case."""
    app.command(cls=OptionsCommand, epilog=epilog)(options)
