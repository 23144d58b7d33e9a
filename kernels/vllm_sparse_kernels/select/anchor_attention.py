"""AnchorAttention (Zhang et al., 2025: "AnchorAttention: Difference-Aware Sparse Attention with Stripe Granularity").

Blocks of b_q = b_kv = 128; ``step_tiles`` tiles of queries form a group and keep one list of stripes.

1. Equation 1: x_a, the exact row maximum of q·k·scale over the anchor region, which is the initial block and the local
   window from the start of the tile's group to the diagonal (Algorithm 1).
2. Equation 2: key j between initial block and group start is kept for the whole group if for any tile of it
   avgpool(x_a) − avgpool(q)·k_j·scale ≤ θ (section 3.4, Algorithm 2). θ is in natural units, before any exp2.
3. Anchor region (blocks) and stripes (keys) are attended (Algorithm 3, here ``attend``).

Where the paper leaves a choice, or this departs from it:

* Algorithm 2 writes avgpool(Acc) for x_a; equations 1 and 2 mean the row maxima, as Algorithm 1 returns them in M.
* Algorithm 2 tests "<", equation 2 "≤": the equation is followed.
* Algorithm 1 begins the window at 1-based block ⌊(i − 1)/step⌋·step, the last one before the group, which Algorithm 2
  visits too. Here the window begins at the group's start, so that no key counts twice; that block is left to the vote.
* Algorithm 1's partial softmax is not kept for step 3: ``attend`` computes the region again and knows no paper.
* Groups lie at absolute positions: group g covers [g · span, (g + 1) · span), span = 128 · ``step_tiles``. Tiles are
  counted from the row's first query of this step and may lie askew. A tile belongs to the group of its first query, and
  its window begins at that group's start, for its queries past the group's end too. For none of them is the region that
  is attended whole smaller than with aligned tiles, and every tile keeps at least what its own vote selects.
* Of a group cut by a chunk's border, the tiles of this step alone vote: what earlier chunks selected is not kept.
* A row's last tile may be short: averages run over the queries that are there.
* A block of the index whose every key the group keeps is listed as a block and not as stripes: the same keys, but a
  gathered key costs ``attend`` about twice one of a block. Initial block and group starts are multiples of 128, so that
  no block has keys on both sides of a border, and a group that keeps everything has no stripes.

The mean queries are rounded to q's dtype for the matrix units, scores and thresholds are float32. Flags of the vote are
counted per block; whoever writes a stretch of a list adds up the counts before it. No atomics: lists come out sorted
and the same every time.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache, key_args, key_offsets
from vllm_sparse_kernels.rows import TILE_FIELDS, TILE_TOKENS, Rows, ceil_div, to_device
from vllm_sparse_kernels.select.base import Method, require
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, append, tile_blocks

INITIAL_TOKENS = TILE_TOKENS
"""Keys of the initial block, attended by every query."""

VOTE_TOKENS = 128
"""Keys whose votes one program takes; no index has wider blocks."""

VOTE_TILES = 64
"""Tiles of a group that vote at once, at most; larger groups take several passes."""

SPLIT_TOKENS = 4096
"""Candidate keys that one program turns into a stretch of a list, ``CHUNK_TOKENS`` at a time."""

CHUNK_TOKENS = 1024

GROUP_FIELDS = 4
"""Columns of the groups' table on the device: start, first tile, number of tiles, offset."""


class Group(NamedTuple):
    """Tiles of one row whose first queries lie in one span: they share one window start and one list of stripes."""

    start: int  # position
    first_tile: int  # in Rows.tile_list
    num_tiles: int
    offset: int  # of the list, in a head's stripes

    @property
    def num_candidates(self) -> int:
        """Keys between initial block and window: what the group votes on, and the capacity of its list."""
        return max(self.start - INITIAL_TOKENS, 0)


def group_tiles(rows: Rows, span_tokens: int) -> list[list[Group]]:
    """The groups of every row, in the order of their tiles. Starts in a row are consecutive multiples of the span."""
    offset, grouped = 0, []
    for row, (context_len, seq_len) in enumerate(zip(rows.context_lens, rows.seq_lens)):
        groups, first_tile = [], rows.tile_starts[row]
        for i_group in range(context_len // span_tokens, ceil_div(seq_len, span_tokens)):
            tiles_until = ceil_div((i_group + 1) * span_tokens - context_len, TILE_TOKENS)
            end_tile = min(rows.tile_starts[row] + tiles_until, rows.tile_starts[row + 1])
            if first_tile < end_tile:
                groups.append(Group(i_group * span_tokens, first_tile, end_tile - first_tile, offset))
                offset += groups[-1].num_candidates
                first_tile = end_tile
        grouped.append(groups)
    return grouped


class QueryArgs(NamedTuple):
    """q, head_dim contiguous."""

    q: Any
    stride_token: int
    stride_head: int


class IndexArgs(NamedTuple):
    """Tensors of Rows and SparseIndex."""

    tiles: Any
    block_counts: Any
    block_ids: Any
    block_offsets: Any
    stripe_counts: Any
    stripe_positions: Any
    stripe_offsets: Any


class PooledArgs(NamedTuple):
    """What the first kernel leaves for the vote."""

    queries: Any  # [num_heads, num_tiles, BLOCK_D] of q's dtype, mean query of each tile
    anchors: Any  # [num_heads, num_tiles] float32, mean x_a of each tile
    chosen: Any  # [num_heads] uint8, 1 for the heads to be selected


class GroupArgs(NamedTuple):
    """The groups of all rows, and what they vote. Flags and counts lie as the groups' candidates do."""

    table: Any  # [num_groups, GROUP_FIELDS] int32
    row_starts: Any  # [num_rows + 1] int32, a row's first group
    flags: Any  # [num_heads, num_candidates] uint8
    counts: Any  # [num_heads, num_candidates / block_tokens] uint8, kept keys of each block of the index
    num_candidates: int


@dataclass(frozen=True)
class AnchorAttention(Method):
    """Parameters of AnchorAttention; the defaults are the paper's (section 4.1).

    theta: θ, how far under the anchor a key's score may lie, in units of q·k·scale; infinity keeps every key.
    step_tiles: step, tiles of 128 queries that share one selection.
    use_anchor: False sets x_a = 0, the paper's ablation "without anchor" (table 4).
    """

    block_tokens = 128

    theta: float = 12.0
    step_tiles: int = 16
    use_anchor: bool = True

    def __post_init__(self) -> None:
        require(self.theta >= 0, "theta", self.theta, "a number >= 0, or infinity")
        is_count = isinstance(self.step_tiles, int) and self.step_tiles >= 1
        require(is_count, "step_tiles", self.step_tiles, "a whole number of tiles >= 1")

    @property
    def span_tokens(self) -> int:
        """Positions that one group covers."""
        return self.step_tiles * TILE_TOKENS

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        """One list per group, with room for every key between the initial block and the group's start."""
        groups = [group for of_row in group_tiles(rows, self.span_tokens) for group in of_row]
        offsets = tuple(group.offset for group in groups for _ in range(group.num_tiles))
        return StripeLayout(offsets, sum(group.num_candidates for group in groups))

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        rows, device = index.rows, q.device
        grouped = group_tiles(rows, self.span_tokens)
        largest = max(group.num_candidates for of_row in grouped for group in of_row)
        block_d = triton.next_power_of_2(cache.head_dim)
        pooled = PooledArgs(
            torch.empty(index.num_heads, rows.num_tiles, block_d, dtype=q.dtype, device=device),
            torch.empty(index.num_heads, rows.num_tiles, dtype=torch.float32, device=device),
            torch.zeros(index.num_heads, dtype=torch.uint8, device=device),
        )
        index_args = IndexArgs(
            rows.tiles, index.block_counts, index.block_ids, index.block_offsets,
            index.stripe_counts, index.stripe_positions, index.stripe_offsets,
        )  # fmt: skip
        keys = key_args(cache, rows.block_table)
        shape = {
            "HEAD_DIM": cache.head_dim,
            "BLOCK_D": block_d,
            "GROUP": index.num_heads // cache.num_kv_heads,
            "INITIAL": INITIAL_TOKENS,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }
        narrow = block_d * q.element_size() > 256  # bytes of a key, for what fits into shared memory
        _anchor_kernel[(rows.num_tiles, len(heads))](
            QueryArgs(q, q.stride(0), q.stride(1)), keys, rows.tiles, heads, pooled,
            rows.num_tiles, scale, self.span_tokens,
            **shape, USE_ANCHOR=self.use_anchor, BLOCK_M=TILE_TOKENS, BLOCK_N=64 if narrow else 128,
            FIELDS=TILE_FIELDS, num_warps=8, num_stages=2,
        )  # fmt: skip
        groups = _group_args(grouped, index)
        # Launched for rows too short to have candidates as well: warming up then compiles it for groups of any size.
        tiles = min(max(triton.next_power_of_2(self.step_tiles), 16), VOTE_TILES)
        _vote_kernel[(max(largest // VOTE_TOKENS, 1), cache.num_kv_heads, rows.num_rows)](
            keys, groups, pooled, rows.num_tiles, scale, self.theta, self.span_tokens,
            **shape, BLOCK_K=VOTE_TOKENS, INDEX_N=index.block_tokens, BLOCK_T=tiles,
            ONE_PASS=self.step_tiles <= tiles, FIELDS=GROUP_FIELDS, num_warps=4, num_stages=2,
        )  # fmt: skip
        _blocks_kernel[(rows.num_tiles, len(heads))](
            groups, index_args, heads, rows.num_tiles, index.block_ids.stride(0), self.span_tokens,
            INITIAL=INITIAL_TOKENS, INDEX_N=index.block_tokens, CHUNK=CHUNK_BLOCKS,
            FIELDS=TILE_FIELDS, GROUP_FIELDS=GROUP_FIELDS, num_warps=4,
        )  # fmt: skip
        _stripes_kernel[(max(ceil_div(largest, SPLIT_TOKENS), 1), len(groups.table), len(heads))](
            groups, index_args, heads, rows.num_tiles,
            INITIAL=INITIAL_TOKENS, INDEX_N=index.block_tokens, SPLIT=SPLIT_TOKENS, CHUNK=CHUNK_TOKENS,
            FIELDS=GROUP_FIELDS, num_warps=4,
        )  # fmt: skip


def _group_args(grouped: list[list[Group]], index: SparseIndex) -> GroupArgs:
    """The groups on the device, and room for their votes."""
    num_heads, device = index.num_heads, index.rows.device
    row_starts = [0]
    for of_row in grouped:
        row_starts.append(row_starts[-1] + len(of_row))
    flat = [field for of_row in grouped for group in of_row for field in group]
    on_device = to_device(flat + row_starts, torch.int32, device)
    num_candidates = sum(group.num_candidates for of_row in grouped for group in of_row)
    return GroupArgs(
        on_device[: len(flat)].view(-1, GROUP_FIELDS),
        on_device[len(flat) :],
        torch.empty(num_heads, num_candidates, dtype=torch.uint8, device=device),
        torch.empty(num_heads, num_candidates // index.block_tokens, dtype=torch.uint8, device=device),
        num_candidates,
    )


# Numbers that change from step to step must not be specialised on: a server would compile in the middle of its work.
@triton.jit(do_not_specialize=["num_tiles"])
def _anchor_kernel(
    queries, keys, tiles, heads, pooled, num_tiles, scale, span,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, INITIAL: tl.constexpr, PRECISION: tl.constexpr,
    USE_ANCHOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The pooled q and x_a of one tile of one head, where keys lie between the anchor region's parts."""
    i_tile = tl.program_id(0)
    i_head = tl.load(heads + tl.program_id(1))
    i_row = tl.load(tiles + i_tile * FIELDS)
    token = tl.load(tiles + i_tile * FIELDS + 1)
    length = tl.load(tiles + i_tile * FIELDS + 2)
    first = tl.load(tiles + i_tile * FIELDS + 3)
    start = first // span * span
    if i_tile == 0:
        tl.store(pooled.chosen + i_head, 1)
    if start > INITIAL:
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        in_tile = o_m < length
        o_q = (token + o_m).to(tl.int64)[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :]
        b_q = tl.load(queries.q + o_q, mask=in_tile[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
        b_mean = tl.sum(b_q.to(tl.float32), 0) / length
        o_pooled = (i_head * num_tiles + i_tile).to(tl.int64)
        tl.store(pooled.queries + o_pooled * BLOCK_D + o_d, b_mean.to(b_q.dtype))
        if USE_ANCHOR:
            base = keys.k + (i_head // GROUP).to(tl.int64) * keys.stride_head
            table = keys.block_table + i_row.to(tl.int64) * keys.stride_table
            region = (base, keys, table, start, first, first + length)
            b_max = _region_max(b_q, region, INITIAL, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION)
            tl.store(pooled.anchors + o_pooled, tl.sum(tl.where(in_tile, b_max * scale, 0.0), 0) / length)
        else:
            tl.store(pooled.anchors + o_pooled, 0.0)


@triton.jit
def _region_max(
    b_q, region, INITIAL: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Row maxima of q·k over the initial block and the window: [BLOCK_M]."""
    start, first, end = region[3], region[4], region[5]
    b_max = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
    # As one run of positions that ends with the window; only blocks past the tile's first query need a mask.
    head = start - INITIAL
    full = head + (first + 1 - head) // BLOCK_N * BLOCK_N
    b_max = _walk_max(b_q, region, head, full, b_max, False, INITIAL, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION)
    return _walk_max(b_q, region, full, end, b_max, True, INITIAL, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION)


@triton.jit
def _walk_max(
    b_q, region, begin, stop, b_max, MASKED: tl.constexpr, INITIAL: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold positions [begin, stop) into the row maxima; those before the window stand for the initial block's."""
    base, keys, table, start, first, end = region
    o_m = first + tl.arange(0, b_q.shape[0])
    o_d = tl.arange(0, BLOCK_D)
    for i in range(begin, stop, BLOCK_N):
        o_n = tl.where(i < start, i - (start - INITIAL), i) + tl.arange(0, BLOCK_N)
        o_k = key_offsets(table, o_n, o_n < end, keys.page_size, keys.stride_page, keys.stride_token)
        b_k = tl.load(base + o_k[:, None] + o_d[None, :], mask=(o_d < HEAD_DIM)[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if MASKED:
            b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        b_max = tl.maximum(b_max, tl.max(b_s, 1))
    return b_max


@triton.jit(do_not_specialize=["num_tiles"])
def _vote_kernel(
    keys, groups, pooled, num_tiles, scale, theta, span,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, INITIAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, INDEX_N: tl.constexpr, BLOCK_T: tl.constexpr, ONE_PASS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """128 keys of one kv head: loaded once, voted on by all groups that begin behind them, and all of its heads."""
    i_kv = tl.program_id(1)
    i_row = tl.program_id(2)
    candidate = tl.program_id(0) * BLOCK_K
    i_first = tl.load(groups.row_starts + i_row)
    i_end = tl.load(groups.row_starts + i_row + 1)
    # The row's groups begin at consecutive multiples of the span: those that begin behind these keys are its last.
    ahead = (candidate + INITIAL) // span + 1 - tl.load(groups.table + i_first * FIELDS) // span
    i_first += tl.maximum(ahead, 0)
    if i_first < i_end:
        o_n = candidate + INITIAL + tl.arange(0, BLOCK_K)
        o_d = tl.arange(0, BLOCK_D)
        table = keys.block_table + i_row.to(tl.int64) * keys.stride_table
        o_k = key_offsets(table, o_n, o_n >= 0, keys.page_size, keys.stride_page, keys.stride_token)
        base = keys.k + i_kv.to(tl.int64) * keys.stride_head
        b_k = tl.load(base + o_k[:, None] + o_d[None, :], mask=(o_d < HEAD_DIM)[None, :], other=0.0)
        for i in range((i_end - i_first) * GROUP):
            group = groups.table + (i_first + i // GROUP) * FIELDS
            i_head = i_kv * GROUP + i % GROUP
            o_tile = i_head.to(tl.int64) * num_tiles + tl.load(group + 1)
            voters = tl.where(tl.load(pooled.chosen + i_head) != 0, tl.load(group + 2), 0)
            where = (pooled, o_tile, voters)
            b_kept = _votes(b_k, where, 0, scale, theta, BLOCK_T, BLOCK_D, PRECISION)
            if not ONE_PASS:
                for o in range(BLOCK_T, voters, BLOCK_T):
                    b_kept |= _votes(b_k, where, o, scale, theta, BLOCK_T, BLOCK_D, PRECISION)
            o_flag = i_head.to(tl.int64) * groups.num_candidates + tl.load(group + 3) + candidate
            tl.store(groups.flags + o_flag + tl.arange(0, BLOCK_K), b_kept.to(tl.uint8))
            b_count = tl.sum(tl.reshape(b_kept, [BLOCK_K // INDEX_N, INDEX_N]), 1)
            tl.store(groups.counts + o_flag // INDEX_N + tl.arange(0, BLOCK_K // INDEX_N), b_count.to(tl.uint8))


@triton.jit
def _votes(b_k, where, first, scale, theta, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """Equation 2 for up to BLOCK_T tiles of a group: [keys] int32, 1 where any of them keeps the key."""
    pooled, o_tile, voters = where
    o_t = first + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    in_group = o_t < voters
    b_q = tl.load(pooled.queries + (o_tile + o_t)[:, None] * BLOCK_D + o_d[None, :], mask=in_group[:, None], other=0.0)
    b_anchor = tl.load(pooled.anchors + o_tile + o_t, mask=in_group, other=0.0)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
    b_kept = (b_anchor[None, :] - b_s <= theta) & in_group[None, :]
    return tl.max(b_kept.to(tl.int32), 1)


@triton.jit(do_not_specialize=["num_tiles", "stride_ids"])
def _blocks_kernel(
    groups, index, heads, num_tiles, stride_ids, span,
    INITIAL: tl.constexpr, INDEX_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
    GROUP_FIELDS: tl.constexpr,
):  # fmt: skip
    """One tile's list of blocks for one head: the anchor region's, and those that its group keeps whole."""
    i_tile = tl.program_id(0)
    i_head = tl.load(heads + tl.program_id(1)).to(tl.int64)
    i_first = tl.load(groups.row_starts + tl.load(index.tiles + i_tile * FIELDS))
    first = tl.load(index.tiles + i_tile * FIELDS + 3)
    # The row's groups begin at consecutive multiples of the span.
    group = groups.table + (i_first + (first - tl.load(groups.table + i_first * GROUP_FIELDS)) // span) * GROUP_FIELDS
    counts = groups.counts + (i_head * groups.num_candidates + tl.load(group + 3)) // INDEX_N
    window = tl.load(group) // INDEX_N
    _, num_causal = tile_blocks(index.tiles, i_tile, INDEX_N, FIELDS)
    target = index.block_ids + i_head * stride_ids + tl.load(index.block_offsets + i_tile)
    count = 0
    for i in range(0, num_causal, CHUNK):
        o_n = i + tl.arange(0, CHUNK)
        o_count = o_n - INITIAL // INDEX_N
        b_count = tl.load(counts + o_count, mask=(o_count >= 0) & (o_n < window), other=INDEX_N)
        count = append(target, count, o_n, (o_n < num_causal) & (b_count == INDEX_N))
    tl.store(index.block_counts + i_head * num_tiles + i_tile, count)


@triton.jit(do_not_specialize=["num_tiles"])
def _stripes_kernel(
    groups, index, heads, num_tiles,
    INITIAL: tl.constexpr, INDEX_N: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """A stretch of one group's stripes for one head; whoever writes the last one also writes every tile's count."""
    i_head = tl.load(heads + tl.program_id(2))
    group = groups.table + tl.program_id(1) * FIELDS
    num_candidates = tl.maximum(tl.load(group) - INITIAL, 0)
    o_tile = i_head.to(tl.int64) * num_tiles + tl.load(group + 1)
    begin = tl.program_id(0) * SPLIT
    if (begin == 0) | (begin < num_candidates):
        o_flag = i_head.to(tl.int64) * groups.num_candidates + tl.load(group + 3)
        counts = groups.counts + o_flag // INDEX_N
        count = 0
        for i in range(0, begin // INDEX_N, CHUNK):
            o_b = i + tl.arange(0, CHUNK)
            b_count = tl.load(counts + o_b, mask=o_b < begin // INDEX_N, other=0).to(tl.int32)
            count += tl.sum(tl.where(b_count < INDEX_N, b_count, 0), 0)
        target = index.stripe_positions + tl.load(index.stripe_offsets + o_tile)
        for i in range(begin, tl.minimum(begin + SPLIT, num_candidates), CHUNK):
            o_n = i + tl.arange(0, CHUNK)
            in_list = o_n < num_candidates
            b_kept = tl.load(groups.flags + o_flag + o_n, mask=in_list, other=0)
            b_count = tl.load(counts + o_n // INDEX_N, mask=in_list, other=0)
            count = append(target, count, INITIAL + o_n, (b_kept != 0) & (b_count < INDEX_N))
        if begin + SPLIT >= num_candidates:
            for i in range(0, tl.load(group + 2), 32):
                o_t = i + tl.arange(0, 32)
                tl.store(index.stripe_counts + o_tile + o_t, count, mask=o_t < tl.load(group + 2))
