# SPDX-License-Identifier: Apache-2.0
"""Progress and remaining time of a long command: a bar on stderr, or occasional lines in a log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich_bar
from rich.console import Console
from rich.markup import escape

LOG_INTERVAL_S = 30.0
"""Seconds between two lines of a stage, if there is no terminal."""


class Bar:
    """Progress of one stage at a time."""

    def __init__(self, progress: rich_bar.Progress, task: rich_bar.TaskID) -> None:
        self._progress, self._task = progress, task
        self._stage, self._steps, self._done = "", 0, 0
        self._began_s = self._logged_s = time.monotonic()

    def begin(self, what: str, steps: int, done: int = 0) -> None:
        """Begin a stage of ``steps`` steps. An earlier run has finished ``done`` of them."""
        self._progress.reset(self._task, description=escape(what), total=steps, completed=done)
        self._stage, self._steps, self._done = what, steps, done
        self._began_s = self._logged_s = time.monotonic()
        if self._progress.disable:
            self.print(f"{what}: {done} of {steps}")

    def step(self) -> None:
        """Count a finished step; a log gets a line every ``LOG_INTERVAL_S`` and at the end."""
        self._progress.advance(self._task)
        self._done += 1
        now_s = time.monotonic()
        is_due = now_s - self._logged_s >= LOG_INTERVAL_S or self._done == self._steps
        if self._progress.disable and self._stage and is_due:
            self._logged_s = now_s
            self.print(f"{self._stage}: {self._done} of {self._steps} after {now_s - self._began_s:.0f} s")

    def print(self, line: str) -> None:
        """Print a line above the bar, or to stderr if there is no bar."""
        self._progress.console.print(escape(line), highlight=False, soft_wrap=True)


@contextmanager
def bar(what: str, steps: int | None = None) -> Iterator[Bar]:
    console = Console(stderr=True)
    counts = rich_bar.TextColumn("{task.description}"), rich_bar.BarColumn(), rich_bar.MofNCompleteColumn()
    columns = *counts, rich_bar.TimeElapsedColumn(), rich_bar.TextColumn("left"), rich_bar.TimeRemainingColumn()
    with rich_bar.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, progress.add_task(what, total=steps))
