# SPDX-License-Identifier: Apache-2.0
"""Recalls of single queries, counted: a mean hides the few queries that lose all of what they look for."""

import math

import torch


class Recalls:
    """Recalls of many queries under each of ``count`` selections, counted in steps of a ten-thousandth."""

    STEPS = 10_000

    def __init__(self, count: int) -> None:
        self.counts = torch.zeros(count, self.STEPS + 1, dtype=torch.int64)
        self.sums = torch.zeros(count, dtype=torch.float64)

    def add(self, recalls: torch.Tensor) -> None:
        """[count, ...], each in [0, 1] but for rounding."""
        flat = recalls.flatten(1)
        bins = (flat * self.STEPS + 0.01).long().clamp(0, self.STEPS)  # float32 rounds sums of 1 to less
        self.counts += torch.stack([torch.bincount(b, minlength=self.STEPS + 1) for b in bins]).cpu()
        self.sums += flat.sum(1, dtype=torch.float64).cpu()

    @property
    def num_queries(self) -> int:
        return int(self.counts[0].sum())

    def mean(self) -> list[float]:
        return (self.sums / self.num_queries).tolist()

    def worst(self, share: float) -> list[float]:
        """The most that every query but ``share`` of them keeps, rounded down to a step; 0 asks for the worst one."""
        passed_over = math.floor(share * self.num_queries)
        bins = (self.counts.cumsum(1) > passed_over).int().argmax(1)
        return [b / self.STEPS for b in bins.tolist()]
