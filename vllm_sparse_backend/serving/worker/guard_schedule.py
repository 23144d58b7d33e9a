# SPDX-License-Identifier: Apache-2.0
"""Schedules the guard's checks: the layers and queries of a group that each step checks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_sparse_backend.serving.worker.batch_rows import BatchRow
from vllm_sparse_backend.serving.worker.guard import Guard, pick_queries
from vllm_sparse_backend.serving.worker.step import Slab


class ScheduledCheck(NamedTuple):
    """Queries of one row for which the current step compares layers with the dense backend."""

    level: str
    """Name of the row's level."""
    rows: slice
    """The row in the batch, as a slice of length 1."""
    tokens: slice
    """The queries, in tokens of the batch."""
    layers: frozenset[int]
    """Numbers of the layers to check."""


class GuardSchedule:
    """Schedules checks for one group of layers. Counts the steps with sparse rows, level by level."""

    def __init__(self, guard: Guard, layers_by_level: Mapping[str, frozenset[int]], judged_share: float) -> None:
        self.guard = guard
        self.judged_share = judged_share
        self.sparse_steps: Counter[str] = Counter()
        self._layers_by_level = layers_by_level

    def next_checks(self, rows: Sequence[BatchRow], slabs: Sequence[Slab]) -> list[ScheduledCheck]:
        """Return the checks of the next step, at most one for each level."""
        judged = [
            slab for slab in slabs if slab.request.kept_mass is None or slab.request.kept_mass >= self.judged_share
        ]
        checks = []
        for level in dict.fromkeys(slab.level for slab in judged):
            step = self.sparse_steps[level]
            self.sparse_steps[level] += 1
            layers = self.guard.layers_due(self._layers_by_level[level], step)
            if layers:
                tokens = pick_queries(step, [slab for slab in judged if slab.level == level])
                (row,) = (i for i, row in enumerate(rows) if row.token <= tokens.start < row.end)
                checks.append(ScheduledCheck(level, slice(row, row + 1), tokens, layers))
        return checks
