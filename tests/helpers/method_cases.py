# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of methods: selections in poisoned indices, and their lists."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import torch

from tests.helpers.batches import new_index
from tests.helpers.lined import DEVICE
from tests.helpers.masks import tile_keys
from vllm_sparse_kernels.call import Call, HeadGroup
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import SelectSpec, choose_select_engine

# Triton's interpreter multiplies bf16 tiles wrongly, without an error.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
F32 = DTYPES[-1] if DEVICE == "cuda" else torch.float32
POISON = -7

# lengths, heads, kv heads, head_dim, page size, block_tokens, layout
SHAPES: list[tuple[Any, ...]] = [
    ([(0, 1), (0, 63), (0, 1000)], 2, 2, 64, 16, 64, "NHD"),
    ([(477, 300), (300, 63)], 4, 2, 64, 64, 128, "HND"),
    ([(1041, 200)], 4, 1, 64, 128, 128, "HND"),
    ([(633, 130), (129, 1), (255, 2)], 6, 2, 64, 16, 64, "NHD"),
    ([(0, 2049)], 1, 1, 96, 64, 64, "NHD"),
    ([(2300, 70)], 2, 1, 256, 16, 128, "NHD"),
    ([(130, 10), (700, 520)], 8, 1, 64, 48, 128, "NHD"),  # more heads and groups than anchors vote on at once
    ([(477, 300), (0, 63), (801, 1)], 4, 2, 128, 16, 64, "HND"),
]
"""Shapes in which each method's kernels are compared with its reference."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "anchor_attention": [{}, {"sample_tokens": 2, "step_tiles": 1}],
    "flex_vertical_slash": [{}, {"estimating": "spread", "last_queries": 256}],
    "sale": [{}, {"int8_scores": True}],
    "share_prefill": [{"cluster": 0}],
    "sparge_attn": [{}, {"skip_margin": -5.0, "int8_scores": True}, {"skip_margin": -5.0}],
    "top_p": [{"ramp_tokens": 1}],
}
"""Settings of a method that use other kernels, or another amount of memory, than its defaults."""

SMALL: dict[str, list[dict[str, Any]]] = {
    "a_shape": [{"sink_tokens": 50, "local_tokens": 50}],
    "anchor_attention": [
        {"theta": 3.0, "step_tiles": 1},
        {"theta": 0.2, "step_tiles": 1, "sample_tokens": 64, "whole_blocks": True},
    ],
    "block_sparse": [{"top_blocks": 1}],
    "flex_vertical_slash": [{"gamma": 0.7}, {"gamma": 0.5, "estimating": "spread", "max_stripes": 8}],
    "sale": [{"tau": 0.3}],
    "share_prefill": [{"gamma": 0.6, "cluster": 0, "max_sparsity": 0.9, "max_distance": 0.3}],
    "sparge_attn": [
        {"kept_mass": 0.6, "min_similarity": 0.1},
    ],
    "top_p": [
        {"kept_mass": 0.9, "ramp_tokens": 1, "sink_tokens": 32, "local_tokens": 128, "most_tokens": 64},
        {"kept_mass": 0.5, "ramp_tokens": 2048, "sink_tokens": 0, "local_tokens": 128, "peak_share": 1.0},
    ],
    "vertical_slash": [{"vertical_tokens": 30, "slash_tokens": 10, "forced_verticals": 5, "forced_slashes": 5}],
}
"""Parameters that do not keep all of a few hundred keys; methods that are not listed use their demo's."""

Lists = tuple[list[int], list[int]]


def by_turns(cases: Iterable[Any], *others: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield each case with all values of ``others`` on a GPU, and with one of each in turn in the slow interpreter."""
    return product(cases, *others) if DEVICE == "cuda" else zip(cases, *map(cycle, others))


def int32(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def select_on_fastest(call: Call) -> None:
    """Select the call's heads on the engine that a server would choose before trials."""
    choose_select_engine(SelectSpec(call.method, call.q.device, call.cache.head_dim)).engine.select(call)


def select(
    methods: Method | Sequence[Method], batch: Batch, block_tokens: int = 64, heads: Sequence[int] | None = None,
    by_reference: bool = False, rows: Rows | None = None,
) -> SparseIndex:  # fmt: skip
    """Return the selection of ``heads`` (default: all) by kernels or reference, in an index poisoned beforehand.

    ``methods`` is the method of each of these heads, or one method for all.
    """
    rows = rows or batch.rows
    heads = tuple(range(batch.num_heads) if heads is None else heads)
    group = HeadGroup(heads, tuple(methods) if isinstance(methods, Sequence) else (methods,) * len(heads))
    layouts = {head: method.stripe_layout(rows) for head, method in zip(heads, group.methods, strict=True)}
    index = new_index(rows, batch.num_heads, block_tokens, layouts)
    poisoned = [index.block_counts, index.block_ids, index.stripe_positions]
    for tensor in [*poisoned, index.stripe_counts] if index.has_stripes else poisoned:
        tensor.fill_(POISON)
    select_heads = METHODS[name_of(group.method)].reference if by_reference else select_on_fastest
    select_heads(batch.call(index, group))
    if len(heads) == batch.num_heads:
        index.check()
    return index


def uncomputed(*, q: torch.Tensor, out: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace FlashAttention's function in tests that read no result."""
    return out, torch.empty(q.shape[1], len(q))


def lists(index: SparseIndex, head: int, i_tile: int) -> Lists:
    return index.blocks_of(head, i_tile).tolist(), index.stripes_of(head, i_tile).tolist()


def assert_agree(ours: SparseIndex, theirs: SparseIndex) -> None:
    """Check that two selections keep the same keys, except for the few that float32's rounding decides."""
    differing = kept = 0
    for head in range(ours.num_heads):
        for i_tile in range(ours.rows.num_tiles):
            a, b = tile_keys(ours, head, i_tile), tile_keys(theirs, head, i_tile)
            differing, kept = differing + int((a ^ b).sum()), kept + int(b.sum())
    assert differing <= 0.01 * kept, f"{differing} of {kept} keys differ"


def kept_blocks(index: SparseIndex, head: int, i_tile: int) -> torch.Tensor:
    """Return flags of the blocks that the tile keeps: bool [causal blocks]."""
    flags = torch.zeros(index.num_causal_blocks(index.rows.tile_list[i_tile]), dtype=torch.bool, device=DEVICE)
    flags[index.blocks_of(head, i_tile)] = True
    return flags


def all_lists(
    index: SparseIndex, tiles: Iterable[int] | None = None, heads: Iterable[int] | None = None
) -> list[list[Lists]]:
    """Return the lists by head and tile; by default, of all heads and tiles."""
    tiles = range(index.rows.num_tiles) if tiles is None else list(tiles)
    return [[lists(index, head, i) for i in tiles] for head in (range(index.num_heads) if heads is None else heads)]


def row_alone(batch: Batch, row: int) -> Batch:
    """Return a row of a batch as a separate batch, with its own pass."""
    rows, only_row = batch.rows, slice(row, row + 1)
    alone = Rows(
        rows.query_starts[only_row],
        rows.query_lens[only_row],
        rows.context_lens[only_row],
        rows.block_table[only_row],
    )
    return replace(batch, rows=alone)


def row_parts(batch: Batch, row: int, head: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Return a row's queries and keys of one head: [query_len, d], [seq_len, d]."""
    token, query_len = batch.rows.query_starts[row], batch.rows.query_lens[row]
    keys, _ = batch.cache.gather(batch.rows.block_table[row], batch.rows.seq_lens[row])
    i_kv = head // (batch.num_heads // batch.cache.num_kv_heads)
    return batch.q[token : token + query_len, head].to(dtype), keys[:, i_kv].to(dtype)
