# SPDX-License-Identifier: Apache-2.0
"""Progress and remaining time of a long command: a bar on stderr, or occasional lines in a log."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich_bar
from rich.console import Console
from rich.markup import escape

from vllm_sparse_backend.progress import Progress

LOG_INTERVAL_S = 30.0
"""Seconds between two lines of a stage, if there is no terminal."""


class Bar(Progress):
    """A bar for one stage at a time."""

    def __init__(self, progress: rich_bar.Progress) -> None:
        self._progress = progress
        self._logged_s = 0.0

    def begin(self, what: str, steps: int) -> None:
        (task,) = self._progress.tasks
        self._progress.reset(task.id, description=what, total=steps)
        self._logged_s = 0.0
        if self._progress.disable:
            self.print(f"{what}: 0 of {steps}")

    def step(self) -> None:
        """Count a finished step; a log gets a line every ``LOG_INTERVAL_S`` and at the end."""
        (task,) = self._progress.tasks
        self._progress.advance(task.id)
        elapsed_s = task.elapsed or 0.0
        if self._progress.disable and (elapsed_s - self._logged_s >= LOG_INTERVAL_S or task.finished):
            self._logged_s = elapsed_s
            self.print(f"{task.description}: {task.completed:g} of {task.total:g} after {elapsed_s:.0f} s")

    def print(self, line: str) -> None:
        """Print a line above the bar, or to stderr if there is no bar."""
        self._progress.console.print(escape(line), highlight=False, soft_wrap=True)


@contextmanager
def bar(what: str) -> Iterator[Bar]:
    console = Console(stderr=True)
    columns = (
        rich_bar.TextColumn("{task.description}", markup=False),
        rich_bar.BarColumn(),
        rich_bar.MofNCompleteColumn(),
        rich_bar.TimeElapsedColumn(),
        rich_bar.TextColumn("left"),
        rich_bar.TimeRemainingColumn(),
    )
    with rich_bar.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield Bar(progress)
