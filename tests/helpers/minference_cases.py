# SPDX-License-Identifier: Apache-2.0
"""Cases of MInference's three patterns, and bounds on their selections.

If a score is so close to the smallest kept score that rounding decides, a kernel may keep either. The selection must
contain everything that is surely kept, and nothing that is surely dropped. The margins are worst-case bounds of float32
arithmetic, u = 2⁻²⁴ per operation, computed from the data in float64.
"""

from dataclasses import dataclass

import torch

from tests.helpers.batches import on_device, random_batch
from tests.helpers.masks import tile_keys
from tests.helpers.method_cases import DEVICE, F32, row_parts
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.minference import reference
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash

F16 = torch.float16
UNIT = 2.0**-24


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    block_tokens: int = 64
    dtype: torch.dtype = F32
    layout: str = "NHD"

    def batch(self) -> Batch:
        # With few keys, some random draws leave too many undecided; the draws of the host are known to be fine.
        drawn = random_batch(
            self.lengths, self.num_heads, self.num_kv_heads, self.head_dim, self.page_size, self.dtype,
            layout=self.layout, gap_tokens=3,
        )  # fmt: skip
        return on_device(drawn, DEVICE)


CASES = [
    Case(((0, 1), (64, 1), (0, 63))),
    Case(((37, 130), (5, 63)), 2, 2, dtype=F16, page_size=64, block_tokens=128, layout="HND"),
    Case(((301, 130), (0, 1)), 4, 2, block_tokens=128),
    Case(((0, 1000),), 1, 1, dtype=F16, page_size=128, layout="HND"),
    Case(((300, 63),), 8, 1, page_size=48, dtype=F16),
    Case(((129, 70),), 6, 2, head_dim=96, block_tokens=128, page_size=128),
    Case(((200, 129),), 2, 1, head_dim=128, dtype=F16),
    Case(((90, 65),), 2, 1, head_dim=256, block_tokens=128),
]
if DEVICE == "cuda":
    CASES += [
        Case(lengths, 8, 2, 128, 128, block_tokens, dtype)
        for lengths in (((1000, 8192),), ((4000, 2049), (0, 63), (130, 1000)))
        for block_tokens, dtype in ((64, torch.bfloat16), (128, torch.float16))
    ]
LONG = Case(((0, 2049),), 1, 1, page_size=64, dtype=F16)
LONGER = Case(((4200, 65),), 1, 1, page_size=128)
"""More key blocks than a single product covers, and more splits than are joined at once."""


def sure_and_possible(scores: torch.Tensor, k: int, margin: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries that every top k within ``margin`` of float64 keeps, and those that some top k may keep.

    Both are flags along the last axis.
    """
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool), torch.ones_like(scores, dtype=torch.bool)
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool), torch.zeros_like(scores, dtype=torch.bool)
    ordered = (scores - margin).sort(-1, descending=True).values, (scores + margin).sort(-1, descending=True).values
    # Surely kept: above the upper bound of the largest dropped score. Possibly: at least the k-th lower bound.
    return scores - margin > ordered[1][..., k : k + 1], scores + margin >= ordered[0][..., k - 1 : k]


def vertical_slash_bounds(method: VerticalSlash, batch: Batch, row: int, head: int):
    """Return (surely, possibly kept) verticals, and the same for slashes.

    An element of Â is exp(s - lse). The rounding error of s is at most (d + 4) u Σ|q k| · scale; that of lse is no
    larger, plus seq_len u for its sum. The sum over the queries adds 64 u. The relative error is twice the first plus
    the other terms.
    """
    q, keys = row_parts(batch, row, head)
    q = q[-method.last_queries :]
    size = float((q.abs() @ keys.abs().T).max()) * batch.scale
    # Sums that agree in ten bits of the mantissa count as equal.
    relative = UNIT * (2 * (q.shape[1] + 4) * size + len(keys) + 64 + 8) + 2.0**-11
    bounds = []
    for sums, k, forced in zip(
        reference.vertical_slash_sums(q, keys, batch.scale),
        (method.vertical_tokens, method.slash_tokens),
        (method.forced_verticals, method.forced_slashes),
        strict=True,
    ):
        margin = sums * relative
        # In order and far above all others, in float64, because float32 could not distinguish these values.
        sums[:forced] = 1e9 - torch.arange(len(sums[:forced]), dtype=sums.dtype, device=sums.device)
        bounds.append(sure_and_possible(sums, k, margin))
    return bounds


def check_between(lower: SparseIndex, index: SparseIndex, upper: SparseIndex) -> None:
    """Check that blocks and keys contain those of ``lower`` and lie within those of ``upper``; few keys may be
    undecided.

    Keys are counted, not lists: a single undecided line of a long row is in every list, but covers very few of its
    keys.
    """
    num_open = num_possible = 0
    for head in range(index.num_heads):
        for i_tile in range(index.rows.num_tiles):
            where = f"head {head}, tile {i_tile}"
            low, middle, high = (x.blocks_of(head, i_tile) for x in (lower, index, upper))
            assert torch.isin(low, middle).all(), f"{where}: {low.tolist()} not all in {middle.tolist()}"
            assert torch.isin(middle, high).all(), f"{where}: {middle.tolist()} beyond {high.tolist()}"
            low, middle, high = (tile_keys(x, head, i_tile) for x in (lower, index, upper))
            assert not (low & ~middle).any(), f"{where}: keys missing"
            assert not (middle & ~high).any(), f"{where}: keys too many"
            num_open += int((high & ~low).sum())
            num_possible += int(high.sum())
    assert num_open <= 0.05 * num_possible, f"margins leave {num_open} of {num_possible} keys open"


def vertical_slash_between(method: VerticalSlash, batch: Batch, *indices: SparseIndex) -> None:
    rows = batch.rows
    layouts = dict.fromkeys(range(batch.num_heads), VerticalSlash(10**9).stripe_layout(rows))
    lower, upper = (SparseIndex.allocate(rows, batch.num_heads, indices[0].block_tokens, layouts) for _ in range(2))
    for row in range(rows.num_rows):
        for head in range(batch.num_heads):
            verticals, slashes = vertical_slash_bounds(method, batch, row, head)
            for i_tile in rows.tiles_of(row):
                for bound, index in enumerate((lower, upper)):
                    reference.set_vertical_slash(verticals[bound], slashes[bound], index, head, i_tile)
    for index in indices:
        check_between(lower, index, upper)


def block_sparse_between(method: BlockSparse, batch: Batch, *indices: SparseIndex) -> None:
    """Check block-sparse indices. A mean of 64 has error 64 u of the mean magnitude, and a product of d terms has error
    d u: 2 · 65 + d + 2 roundings in total."""
    rows = batch.rows
    lower, upper = (SparseIndex.allocate(rows, batch.num_heads, indices[0].block_tokens) for _ in range(2))
    for row in range(rows.num_rows):
        for head in range(batch.num_heads):
            q, keys = row_parts(batch, row, head)
            scores = reference.block_scores(q, keys, batch.scale)
            size = reference.mean_pool(q.abs()) @ reference.mean_pool(keys.abs()).T * batch.scale
            margin = UNIT * (q.shape[1] + 132) * size
            bounds = sure_and_possible(scores, method.top_blocks, margin)
            bounds = [reference.by_tile(kept & (scores > -torch.inf)) for kept in bounds]
            for i_tile in rows.tiles_of(row):
                for kept, index in zip(bounds, (lower, upper), strict=True):
                    reference.set_block_sparse(kept[i_tile - rows.tile_starts[row]], index, head, i_tile)
    for index in indices:
        check_between(lower, index, upper)
