# SPDX-License-Identifier: Apache-2.0
"""The attention reach of a layer, and the resulting number of (query, key) pairs."""

from typing import NamedTuple


class Reach(NamedTuple):
    """Attention reach of a layer: all earlier tokens, a sliding window, or the query's own chunk of positions."""

    window: int = 0
    chunk: int = 0

    def pairs(self, first: int, end: int) -> int:
        """Count the causal (query, key) pairs of a range of queries."""
        return self._pairs_up_to(end) - self._pairs_up_to(first)

    def _pairs_up_to(self, end: int) -> int:
        if self.chunk:
            full_chunks, remainder = divmod(end, self.chunk)
            return full_chunks * _triangle(self.chunk) + _triangle(remainder)
        within = min(self.window or end, end)
        return _triangle(within) + (end - within) * within


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
