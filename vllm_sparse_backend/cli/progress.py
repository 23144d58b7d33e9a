# SPDX-License-Identifier: Apache-2.0
"""How far a long command has come, and how long it will take: a bar on stderr, or a line a stage in a log."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich_bar
from rich.console import Console
from rich.markup import escape


class Bar:
    """One stage at a time."""

    def __init__(self, progress: rich_bar.Progress, task: rich_bar.TaskID) -> None:
        self._progress, self._task = progress, task

    def begin(self, what: str, steps: int, done: int = 0) -> None:
        """A stage, and how many steps it has; ``done`` of them were done by an earlier run."""
        self._progress.reset(self._task, description=escape(what), total=steps, completed=done)
        if self._progress.disable:  # a log shows that a stage began, and nothing until it ends
            self.print(f"{what}: {done} of {steps}")

    def step(self) -> None:
        self._progress.advance(self._task)

    def print(self, line: str) -> None:
        """Above the bar; to stderr too where there is none."""
        self._progress.console.print(escape(line), highlight=False, soft_wrap=True)


@contextmanager
def bar(what: str, steps: int | None = None) -> Iterator[Bar]:
    console = Console(stderr=True)
    counts = rich_bar.TextColumn("{task.description}"), rich_bar.BarColumn(), rich_bar.MofNCompleteColumn()
    columns = *counts, rich_bar.TimeElapsedColumn(), rich_bar.TextColumn("left"), rich_bar.TimeRemainingColumn()
    with rich_bar.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, progress.add_task(what, total=steps))
