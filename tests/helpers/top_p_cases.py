# SPDX-License-Identifier: Apache-2.0
"""Batches for tests of ``top_p``."""

from dataclasses import replace
from typing import Any

import torch

from tests.helpers.batches import random_batch
from tests.helpers.lined import DEVICE
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods.top_p.floor import StoredShares
from vllm_sparse_kernels.methods.top_p.method import TopP, hopper
from vllm_sparse_kernels.rows import Rows, ceil_div

METHOD = TopP(
    kept_mass=0.2,
    sink_tokens=32,
    local_tokens=128,
    most_share=1.0,
    channels="all",
    queries="all",
    peak_share=1.0,
    floor=0.5,
)
WITHOUT = replace(METHOD, floor=0.0)
LENGTHS = [(0, 1), (700, 63), (130, 140), (321, 1)]


def make_batch(
    lengths: Any = LENGTHS, heads: tuple[int, int, int] = (2, 1, 64), page_size: int = 16, dtype: Any = torch.float32,
    seed: int = 0,
) -> Batch:  # fmt: skip
    """Return a batch with keys around a mean far from zero, and queries that prefer some blocks of keys strongly."""
    batch = random_batch(lengths, *heads, page_size, dtype, DEVICE, seed, gap_tokens=3)
    generator = torch.Generator(DEVICE).manual_seed(seed + 1)
    batch.cache.keys.add_(3 * torch.randn(heads[1:], generator=generator, device=DEVICE).to(dtype))
    return replace(batch, q=batch.q * 2.5)


class Bytes:
    """Scratch as the Hopper kernels leave it for a row of one or two tiles, with garbage where nothing is written.

    Args:
        context_len: Cached keys of the row.
        query_len: New tokens.
        num_heads: Selected heads.
        seed: Seed of the shares.
    """

    SPAN = 1024
    ROUNDING = (1.0, 1.1)
    """Sums before rounding, relative to the values of the bytes, by head: all bytes of the second were rounded down."""

    def __init__(self, context_len: int, query_len: int, num_heads: int, seed: int = 0) -> None:
        self.rows = Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
        reach, num_tiles = context_len + query_len, self.rows.num_tiles
        self.reach, rounds, spans = reach, ceil_div(reach, 512), ceil_div(reach, self.SPAN)
        generator = torch.Generator().manual_seed(seed)
        self.codes = torch.randint(0, 256, (num_heads, num_tiles, rounds, 128, 16), generator=generator).byte()
        self.diagonal = torch.full((num_heads, num_tiles, 128), float("nan"))
        self.parts = torch.full((num_heads, num_tiles, spans, 128), float("nan"))
        # [head][tile]: [queries, blocks]. The diagonal's first block has the sum of the diagonal.
        self.exponentials: list[list[torch.Tensor]] = []
        for head in range(num_heads):
            self.exponentials.append([])
            for i_tile, tile in enumerate(self.rows.tile_list):
                self.exponentials[-1].append(self._fill(head, i_tile, tile, generator))

    def _fill(self, head: int, i_tile: int, tile: Any, generator: torch.Generator) -> torch.Tensor:
        length, before = tile.length_tokens, tile.position // 128 * 4
        exact = 2.0 ** torch.randn(length, before, generator=generator)  # many equal bytes
        # 6 bits of exponent, 2 of mantissa.
        code = (((exact.view(torch.int32) + (1 << 20)) >> 21) - 4 * 103).clamp(0, 255)
        block = torch.arange(before)
        for query in range(length):
            place = 4 * (block % 4) + block % 16 // 4
            self.codes[head, i_tile, block // 16, query, place] = code[query].byte()
        self.diagonal[head, i_tile, :length] = before / 4 * (1 + torch.rand(length, generator=generator))
        for i in range(ceil_div(before * 32, self.SPAN)):
            per_span = self.SPAN // 32
            of_span = exact[:, i * per_span : (i + 1) * per_span].sum(1)
            self.parts[head, i_tile, i, :length] = of_span * self.ROUNDING[head]
        stored = (code << 21).int().view(torch.float32) * 2.0**103
        num_blocks = ceil_div(tile.position + length, 32)
        diagonal = torch.zeros(length, num_blocks - before)
        diagonal[:, 0] = self.diagonal[head, i_tile, :length]
        return torch.cat([stored, diagonal], 1)

    @property
    def stored(self) -> StoredShares:
        """Shares as the floor's kernels receive them. These kernels do not read the first member of the scratch."""
        assert hopper is not None
        scratch = hopper.Scratch(
            None, *(x.to(DEVICE) for x in (self.diagonal, self.parts, self.codes.view(torch.int32)))
        )
        return hopper.stored_shares(scratch)._replace(span_tokens=self.SPAN)
