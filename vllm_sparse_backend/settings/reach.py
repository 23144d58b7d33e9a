# SPDX-License-Identifier: Apache-2.0
"""How far back a layer's queries look, and how many pairs of query and key that makes: what attention costs."""

from typing import NamedTuple


class Reach(NamedTuple):
    """Over all tokens before, or those of a window, or those of the chunk of positions that a query is in."""

    window: int = 0
    chunk: int = 0

    def pairs(self, first: int, end: int) -> int:
        """Causal (query, key) pairs of the queries at positions ``first`` to ``end`` - 1, of one head."""
        return self._pairs_up_to(end) - self._pairs_up_to(first)

    def _pairs_up_to(self, end: int) -> int:
        if self.chunk:
            chunks, rest = divmod(end, self.chunk)
            return chunks * _triangle(self.chunk) + _triangle(rest)
        within = min(self.window or end, end)
        return _triangle(within) + (end - within) * within


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
