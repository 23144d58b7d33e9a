# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: warps in threads of which one runs at a time, copies and products between them, and barriers."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Ready = Callable[[], bool]


class Deadlock(RuntimeError):
    """Warps wait, and nothing is left that could wake one."""


class Task:
    """Something that goes on by one turn at a time, once it is ready."""

    done = False
    waits_for = ""

    def __init__(self, ready: Ready, turn: Callable[[], None], name: str) -> None:
        self.ready, self.turn, self.name = ready, turn, name
        self.priority = 0.0

    def __str__(self) -> str:
        return f"{self.name} waits for {self.waits_for or 'what is before it'}"


class Scheduler:
    """Gives turns by priorities, which change at random: so a warp may fall behind by as much as barriers let it.

    (Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.) A fair
    draw each time, which every second seed makes, hardly ever leaves one warp behind.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_fair = seed % 2 == 1
        self.tasks: list[Task] = []
        self.running: Warp | None = None

    def add(self, task: Task) -> None:
        task.priority = self.random.random()
        self.tasks.append(task)

    def run(self) -> None:
        while self.tasks:
            ready = [task for task in self.tasks if task.ready()]
            if not ready:
                raise Deadlock("; ".join(map(str, self.tasks)))
            if self.is_fair or self.random.random() < 0.05:
                chosen = self.random.choice(ready)
                chosen.priority = self.random.random()
            else:
                chosen = max(ready, key=lambda task: task.priority)
            chosen.turn()
            if chosen.done:
                self.tasks.remove(chosen)


class Warp(Task):
    """One warp of a group, in a thread that runs only when it is its turn."""

    def __init__(self, group: "Group", number: int, run: Callable[[], None]) -> None:
        super().__init__(lambda: True, self._go_on, f"warp {number} of {group.name}")
        self.group, self.number = group, number
        self.num_products = self.num_atomics = self.num_barriers = self.num_copies = 0
        self._run, self._failed = run, None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._stops = False
        self._thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        self._turn.acquire()
        try:
            if not self._stops:
                self._run()
        except BaseException as error:
            self._failed = error
        self.done = True
        self._back.release()

    def _go_on(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self.group.scheduler.running = self
        self._turn.release()
        self._back.acquire()
        self.group.scheduler.running = None
        if self._failed is not None:
            raise self._failed

    def pause(self, ready: Ready = lambda: True, waits_for: str = "") -> None:
        """Let others go on, at least until it is ready."""
        self.ready, self.waits_for = ready, waits_for
        self._back.release()
        self._turn.acquire()
        if self._stops:
            raise SystemExit

    def stop(self) -> None:
        """End the thread of a schedule that has failed."""
        self._stops = True
        if self._thread.is_alive():
            self._turn.release()
            self._thread.join()

    def part(self, rows: int) -> slice:
        """The rows of a tensor that are this warp's."""
        each = rows // len(self.group.warps)
        return slice(self.number * each, (self.number + 1) * each)


class Group:
    """Warps that run one function."""

    def __init__(self, program: "Program", name: str, num_warps: int, run: Callable[[], None]) -> None:
        self.program, self.name, self.scheduler = program, name, program.scheduler
        self.warps = [Warp(self, number, run) for number in range(num_warps)]
        self.products: list[Any] = []
        self.atomics: list[int] = []
        for warp in self.warps:
            self.scheduler.add(warp)


@dataclass
class Program:
    """One program of a launch."""

    scheduler: Scheduler
    number: int
    num_programs: int
    groups: list[Group] = field(default_factory=list)


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes have landed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        assert self.pending >= 0, "more have arrived than are waited for"
        self._turn()

    def land(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
