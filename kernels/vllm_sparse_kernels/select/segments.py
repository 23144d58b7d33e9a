# SPDX-License-Identifier: Apache-2.0
"""Rows cut into segments: methods that estimate from a chunk's last queries may do so for each part of it.

What a chunk's last queries look at tells more about its end than about its middle. A segment is a row of its own: its
queries are some consecutive tiles of the chunk, its keys all up to its last query, and its own last queries decide what
its tiles keep. Tiles stay what they are, and so do the places of their lists.
"""

from typing import NamedTuple

import torch

from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div, to_device
from vllm_sparse_kernels.select.parameters import require


class Segments(NamedTuple):
    rows: Rows
    """One for each segment."""
    row_ids: tuple[int, ...]
    """Of which row each is a part."""

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values [n, num_rows] of the rows, for each segment: [n, segments]."""
        if len(self.row_ids) == values.shape[1]:
            return values
        return values.index_select(1, to_device(self.row_ids, torch.int64, values.device))


def require_segments(segment_tokens: int | None) -> None:
    """Raise ValueError unless it is None or a number of queries that is no less than a tile."""
    expected = f"a number of queries >= {TILE_TOKENS}, or none"
    require(segment_tokens is None or segment_tokens >= TILE_TOKENS, "segment_tokens", segment_tokens, expected)


def segments_of(rows: Rows, segment_tokens: int | None) -> Segments:
    """Cut once in a pass, for all layers; each row by its own length alone. None leaves rows as they are."""
    if segment_tokens is None:
        return Segments(rows, tuple(range(rows.num_rows)))
    key = "segments", segment_tokens
    if key not in rows.state:
        rows.state[key] = _cut(rows, segment_tokens)
    found: Segments = rows.state[key]
    return found


def _cut(rows: Rows, segment_tokens: int) -> Segments:
    row_ids, tokens, query_lens, context_lens = [], [], [], []
    for row, query_len in enumerate(rows.query_lens):
        begin = 0
        for end in segment_ends(query_len, segment_tokens):
            row_ids.append(row)
            tokens.append(rows.tokens[row] + begin)
            query_lens.append(end - begin)
            context_lens.append(rows.context_lens[row] + begin)
            begin = end
    table = rows.block_table.index_select(0, to_device(row_ids, torch.int64, rows.device))
    return Segments(Rows(tuple(tokens), tuple(query_lens), tuple(context_lens), table), tuple(row_ids))


def segment_ends(query_len: int, segment_tokens: int) -> list[int]:
    """Where the segments of a chunk end: as few as can be, whole tiles, and as equal as tiles allow."""
    num_tiles = ceil_div(query_len, TILE_TOKENS)
    number = ceil_div(num_tiles, segment_tokens // TILE_TOKENS)
    return [min(query_len, ceil_div(num_tiles * (i + 1), number) * TILE_TOKENS) for i in range(number)]
