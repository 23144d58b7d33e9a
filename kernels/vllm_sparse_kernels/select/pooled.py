# SPDX-License-Identifier: Apache-2.0
"""Blocks of queries and of keys as single tokens, and the products of the ones with the others.

A pooled query is the mean of a tile of 128 queries or of half of one, a pooled key that of a block of 64 keys. All rows
of a step are pooled by the same launches, whose programs take some blocks of one head each. Where means or products of
a large batch would take more than ``SLAB_BYTES``, tiles are selected slab by slab; what a tile selects does not depend
on its slab.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.paged import PagedCache, key_args, load_block, load_queries, query_args
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div, to_device
from vllm_sparse_kernels.select.lists import FIELDS, load_tile
from vllm_sparse_kernels.select.slabs import rows_within
from vllm_sparse_kernels.workspace import Workspace

KEY_BLOCK_TOKENS = 64
"""Keys that one pooled key stands for."""

SLAB_BYTES = 128 << 20
"""Most that a slab's products take, and its pooled keys; more where one tile, or one row's keys, needs more."""

SPLIT_BLOCKS = 8
"""Blocks that one program pools one after the other."""

ALIGNED = tl.constexpr(64)
"""Rows of products are padded to a multiple of this, so that their loads can be wide."""

ROW_FIELDS = 3
"""Columns of the rows' table on the device: a row's keys, its first block and first split, counted over all rows."""

UNSPECIALIZED = (
    "num_heads", "num_tiles", "first_tile", "end_tile", "first_row", "num_blocks", "num_splits", "width",
)  # fmt: skip
"""Kernel arguments that change from step to step: they shall not call for new variants of a kernel."""


class Slab(NamedTuple):
    """Rows whose keys are pooled together, and runs of their tiles whose products are made together."""

    first_row: int
    end_row: int
    num_blocks: int  # of 64 keys, in these rows
    max_blocks: int  # in the longest of them
    runs: list[tuple[int, int]]  # of tiles, [first, end)

    @property
    def width(self) -> int:
        """Columns of a row of products, in units of ``ALIGNED``."""
        return ceil_div(self.max_blocks, ALIGNED.value)


class Pooled(NamedTuple):
    """Means [heads, blocks, head_dim] float32, and each block's mean cosine over all pairs of its tokens, if asked for.

    Heads are entries of a list of query heads, or kv heads; blocks are those of all rows or of a slab.
    """

    means: torch.Tensor
    similarity: torch.Tensor | None  # [heads, blocks] float32


def slabs_of(rows: Rows, num_entries: int, num_kv_heads: int, head_dim: int, per_tile: int) -> list[Slab]:
    """The slabs of a step, for products of ``num_entries`` heads with ``per_tile`` pooled queries in a tile.

    Made by the first layer of a pass that asks for them.
    """
    most_products = SLAB_BYTES // (4 * num_entries * per_tile * ALIGNED.value)  # in units of ``ALIGNED``
    most_blocks = SLAB_BYTES // (4 * num_kv_heads * head_dim)
    key = _make_slabs, most_products, most_blocks
    return rows.once(key, lambda: _make_slabs(rows, most_products, most_blocks))


def _make_slabs(rows: Rows, most_products: int, most_blocks: int) -> list[Slab]:
    blocks, slabs = [ceil_div(seq_len, KEY_BLOCK_TOKENS) for seq_len in rows.seq_lens], []
    for first, end in rows_within(blocks, most_blocks):
        slab = Slab(first, end, sum(blocks[first:end]), max(blocks[first:end]), [])
        num_tiles, end_tile = max(most_products // slab.width, 1), rows.tile_starts[end]
        for tile in range(rows.tile_starts[first], end_tile, num_tiles):
            slab.runs.append((tile, min(tile + num_tiles, end_tile)))
        slabs.append(slab)
    return slabs


def row_table(rows: Rows) -> torch.Tensor:
    """[num_rows, ROW_FIELDS] int32 on the device."""

    def make() -> torch.Tensor:
        blocks = [ceil_div(seq_len, KEY_BLOCK_TOKENS) for seq_len in rows.seq_lens]
        splits = [ceil_div(n, SPLIT_BLOCKS) for n in blocks]
        columns = rows.seq_lens, accumulate(blocks, initial=0), accumulate(splits, initial=0)
        return to_device([n for row in zip(*columns) for n in row], torch.int32, rows.device).view(-1, ROW_FIELDS)

    return rows.once(row_table, make)


def _warps(head_dim: int) -> int:
    """As few as hold 64 tokens in registers: the fewer there are to sum over, the less they wait for each other."""
    return max(2, triton.next_power_of_2(head_dim) // 64)


def pool_queries(
    q: torch.Tensor, rows: Rows, heads: torch.Tensor, per_tile: int, workspace: Workspace, similar: bool
) -> Pooled:
    """[len(heads), num_tiles · per_tile, ...]: tile t's are the ``per_tile`` ones from t · ``per_tile`` on.

    Undefined where a short tile has no queries.
    """
    num_pooled, head_dim = rows.num_tiles * per_tile, q.shape[2]
    means = workspace.empty(len(heads), num_pooled, head_dim)
    similarity = workspace.empty(len(heads), num_pooled) if similar else None
    _pool_queries_kernel[(len(heads), num_pooled)](
        query_args(q), rows.tiles, heads, means, similarity,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), PER_TILE=per_tile, POOL=TILE_TOKENS // per_tile,
        BLOCK=64, num_warps=_warps(head_dim),
    )  # fmt: skip
    return Pooled(means, similarity)


def pool_keys(
    cache: PagedCache, rows: Rows, slab: Slab, heads: torch.Tensor, num_heads: int, workspace: Workspace, similar: bool,
    centered: bool,
) -> Pooled:  # fmt: skip
    """The blocks of the slab's rows: [num_kv_heads, slab.num_blocks, ...].

    heads: the query heads that are selected, of ``num_heads``; kv heads that none of them reads stay undefined.
    similar: whether to measure how alike a block's keys are, about the row's mean key where ``centered``.
    """
    num_kv_heads, head_dim, empty = cache.num_kv_heads, cache.head_dim, workspace.empty
    num_rows = slab.end_row - slab.first_row
    splits = [ceil_div(n, KEY_BLOCK_TOKENS * SPLIT_BLOCKS) for n in rows.seq_lens[slab.first_row : slab.end_row]]
    pooled = Pooled(
        empty(num_kv_heads, slab.num_blocks, head_dim), empty(num_kv_heads, slab.num_blocks) if similar else None
    )
    shape = {
        "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK": KEY_BLOCK_TOKENS,
        "SPLIT": SPLIT_BLOCKS, "FIELDS": ROW_FIELDS,
    }  # fmt: skip

    def launch(
        means: torch.Tensor | None, sums: torch.Tensor | None, similarity: torch.Tensor | None,
        centers: torch.Tensor | None,
    ) -> None:  # fmt: skip
        _pool_keys_kernel[(num_kv_heads, max(splits), num_rows)](
            key_args(cache, rows.block_table), row_table(rows), slab.first_row, slab.num_blocks, sum(splits),
            heads if len(heads) < num_heads else None, len(heads), means, sums, similarity, centers,
            **shape, GROUP=num_heads // num_kv_heads, PAGE=cache.page_size, HEADS=128,
            STAGES=3 if similarity is None else 2, num_warps=_warps(head_dim),
        )  # fmt: skip

    if not centered:
        launch(pooled.means, None, pooled.similarity, None)
        return pooled
    sums, centers = empty(num_kv_heads, sum(splits), head_dim), empty(num_rows, num_kv_heads, head_dim)
    launch(pooled.means, sums, None, None)
    _centers_kernel[(num_kv_heads, num_rows)](
        sums, centers, row_table(rows), slab.first_row, sum(splits), **shape, CHUNK=64
    )
    launch(None, None, pooled.similarity, centers)
    return pooled


def pooled_products(
    q: torch.Tensor, cache: PagedCache, rows: Rows, heads: torch.Tensor, scale: float, per_tile: int,
    workspace: Workspace, min_similarity: torch.Tensor | None = None, centered: bool = False,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:  # fmt: skip
    """For each run of tiles its first one, and scale · q̂ k̂ᵀ: [len(heads), tiles · per_tile, a multiple of 64] float32.

    Undefined where none of a tile's queries may look. −∞ for key blocks less similar than a head's ``min_similarity``
    ([len(heads)]), about their mean where ``centered``; with it how alike the queries of all tiles are, [len(heads),
    num_tiles]. The tensors share their memory: use each before the next.
    """
    similar, num_entries = min_similarity is not None, len(heads)
    queries = pool_queries(q, rows, heads, per_tile, workspace, similar)
    for slab in slabs_of(rows, num_entries, cache.num_kv_heads, cache.head_dim, per_tile):
        with workspace.frame():
            keys = pool_keys(cache, rows, slab, heads, q.shape[1], workspace, similar, centered)
            for first, end in slab.runs:
                with workspace.frame():
                    shape = num_entries, (end - first) * per_tile, slab.width * ALIGNED.value
                    products = workspace.empty(*shape)
                    _products_kernel[(ceil_div(slab.max_blocks, 64), ceil_div(shape[1], 64), num_entries)](
                        queries.means, keys.means, keys.similarity, min_similarity, row_table(rows), rows.tiles, heads,
                        products, slab.width, first, end, rows.num_tiles, slab.first_row, slab.num_blocks, scale,
                        GROUP=q.shape[1] // cache.num_kv_heads, HEAD_DIM=cache.head_dim, PER_TILE=per_tile,
                        BLOCK_M=64, BLOCK_N=64, BLOCK_D=32, BLOCK=KEY_BLOCK_TOKENS, ROW_FIELDS=ROW_FIELDS,
                    )  # fmt: skip
                    yield first, products, queries.similarity


@triton.jit
def is_read(i_kv, heads, num_heads, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Whether any of the query heads reads this kv head; all are read where ``heads`` is None."""
    if heads is None:
        return True
    else:
        found = 0
        for start in range(0, num_heads, HEADS):
            o_h = start + tl.arange(0, HEADS)
            b_head = tl.load(heads + o_h, mask=o_h < num_heads, other=-GROUP)
            found = tl.maximum(found, tl.max((b_head // GROUP == i_kv).to(tl.int32), 0))
        return found > 0


@triton.jit
def _units(b_x):
    """The sum [D] of tokens [N, D], each scaled to unit length; those of length zero stay zero."""
    b_squares = tl.sum(b_x * b_x, 1)
    b_inverse = tl.rsqrt(tl.where(b_squares > 0, b_squares, 1.0))
    return tl.sum(b_x * b_inverse[:, None], 0)


@triton.jit
def _similarity(b_units, count):
    """Mean cosine over all pairs of ``count`` tokens, those with themselves too."""
    return tl.sum(b_units * b_units, 0) / (count * count)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _pool_queries_kernel(
    queries, tiles, heads, means, similarity,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PER_TILE: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean query of POOL tokens of one tile and head, and, where asked for, the mean cosine of all their pairs.

    means [heads, pooled, HEAD_DIM] and similarity [heads, pooled] float32; PER_TILE pooled queries a tile, the
    last ones of a short tile untouched.
    """
    i_entry, i_pooled = tl.program_id(0), tl.program_id(1)
    i_head = tl.load(heads + i_entry)
    _, token, length, _ = load_tile(tiles, i_pooled // PER_TILE)
    begin = i_pooled % PER_TILE * POOL
    length = tl.minimum(length - begin, POOL)
    if length > 0:
        o_d = tl.arange(0, BLOCK_D)
        b_sum = tl.zeros([BLOCK_D], tl.float32)
        b_units = tl.zeros([BLOCK_D], tl.float32)
        for start in tl.static_range(0, POOL, BLOCK):
            b_q = load_queries(queries, i_head, token + begin + start, length - start, BLOCK, HEAD_DIM, BLOCK_D)
            b_q = b_q.to(tl.float32)
            b_sum += tl.sum(b_q, 0)
            if similarity is not None:
                b_units += _units(b_q)
        i_out = i_entry.to(tl.int64) * tl.num_programs(1) + i_pooled
        tl.store(means + i_out * HEAD_DIM + o_d, b_sum / length, mask=o_d < HEAD_DIM)
        if similarity is not None:
            tl.store(similarity + i_out, _similarity(b_units, length.to(tl.float32)))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _pool_keys_kernel(
    keys, row_table, first_row, num_blocks, num_splits, heads, num_heads,
    means, sums, similarity, centers,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, HEADS: tl.constexpr, FIELDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SPLIT blocks of one kv head of one row: whichever of means, their sum and similarity there is room for.

    With ``centers`` similarity is that of the keys less their row's center.
    """
    # Kv heads side by side: in vLLM's usual layout those of a token lie beside each other.
    i_kv, i_split, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if centers is not None:
        # What the launch before has read last is still in the cache.
        i_kv, i_split = tl.num_programs(0) - 1 - i_kv, tl.num_programs(1) - 1 - i_split
        i_row = tl.num_programs(2) - 1 - i_row
    row = row_table + (first_row + i_row) * FIELDS
    seq_len = tl.load(row)
    begin = i_split * SPLIT * BLOCK
    if (begin < seq_len) & is_read(i_kv, heads, num_heads, GROUP, HEADS):
        o_d = tl.arange(0, BLOCK_D)
        in_d = o_d < HEAD_DIM
        first_block = tl.load(row + 1) - tl.load(row_table + first_row * FIELDS + 1)
        o_block = i_kv.to(tl.int64) * num_blocks + first_block
        b_center = tl.zeros([BLOCK_D], tl.float32)
        if centers is not None:
            o_center = (i_row * tl.num_programs(0) + i_kv) * HEAD_DIM
            b_center = tl.load(centers + o_center + o_d, mask=in_d, other=0.0)
        b_sum = tl.zeros([BLOCK_D], tl.float32)
        for start in tl.range(begin, tl.minimum(begin + SPLIT * BLOCK, seq_len), BLOCK, num_stages=STAGES):
            b_k = load_block(keys, first_row + i_row, i_kv, start, seq_len, PAGE, BLOCK, HEAD_DIM, BLOCK_D)
            b_k = b_k.to(tl.float32)
            count = tl.minimum(seq_len - start, BLOCK).to(tl.float32)
            i_out = o_block + start // BLOCK
            if means is not None:
                b_block = tl.sum(b_k, 0)
                b_sum += b_block
                tl.store(means + i_out * HEAD_DIM + o_d, b_block / count, mask=in_d)
            if similarity is not None:
                if centers is not None:
                    in_row = start + tl.arange(0, BLOCK) < seq_len
                    b_k = tl.where(in_row[:, None], b_k - b_center[None, :], 0.0)
                tl.store(similarity + i_out, _similarity(_units(b_k), count))
        if sums is not None:
            first_split = tl.load(row + 2) - tl.load(row_table + first_row * FIELDS + 2)
            o_split = i_kv.to(tl.int64) * num_splits + first_split + i_split
            tl.store(sums + o_split * HEAD_DIM + o_d, b_sum, mask=in_d)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _centers_kernel(
    sums, centers, row_table, first_row, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """A row's mean key of one kv head."""
    i_kv, i_row = tl.program_id(0), tl.program_id(1)
    row = row_table + (first_row + i_row) * FIELDS
    seq_len = tl.load(row)
    first_split = tl.load(row + 2) - tl.load(row_table + first_row * FIELDS + 2)
    source = sums + (i_kv.to(tl.int64) * num_splits + first_split) * HEAD_DIM
    own_splits = tl.cdiv(seq_len, SPLIT * BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for i in range(0, own_splits, CHUNK):
        o_n = i + tl.arange(0, CHUNK)
        mask = (o_n < own_splits)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_sum += tl.load(source + o_n[:, None] * HEAD_DIM + o_d[None, :], mask=mask, other=0.0)
    o_out = (i_row * tl.num_programs(0) + i_kv) * HEAD_DIM
    tl.store(centers + o_out + o_d, tl.sum(b_sum, 0) / seq_len, mask=o_d < HEAD_DIM)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _products_kernel(
    query_means, key_means, similarity, min_similarity, row_table, tiles, heads, products, width,
    first_tile, end_tile, num_tiles, first_row, num_blocks, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PER_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, ROW_FIELDS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M pooled queries of a slab with BLOCK_N key blocks of each row that the queries belong to."""
    i_n, i_m, i_entry = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_kv = tl.load(heads + i_entry) // GROUP
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_tile = first_tile + o_m // PER_TILE
    in_slab = o_tile < end_tile
    b_row = tl.load(tiles + o_tile * FIELDS, mask=in_slab, other=-1)
    b_end = tl.load(tiles + o_tile * FIELDS + 2, mask=in_slab, other=0)
    b_end += tl.load(tiles + o_tile * FIELDS + 3, mask=in_slab, other=0)
    o_q = (i_entry * num_tiles * PER_TILE + first_tile * PER_TILE + o_m)[:, None] * HEAD_DIM
    target = products + (i_entry * (end_tile - first_tile) * PER_TILE + o_m)[:, None] * (width * ALIGNED) + o_n[None, :]
    least = tl.load(tiles + (first_tile + i_m * BLOCK_M // PER_TILE) * FIELDS)
    for i_row in range(least, tl.max(b_row, 0) + 1):
        if i_n * BLOCK_N * BLOCK < tl.max(tl.where(b_row == i_row, b_end, 0), 0):
            row = row_table + i_row * ROW_FIELDS
            in_blocks = o_n < tl.cdiv(tl.load(row), BLOCK)
            first_block = tl.load(row + 1) - tl.load(row_table + first_row * ROW_FIELDS + 1)
            o_block = i_kv.to(tl.int64) * num_blocks + first_block + o_n
            b_s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(0, HEAD_DIM, BLOCK_D):
                o_d = start + tl.arange(0, BLOCK_D)
                in_d = (o_d < HEAD_DIM)[None, :]
                b_q = tl.load(query_means + o_q + o_d[None, :], mask=in_slab[:, None] & in_d, other=0.0)
                b_k = tl.load(
                    key_means + o_block[:, None] * HEAD_DIM + o_d[None, :], mask=in_blocks[:, None] & in_d, other=0.0
                )
                # Three TF32 products: as exact as float32, on the matrix units.
                b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="tf32x3")
            b_s *= scale
            if similarity is not None:
                b_similar = tl.load(similarity + o_block, mask=in_blocks, other=0.0)
                b_s = tl.where((b_similar >= tl.load(min_similarity + i_entry))[None, :], b_s, float("-inf"))
            tl.store(target, b_s, mask=(b_row == i_row)[:, None] & in_blocks[None, :])
