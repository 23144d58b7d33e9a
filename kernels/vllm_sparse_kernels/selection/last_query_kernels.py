# SPDX-License-Identifier: Apache-2.0
"""Kernels of ``last_queries``: the log-sum-exp of each query over splits of the keys, and the sums of Â.

*Diagonals of blocks*: a diagonal is the block number of a query's position minus that of a key's. Key tiles are the
blocks. The first kernel stores the weight of each block for each query, and a second kernel sums these weights. Any
queries are possible.

*Diagonals of single keys* are those of a row's last 64 queries. Key tiles are counted from the row's end: tile j holds
the 64 positions before ``seq_len - 64 j``. Entry (r, c) of its part of Â, a 64 x 64 matrix, then lies on diagonal
64 j + r - c.

These are summed without moving Â between threads. The heads alternate in the stacked rows, 16 queries at a time. The
matrix instruction distributes rows to the warps in groups of 16. With one warp per head, a thread therefore holds
entries (8 A + g, 8 J + c) of one head's tile: all 64 pairs of A and J, one g and two c. The thread sums entries with
equal A - J, which leaves one value for eight of them. Only these values move between lanes, each c to the lane of g -
c.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.online_softmax import add_exponentials, finite_maximum
from vllm_sparse_kernels.paged import key_offsets, load_queries_at
from vllm_sparse_kernels.selection.lists import load_row, place_in_slab
from vllm_sparse_kernels.vectors import padded_mask

KEY_TILE = Constant(64)
"""Keys of a tile of Â, and maximum number of queries for diagonals of single keys."""

LANES = Constant(4)
"""Threads that hold a row of the matrix instruction's result."""

SPLITS_AT_ONCE = Constant(64)
"""Splits whose log-sum-exps are loaded at a time."""

UNSPECIALIZED = ("num_selected", "first_row", "num_rows", "capacity")
"""Kernel arguments that change from step to step and must not cause new variants of a kernel."""


class LastArgs(NamedTuple):
    """Arguments of both passes over the keys, in addition to ``SumArgs``."""

    queries: Any  # QueryArgs
    keys: Any  # KeyArgs
    heads: Any  # [n] int32, numbers of the selected query heads
    last_queries: int  # queries from which Â is computed, if the chunk has so many
    partial: Any  # [rows of the slab, n, most_splits, QUERIES] float32: log-sum-exp of each split, in base 2
    by_block: Any  # [n, capacity / 64, QUERIES] float32: weight of each block; None for diagonals of keys
    most_splits: int  # maximum number of splits of a row's keys
    least_tiles: int  # minimum number of key tiles of a split
    scale: float  # factor from q·k to scores in base 2


class StackShape(NamedTuple):
    """Compile-time sizes of both passes over the keys; every field is a ``tl.constexpr``."""

    GROUP: Any  # query heads of a kv head
    MEMBERS: Any  # query heads that one program stacks, a power of two
    QUERIES: Any  # rows of one head in a stack, a multiple of 64
    SPREAD: Any  # whether queries are spread over the chunk; otherwise they are its last queries
    BAND: Any  # 1: diagonals of keys; 64: of blocks
    HEAD_DIM: Any
    BLOCK_D: Any  # HEAD_DIM rounded up to a power of two
    PAGE: Any  # tokens of a page
    SELECTED: Any  # selected heads rounded up to a power of two


class SumArgs(NamedTuple):
    """Sums of Â as arguments of kernels; see ``last_queries.Sums``."""

    totals: Any  # float32, ``Sums.values``; Triton's tuples already have a field ``values``
    rows: Any  # [num_rows + 1, 4] int32: ``Rows.row_table``
    patterns: Any  # [n, num_rows] int32: entries other than 0 get no sums; or None


class Work(NamedTuple):
    """A program's stack of query heads, and its split of a row's keys."""

    i_kv: Any
    i_part: Any  # stack of the kv head
    i_row: Any
    token: Any  # the row's first query in q
    query_len: Any
    seq_len: Any
    b_selected: Any  # [MEMBERS] places of the stacked heads in ``heads``, -1 for heads without work
    first: Any  # first tile of the split
    end: Any
    tiles_end: Any  # position from which tiles are counted backwards
    num_splits: Any  # of the row
    table: Any  # pointer to the row's pages


class SumTarget(NamedTuple):
    """Rows of Â, and where their sums are stored."""

    columns: Any  # [MEMBERS] pointers to a head's column sums
    others: Any  # pointers to its sums of diagonals [MEMBERS], or to each query's weights of blocks
    b_position: Any  # [MEMBERS · QUERIES] positions of the queries
    b_lse: Any  # [MEMBERS · QUERIES] log-sum-exps of the queries, in base 2


@triton.jit
def _query_offsets(b_query, query_len, last_queries, QUERIES: tl.constexpr, SPREAD: tl.constexpr):
    """Return the offsets in the chunk of the queries from which Â is computed.

    They fill the last of QUERIES entries; negative entries are empty. The last entry is the chunk's last query.
    """
    count = tl.minimum(last_queries, query_len)
    b_i = b_query - (QUERIES - count)
    b_offset = (b_i + 1) * query_len // count - 1 if SPREAD else query_len - count + b_i
    return tl.where(b_i < 0, -1, b_offset)


@triton.jit
def _load_work(args, sums, num_selected, first_row, num_rows, SHAPE):
    """Return the program's work. Grid: (splits, kv heads · stacks of a kv head, rows)."""
    PARTS: tl.constexpr = (SHAPE.GROUP + SHAPE.MEMBERS - 1) // SHAPE.MEMBERS
    i_split, i_kv, i_part = tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    i_row = first_row + tl.program_id(2)
    token, query_len, seq_len, _ = load_row(sums.rows, i_row)
    b_member = i_part * SHAPE.MEMBERS + tl.arange(0, SHAPE.MEMBERS)
    o_selected = tl.arange(0, SHAPE.SELECTED)
    listed = o_selected < num_selected
    if sums.patterns is not None:
        listed = listed & (tl.load(sums.patterns + o_selected * num_rows + i_row, mask=listed, other=1) == 0)
    b_listed = tl.load(args.heads + o_selected, mask=listed, other=-1)
    b_same = (b_listed[None, :] == (i_kv * SHAPE.GROUP + b_member)[:, None]) & (b_member < SHAPE.GROUP)[:, None]
    b_selected = tl.max(tl.where(b_same, o_selected[None, :], -1), 1)
    num_tiles = tl.cdiv(seq_len, KEY_TILE)
    tiles = tl.maximum(args.least_tiles, tl.cdiv(num_tiles, args.most_splits))  # of a split
    first, end = i_split * tiles, tl.minimum((i_split + 1) * tiles, num_tiles)
    tiles_end = num_tiles * KEY_TILE if SHAPE.BAND > 1 else seq_len
    table = args.keys.block_table + i_row.to(tl.int64) * args.keys.stride_table
    return Work(
        i_kv, i_part, i_row, token, query_len, seq_len, b_selected, first, end, tiles_end,
        tl.cdiv(num_tiles, tiles), table,
    )  # fmt: skip


@triton.jit
def _repeat_for_rows(b_member, SHAPE):
    """Repeat a value of each stacked head for each stacked row: [MEMBERS] → [MEMBERS · QUERIES]."""
    b_value = tl.broadcast_to(b_member[None, :, None], [SHAPE.QUERIES // 16, SHAPE.MEMBERS, 16])
    return tl.reshape(b_value, [SHAPE.MEMBERS * SHAPE.QUERIES])


@triton.jit
def _queries_of_rows(SHAPE):
    """Return the number of the query in each stacked row: 16 queries of each head in turn."""
    o = tl.arange(0, SHAPE.MEMBERS * SHAPE.QUERIES)
    return o // (SHAPE.MEMBERS * 16) * 16 + o % 16


@triton.jit
def _load_queries(args, work, SHAPE):
    """Load stacked queries, with 0 in empty rows.

    Also return their positions (negative for empty rows), and the number of keys that all of them attend to.
    """
    query_len, context_len = work.query_len, work.seq_len - work.query_len
    b_query = _query_offsets(_queries_of_rows(SHAPE), query_len, args.last_queries, SHAPE.QUERIES, SHAPE.SPREAD)
    o_r = tl.arange(0, SHAPE.MEMBERS * SHAPE.QUERIES)
    b_head = work.i_kv * SHAPE.GROUP + work.i_part * SHAPE.MEMBERS + o_r // 16 % SHAPE.MEMBERS
    is_query = (b_query >= 0) & (_repeat_for_rows(work.b_selected, SHAPE) >= 0)
    o_q = work.token + b_query
    b_q = load_queries_at(args.queries, b_head[:, None], o_q, is_query, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
    b_position = tl.where(b_query >= 0, context_len + b_query, -1)
    num_common = context_len + tl.min(tl.where(b_query >= 0, b_query, query_len), 0) + 1
    return b_q, b_position, num_common


@triton.jit
def _unmasked_tiles(work, end, num_common, SHAPE):
    """Return the range of the split's tiles up to ``end`` that need no mask: most of them.

    ``num_common`` keys are visible to all queries.
    """
    begin = tl.minimum(tl.maximum(tl.cdiv(work.tiles_end - num_common, KEY_TILE), work.first), end)
    if SHAPE.BAND > 1:
        return begin, end
    else:
        return begin, tl.minimum(tl.maximum(work.seq_len // KEY_TILE, begin), end)  # a tile may begin before the row


@triton.jit
def _load_pages(work, start, SHAPE):
    """Load the pages of the key tile at ``start``, if there are bands; any page for positions outside the row.

    Loops look up the pages one tile ahead and keep them in registers. Otherwise a tile's copy would wait for the
    lookup, and could not start before the previous tile is finished.
    """
    if SHAPE.BAND > 1:
        o_n = tl.maximum(start + tl.arange(0, KEY_TILE), 0)
        return tl.load(work.table + o_n // SHAPE.PAGE, mask=o_n < work.seq_len, other=0)
    else:
        return 0


@triton.jit
def _load_tile(keys, work, b_page, start, WHOLE: tl.constexpr, SHAPE):
    """Load the key tile at ``start``, with 0 past the row's keys. A WHOLE tile does not reach past them.

    ``b_page`` is the page of each key, if there are bands.
    """
    o_n, o_d = start + tl.arange(0, KEY_TILE), tl.arange(0, SHAPE.BLOCK_D)
    in_row = (o_n >= 0) & (o_n < work.seq_len)
    if SHAPE.BAND > 1:
        o_k = b_page.to(tl.int64) * keys.stride_page + o_n % SHAPE.PAGE * keys.stride_token
    else:
        o_k = key_offsets(work.table, o_n, in_row, SHAPE.PAGE, keys.stride_page, keys.stride_token)
    k_tile = keys.k + work.i_kv.to(tl.int64) * keys.stride_head + o_k[:, None] + o_d[None, :]
    if WHOLE and SHAPE.HEAD_DIM == SHAPE.BLOCK_D:
        return tl.load(k_tile)
    elif WHOLE:
        return tl.load(k_tile, mask=(o_d < SHAPE.HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(k_tile, mask=padded_mask(in_row, SHAPE.HEAD_DIM, SHAPE.BLOCK_D), other=0.0)


@triton.jit
def _scores(b_q, b_position, keys, work, b_page, start, WHOLE: tl.constexpr, SHAPE):
    """Compute unscaled scores of queries at ``b_position`` on the key tile at ``start``.

    Scores that the causal mask excludes are -inf. All queries see a WHOLE tile.
    """
    b_k = _load_tile(keys, work, b_page, start, WHOLE, SHAPE)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [MEMBERS · QUERIES, KEY_TILE]
    if not WHOLE:
        o_n = start + tl.arange(0, KEY_TILE)
        b_seen = (o_n[None, :] <= b_position[:, None]) & (o_n >= 0)[None, :]
        b_s = tl.where(b_seen, b_s, float("-inf"))
    return b_s


@triton.jit(do_not_specialize=UNSPECIALIZED)
def split_lse_kernel(args, sums, num_selected, first_row, num_rows, SHAPE):
    """Write partial[row, head, split, query], the log-sum-exp in base 2 of one query over one split of the keys.

    LANES threads hold a row's scores, and each pair of keys goes to the next thread. Each thread keeps the maximum and
    the sum of its scores. Threads exchange data only at the end, when these are merged.

    Grid: (splits, kv heads · stacks of a kv head, rows). Bound by the matrix units and exponentials; keys are read
    once.
    """
    work = _load_work(args, sums, num_selected, first_row, num_rows, SHAPE)
    if (tl.max(work.b_selected, 0) < 0) | (work.first >= work.end):
        return
    b_q, b_position, num_common = _load_queries(args, work, SHAPE)
    b_max = tl.full([SHAPE.MEMBERS * SHAPE.QUERIES, LANES], float("-inf"), tl.float32)
    b_sum = tl.zeros([SHAPE.MEMBERS * SHAPE.QUERIES, LANES], tl.float32)
    # Masked tiles, tiles without a mask and, for diagonals of keys, a masked tile that may begin before the row. Most
    # tiles therefore need no mask.
    unmasked, masked = _unmasked_tiles(work, work.end, num_common, SHAPE)
    b_max, b_sum = _lse_of_tiles(b_q, b_position, args, work, work.first, unmasked, False, b_max, b_sum, SHAPE)
    b_max, b_sum = _lse_of_tiles(b_q, b_position, args, work, unmasked, masked, True, b_max, b_sum, SHAPE)
    if SHAPE.BAND == 1:
        b_max, b_sum = _lse_of_tiles(b_q, b_position, args, work, masked, work.end, False, b_max, b_sum, SHAPE)
    b_selected = _repeat_for_rows(work.b_selected, SHAPE)
    o_partial = (tl.program_id(2) * num_selected + b_selected) * args.most_splits + tl.program_id(0)
    target = args.partial + o_partial.to(tl.int64) * SHAPE.QUERIES + _queries_of_rows(SHAPE)
    # Merge the maxima and sums of the threads.
    b_most = tl.max(b_max, 1)
    b_total = tl.sum(b_sum * tl.exp2(b_max - finite_maximum(b_most)[:, None]), 1)
    tl.store(target, b_most + tl.log2(b_total), mask=b_selected >= 0)


@triton.jit
def _lse_of_tiles(b_q, b_position, args, work, first, end, WHOLE: tl.constexpr, b_max, b_sum, SHAPE):
    """Add the scores on tiles [first, end) to each thread's maximum and sum [MEMBERS · QUERIES, LANES]."""
    b_page = _load_pages(work, work.tiles_end - (first + 1) * KEY_TILE, SHAPE)
    for i_tile in range(first, end):
        start = work.tiles_end - (i_tile + 1) * KEY_TILE
        b_s = _scores(b_q, b_position, args.keys, work, b_page, start, WHOLE, SHAPE)
        b_page = _load_pages(work, start - KEY_TILE, SHAPE)
        b_s = tl.reshape(b_s, [b_s.shape[0], KEY_TILE // (2 * LANES), LANES, 2])
        b_new = tl.maximum(b_max, tl.max(tl.max(b_s, 3), 1) * args.scale)
        b_shift = finite_maximum(b_new)
        b_p = tl.exp2(b_s * args.scale - b_shift[:, None, :, None])
        b_sum = b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.sum(b_p, 3), 1)
        b_max = b_new
    return b_max, b_sum


@triton.jit
def _joined_lse(args, work, b_position, num_selected, SHAPE):
    """Join the splits of each stacked row, in order. Empty rows get +inf, which makes all weights 0."""
    b_selected, o_r = _repeat_for_rows(work.b_selected, SHAPE), _queries_of_rows(SHAPE)
    valid = (b_selected >= 0) & (b_position >= 0)
    o_first = (tl.program_id(2) * num_selected + b_selected).to(tl.int64) * args.most_splits * SHAPE.QUERIES + o_r
    b_max = tl.full([SHAPE.MEMBERS * SHAPE.QUERIES], float("-inf"), tl.float32)
    b_sum = tl.zeros([SHAPE.MEMBERS * SHAPE.QUERIES], tl.float32)
    for start in range(0, work.num_splits, SPLITS_AT_ONCE):
        o_split = start + tl.arange(0, SPLITS_AT_ONCE)
        inside = valid[:, None] & (o_split < work.num_splits)[None, :]
        b_lse = tl.load(
            args.partial + o_first[:, None] + o_split[None, :] * SHAPE.QUERIES, mask=inside, other=float("-inf")
        )
        b_max, b_sum = add_exponentials(b_max, b_sum, b_lse)
    return tl.where(valid, b_max + tl.log2(b_sum), float("inf"))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sums_kernel(args, sums, num_selected, first_row, num_rows, capacity, SHAPE):
    """Write column sums of the program's key tiles, and the weight of each query in them or the sums of diagonals.

    Tile j holds one part of the diagonals ``[64 j, 64 j + 64)``, and the other part of the 64 diagonals before them.
    The program therefore reads one tile more than its own.

    Grid: as ``split_lse_kernel``. Bound by the matrix units and exponentials; keys are read once.
    """
    work = _load_work(args, sums, num_selected, first_row, num_rows, SHAPE)
    if (tl.max(work.b_selected, 0) < 0) | (work.first >= work.end):
        return
    b_q, b_position, num_common = _load_queries(args, work, SHAPE)
    b_lse = _joined_lse(args, work, b_position, num_selected, SHAPE)
    begin = place_in_slab(sums.rows, work.i_row, first_row)
    b_readable = tl.maximum(work.b_selected, 0).to(tl.int64)  # addresses of heads without work must exist
    columns = sums.totals + (b_readable * capacity + begin)
    if SHAPE.BAND > 1:
        b_first = _repeat_for_rows((b_readable * capacity + begin) // SHAPE.BAND, SHAPE)
        others = args.by_block + b_first * SHAPE.QUERIES + _queries_of_rows(SHAPE)
        b_before = 0
        stop = work.end
    else:
        others = columns + tl.cast(num_selected, tl.int64) * capacity
        b_before = tl.zeros([SHAPE.MEMBERS, 8, 8, 2, 2, 2], tl.float32)
        stop = work.end + 1
    target = SumTarget(columns, others, b_position, b_lse)
    unmasked, masked = _unmasked_tiles(work, stop, num_common, SHAPE)
    b_before = _sums_of_tiles(b_q, args, work, work.first, unmasked, False, target, b_before, SHAPE)
    b_before = _sums_of_tiles(b_q, args, work, unmasked, masked, True, target, b_before, SHAPE)
    if SHAPE.BAND == 1:
        _sums_of_tiles(b_q, args, work, masked, stop, False, target, b_before, SHAPE)


@triton.jit
def _sums_of_tiles(b_q, args, work, first, end, WHOLE: tl.constexpr, target, b_before, SHAPE):
    """Store the sums over tiles [first, end).

    ``b_before`` is the part of the last tile's diagonals that the next tile completes; it is returned for that tile.
    """
    listed = work.b_selected >= 0
    b_page = _load_pages(work, work.tiles_end - (first + 1) * KEY_TILE, SHAPE)
    for i_tile in range(first, end):
        start = work.tiles_end - (i_tile + 1) * KEY_TILE
        b_s = _scores(b_q, target.b_position, args.keys, work, b_page, start, WHOLE, SHAPE)
        b_page = _load_pages(work, start - KEY_TILE, SHAPE)
        b_p = tl.exp2(b_s * args.scale - target.b_lse[:, None])
        o_n = start + tl.arange(0, KEY_TILE)
        b_column = tl.sum(tl.sum(tl.reshape(b_p, [SHAPE.QUERIES // 16, SHAPE.MEMBERS, 16, KEY_TILE]), 0), 1)
        in_split = (o_n >= tl.maximum(work.tiles_end - work.end * KEY_TILE, 0)) & (o_n < work.seq_len)
        tl.store(target.columns[:, None] + o_n[None, :], b_column, mask=listed[:, None] & in_split[None, :])
        if SHAPE.BAND > 1:
            b_listed = _repeat_for_rows(listed.to(tl.int32), SHAPE) != 0
            tl.store(target.others + start // SHAPE.BAND * SHAPE.QUERIES, tl.sum(b_p, 1), mask=b_listed)
        else:
            b_same, b_earlier = _diagonal_sums(b_p, SHAPE.MEMBERS, 0), _diagonal_sums(b_p, SHAPE.MEMBERS, -8)
            b_slash = _sum_rotated(b_before + b_earlier, SHAPE.MEMBERS)
            o_slash = (i_tile - 1) * KEY_TILE + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 8)[None, :]
            in_diagonals = (o_slash >= work.first * KEY_TILE) & (o_slash < work.seq_len)
            tl.store(
                target.others[:, None, None] + o_slash[None, :, :], b_slash,
                mask=listed[:, None, None] & in_diagonals[None, :, :],
            )  # fmt: skip
            b_before = b_same
    return b_before


@triton.jit
def _diagonal_sums(b_p, MEMBERS: tl.constexpr, FIRST: tl.constexpr):
    """Sum the diagonals [8 FIRST, 8 FIRST + 64) over A - J: [MEMBERS, g, c, 2, 2, 2].

    The last three axes are the binary digits of the number of a group of eight diagonals.
    """
    b_x = tl.reshape(b_p, [4, MEMBERS, 2, 8, 8, 8])
    b_x = tl.reshape(tl.permute(b_x, (1, 3, 5, 0, 2, 4)), [MEMBERS, 8, 8, 64])
    return tl.join(
        tl.join(_sum_two_groups(b_x, FIRST), _sum_two_groups(b_x, FIRST + 2)),
        tl.join(_sum_two_groups(b_x, FIRST + 1), _sum_two_groups(b_x, FIRST + 3)),
    )


@triton.jit
def _sum_two_groups(b_x, i: tl.constexpr):
    """Sum the diagonals [8 i, 8 i + 8) and [8 i + 32, 8 i + 40) over A - J: [.., g, c, 2]."""
    return tl.join(_sum_diagonal_group(b_x, i), _sum_diagonal_group(b_x, i + 4))


@triton.jit
def _sum_diagonal_group(b_x, i: tl.constexpr):
    """Sum entries (8 A + g, 8 J + c) of [.., g, c, 8 A + J] on the diagonals [8 i, 8 i + 8) over A - J."""
    o_g, o_c = tl.arange(0, 8)[None, :, None], tl.arange(0, 8)[None, None, :]
    return tl.where(o_g >= o_c, _sum_block_diagonal(b_x, i), _sum_block_diagonal(b_x, i + 1))


@triton.jit
def _sum_block_diagonal(b_x, i: tl.constexpr):
    """Sum the entries of [.., 8 A + J] with A - J = i."""
    o = tl.arange(0, 64)
    return tl.sum(tl.where((o // 8 - o % 8 == i)[None, None, None, :], b_x, -0.0), 3)


@triton.jit
def _sum_rotated(b_x, MEMBERS: tl.constexpr):
    """Sum over equal g - c mod 8: [MEMBERS, g, c, 2, 2, 2] → [MEMBERS, g - c mod 8, 8]."""
    b_x = tl.reshape(b_x, [MEMBERS, 8, 8, 8])
    b_source = (tl.arange(0, 8)[:, None] - tl.arange(0, 8)[None, :]) & 7
    b_source = tl.broadcast_to(b_source[None, :, :, None], [MEMBERS, 8, 8, 8])
    return tl.sum(tl.gather(b_x, b_source, 2), 1)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "last_queries"])
def block_diagonals_kernel(
    by_block, sums, num_selected, first_row, num_rows, capacity, last_queries,
    QUERIES: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK diagonals of blocks. Diagonal d contains, for each query, the block that is d blocks before its own.

    Grid: (diagonals / BLOCK, n, rows). Bound by memory: it reads ``by_block`` once.

    Args:
        by_block: [n, capacity / 64, QUERIES] float32, weight of each block for each query.
    """
    i_selected, i_row = tl.program_id(1), first_row + tl.program_id(2)
    place, length = sums_of(sums, 1, i_selected, num_selected, i_row, first_row, num_rows, capacity, KEY_TILE)
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < length:
        _, query_len, seq_len, _ = load_row(sums.rows, i_row)
        o_r = tl.arange(0, QUERIES)
        b_query = _query_offsets(o_r, query_len, last_queries, QUERIES, SPREAD)
        b_block = ((seq_len - query_len + b_query) // KEY_TILE)[None, :] - o_d[:, None]
        source = by_block + (place - num_selected.to(tl.int64) * capacity) * QUERIES
        is_listed = (b_query >= 0)[None, :] & (b_block >= 0)
        b_x = tl.load(source + b_block * QUERIES + o_r[None, :], mask=is_listed, other=0.0)
        tl.store(sums.totals + place + o_d, tl.sum(b_x, 1), mask=o_d < length)


@triton.jit
def sums_of(sums, i_kind, i_selected, num_selected, i_row, first_row, num_rows, capacity, BAND: tl.constexpr):
    """Return the place of the sums of one selected head and row."""
    width = tl.where(i_kind == 0, 1, BAND)
    _, _, seq_len, _ = load_row(sums.rows, i_row)
    start = place_in_slab(sums.rows, i_row, first_row)
    length = tl.cdiv(seq_len, width)
    if sums.patterns is not None:
        length = tl.where(tl.load(sums.patterns + i_selected * num_rows + i_row) == 0, length, 0)
    first = (i_kind * num_selected).to(tl.int64) * capacity  # diagonals follow the columns of all heads
    place = first + (i_selected.to(tl.int64) * capacity + start) // width
    return place, length
