"""Vertical-slash heads of MInference (arXiv:2407.02490), Algorithms 2 and 4.

Â = softmax of the last 64 queries against all keys. The k_v keys with the largest column sums are kept as stripes
("verticals"), the k_s offsets ``query position - key position`` with the largest diagonal sums as blocks ("slashes").

* Two passes over the keys, the first for the log-sum-exp of each query, the second for the sums, so that Â itself is
  never stored. The second rotates row r of a 64 x 64 tile of Â by r: diagonals become columns, and each consists of a
  part in this tile and a part in the one before, which the program carries along. All sums have a fixed order.
* Algorithm 4 merges points and ranges one after the other for each row of blocks. Here the kept slashes become running
  counts: a tile at positions [p, p'] keeps the key block [s, e] iff a kept offset lies in [max(p - e, 0), p' - s], one
  subtraction. The same blocks, and every block of a tile at once.

Deviations from the paper:

* Blocks lie at absolute positions, where the paper's begin where a slash enters the row: the union is slightly larger.
* Rows of blocks are tiles of 128 queries, the paper's are 64.
* The last queries are those of the row's chunk in this step, fewer than 64 if the chunk is shorter.
* Diagonal blocks are always kept.
* The authors' code gives the first 30 columns and the last 100 diagonals infinite sums before it takes the largest, so
  that they count among k_v and k_s; the paper's text does not. ``forced_verticals`` and ``forced_slashes`` follow the
  code, 0 follows the paper. The code also raises k_v to 30 and k_s to 50 where less is asked for; this does not.
* Equal sums: the earliest key and the nearest diagonal first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache, key_offsets
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.select.base import Method, require
from vllm_sparse_kernels.select.lines import Lines, write_lines
from vllm_sparse_kernels.select.topk import kept_in_chunk, kth_largest, load_bits

LOG2_E = 1.4426950408889634

LAST = tl.constexpr(64)
"""Rows of a tile of Â: the most last queries there can be, and the width of its key tiles."""

SPLIT_TILES = 16
"""Key tiles of one program. A constant: how a row's keys are split must not depend on the other rows."""


@dataclass(frozen=True)
class VerticalSlash(Method):
    """k_v ``vertical_tokens``, k_s ``slash_tokens``, last_q ``last_queries``; the defaults of the authors' code where a
    head has no searched pattern. The forced ones count among k_v and k_s."""

    vertical_tokens: int = 1000
    slash_tokens: int = 6096
    last_queries: int = 64
    forced_verticals: int = 30
    forced_slashes: int = 100

    def __post_init__(self) -> None:
        for field in ("vertical_tokens", "slash_tokens", "forced_verticals", "forced_slashes"):
            require(getattr(self, field) >= 0, field, getattr(self, field), ">= 0")
        require(1 <= self.last_queries <= 64, "last_queries", self.last_queries, "1 to 64")

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        return StripeLayout.per_tile(rows, self.vertical_tokens)

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        for row in range(index.rows.num_rows):
            sums = last_query_sums(q, cache, index.rows, row, heads, scale, self.last_queries)
            write_lines(index, row, heads, self._keep_largest(sums, index.rows.seq_lens[row]), band_offsets=1)

    def _keep_largest(self, sums: torch.Tensor, seq_len: int) -> Lines:
        """Column and diagonal sums [2, n, width] → the k_v largest columns and k_s largest diagonals."""
        num_entries, width = sums.shape[1:]
        num_verticals = min(self.vertical_tokens, seq_len)
        verticals = torch.empty(num_entries, num_verticals, dtype=torch.int32, device=sums.device)
        slashes_upto = torch.empty(num_entries, width, dtype=torch.int32, device=sums.device)
        _keep_largest_kernel[(2 * num_entries,)](
            sums, verticals, slashes_upto, seq_len, width // LAST.value,
            num_verticals, min(self.slash_tokens, seq_len), self.forced_verticals, self.forced_slashes,
            CHUNK=8192, num_warps=16,
        )  # fmt: skip
        return Lines(verticals, None, None, slashes_upto)


class LastArgs(NamedTuple):
    """What the passes over the keys read, less what differs from row to row."""

    q: Any
    stride_token: int
    stride_head: int
    k: Any
    stride_page: int
    stride_key: int
    stride_kv_head: int
    page_size: int
    block_table: Any
    heads: Any
    num_entries: int


def last_query_sums(
    q: torch.Tensor, cache: PagedCache, rows: Rows, row: int, heads: torch.Tensor, scale: float, last_queries: int
) -> torch.Tensor:
    """Column and diagonal sums of Â of one row: [2, len(heads), seq_len rounded up to 64] float32.

    [0, i, key] sums Â of query head heads[i] over the row's last queries, [1, i, o] over all pairs o apart; undefined
    from seq_len on.
    """
    seq_len, query_len = rows.seq_lens[row], rows.query_lens[row]
    num_key_tiles, num_entries = ceil_div(seq_len, LAST.value), len(heads)
    num_splits, group = ceil_div(num_key_tiles, SPLIT_TILES), q.shape[1] // cache.num_kv_heads
    block_d = triton.next_power_of_2(cache.head_dim)
    args = LastArgs(
        q, q.stride(0), q.stride(1), cache.keys, *cache.strides, cache.page_size, rows.block_table, heads, num_entries
    )
    # The last query is row 63 of a tile of Â, so that the first valid row is 64 less their number.
    where = (
        row, rows.block_table.stride(0), rows.tokens[row] + query_len - LAST.value,
        LAST.value - min(last_queries, query_len), seq_len,
    )  # fmt: skip
    # Query heads that share keys are stacked, as far as 64 KiB of queries go.
    most = max(1, 64 * 1024 // (LAST.value * block_d * q.element_size()))
    shape = {
        "GROUP": group,
        "HEAD_DIM": cache.head_dim,
        "BLOCK_D": block_d,
        "ENTRIES": triton.next_power_of_2(num_entries),
        "TILES": SPLIT_TILES,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    partial = torch.empty(num_entries, num_splits, LAST.value, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_entries, LAST.value, dtype=torch.float32, device=q.device)
    sums = torch.empty(2, num_entries, num_key_tiles * LAST.value, dtype=torch.float32, device=q.device)
    members = min(triton.next_power_of_2(group), 4, most)
    _split_lse_kernel[(num_splits, cache.num_kv_heads * ceil_div(group, members))](
        args, *where, partial, scale * LOG2_E, **shape, MEMBERS=members, num_warps=4 if members == 1 else 8
    )
    _join_lse_kernel[(num_entries,)](partial, lse, num_splits, SPLITS=32)
    # The rotation goes through shared memory and registers: half as large, two at a time on a multiprocessor.
    members = min(members, 2, max(1, most // 2))
    _sums_kernel[(num_splits, cache.num_kv_heads * ceil_div(group, members))](
        args, *where, lse, sums, scale * LOG2_E, **shape, MEMBERS=members, num_warps=4 * members, maxnreg=128
    )
    return sums


@triton.jit
def _places(
    args, i_kv, i_part, GROUP: tl.constexpr, ENTRIES: tl.constexpr, MEMBERS: tl.constexpr, REPEAT: tl.constexpr
):  # fmt: skip
    """Query heads stacked by this program, each ``REPEAT`` times, and their places in ``heads``, -1 if not in it."""
    b_member = i_part * MEMBERS + tl.arange(0, MEMBERS * REPEAT) // REPEAT
    b_head = i_kv * GROUP + b_member
    o_entry = tl.arange(0, ENTRIES)
    b_listed = tl.load(args.heads + o_entry, mask=o_entry < args.num_entries, other=-1)
    b_same = (b_listed[None, :] == b_head[:, None]) & (b_member < GROUP)[:, None]
    return b_head, tl.max(tl.where(b_same, o_entry[None, :], -1), 1)


@triton.jit
def _load_last(args, b_head, b_place, token, first_valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stacked last queries, 64 rows per head; rows that are no query of this row or of no listed head are 0."""
    o_r = tl.arange(0, b_head.shape[0]) % LAST
    o_d = tl.arange(0, BLOCK_D)
    o_q = (token + o_r).to(tl.int64) * args.stride_token + b_head * args.stride_head
    in_q = ((o_r >= first_valid) & (b_place >= 0))[:, None] & (o_d < HEAD_DIM)[None, :]
    return tl.load(args.q + o_q[:, None] + o_d[None, :], mask=in_q, other=0.0)


@triton.jit
def _last_scores(
    b_q, args, table, i_kv, i_tile, seq_len, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 of the stacked queries on a key tile, -inf where a query may not look; tile -1 is empty."""
    o_n = tl.arange(0, LAST) + i_tile * LAST
    o_d = tl.arange(0, BLOCK_D)
    in_row = (o_n >= 0) & (o_n < seq_len)
    o_k = key_offsets(table, o_n, in_row, args.page_size, args.stride_page, args.stride_key)
    o_k += i_kv.to(tl.int64) * args.stride_kv_head
    b_k = tl.load(
        args.k + o_k[:, None] + o_d[None, :], mask=in_row[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0
    )  # fmt: skip
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    o_m = seq_len - LAST + tl.arange(0, b_q.shape[0]) % LAST
    return tl.where((o_n >= 0)[None, :] & (o_n[None, :] <= o_m[:, None]), b_s, float("-inf"))


@triton.jit(do_not_specialize=["row", "stride_table", "token", "first_valid", "seq_len"])
def _split_lse_kernel(
    args, row, stride_table, token, first_valid, seq_len, partial, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """partial[entry, split, r]: log-sum-exp in base 2 of one query over one split of the keys."""
    PARTS: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    i_split, i_kv, i_part = tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    b_head, b_place = _places(args, i_kv, i_part, GROUP, ENTRIES, MEMBERS, LAST)
    if tl.max(b_place, 0) < 0:
        return
    b_q = _load_last(args, b_head, b_place, token, first_valid, HEAD_DIM, BLOCK_D)
    table = args.block_table + row.to(tl.int64) * stride_table
    b_max = tl.full([MEMBERS * LAST], float("-inf"), tl.float32)
    b_sum = tl.zeros([MEMBERS * LAST], tl.float32)
    last_tile = tl.minimum((i_split + 1) * TILES, (seq_len + LAST - 1) // LAST)
    for i_tile in range(i_split * TILES, last_tile):
        b_s = _last_scores(b_q, args, table, i_kv, i_tile, seq_len, scale, HEAD_DIM, BLOCK_D, PRECISION)
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)  # a query may see no key of this split
        b_sum = b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.exp2(b_s - b_shift[:, None]), 1)
        b_max = b_new
    o_r = tl.arange(0, MEMBERS * LAST) % LAST
    target = partial + (b_place * tl.num_programs(0) + i_split) * LAST + o_r
    tl.store(target, b_max + tl.log2(b_sum), mask=b_place >= 0)


@triton.jit(do_not_specialize=["num_splits"])
def _join_lse_kernel(partial, lse, num_splits, SPLITS: tl.constexpr):
    """Splits of one entry joined, in order: [num_splits, 64] → [64]."""
    i_entry = tl.program_id(0)
    o_r = tl.arange(0, LAST)
    b_max = tl.full([LAST], float("-inf"), tl.float32)
    b_sum = tl.zeros([LAST], tl.float32)
    for start in range(0, num_splits, SPLITS):
        o_split = start + tl.arange(0, SPLITS)
        source = partial + (i_entry * num_splits + o_split)[:, None] * LAST + o_r[None, :]
        b_lse = tl.load(source, mask=(o_split < num_splits)[:, None], other=float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.exp2(b_lse - b_shift[None, :]), 0)
        b_max = b_new
    tl.store(lse + i_entry * LAST + o_r, b_max + tl.log2(b_sum))


@triton.jit(do_not_specialize=["row", "stride_table", "token", "first_valid", "seq_len"])
def _sums_kernel(
    args, row, stride_table, token, first_valid, seq_len, lse, sums, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Column sums of the program's key tiles, and sums of the diagonals that start in their first columns.

    With P0 = seq_len - 64 the position of row 0, entry (r, c) of key tile j lies on diagonal P0 - 64 j + r - c.
    Rotated, column t holds c = r - t mod 64: diagonal P0 - 64 j + t in rows r >= t, and the one 64 less in rows r < t,
    whose rest is in tile j + 1. After the last tile only diagonals below 0 are left.
    """
    PARTS: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    i_split, i_kv, i_part = tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    b_head, b_place = _places(args, i_kv, i_part, GROUP, ENTRIES, MEMBERS, LAST)
    if tl.max(b_place, 0) < 0:
        return
    b_q = _load_last(args, b_head, b_place, token, first_valid, HEAD_DIM, BLOCK_D)
    table = args.block_table + row.to(tl.int64) * stride_table
    o_r = tl.arange(0, MEMBERS * LAST) % LAST
    o_t = tl.arange(0, LAST)
    b_valid = (b_place >= 0) & (o_r >= first_valid)
    b_lse = tl.load(lse + b_place * LAST + o_r, mask=b_valid, other=0.0)
    b_rotated = (o_r[:, None] - o_t[None, :]) & (LAST - 1)
    b_own = o_r[:, None] >= o_t[None, :]

    num_tiles = (seq_len + LAST - 1) // LAST
    i_first, i_last = i_split * TILES, tl.minimum((i_split + 1) * TILES, num_tiles)
    b_entry = _places(args, i_kv, i_part, GROUP, ENTRIES, MEMBERS, 1)[1]
    columns = sums + b_entry.to(tl.int64)[:, None] * (num_tiles * LAST)
    diagonals = sums + (b_entry + args.num_entries).to(tl.int64)[:, None] * (num_tiles * LAST)
    b_carry = tl.zeros([MEMBERS, LAST], tl.float32)
    for i_tile in range(i_first - 1, i_last):
        b_s = _last_scores(b_q, args, table, i_kv, i_tile, seq_len, scale, HEAD_DIM, BLOCK_D, PRECISION)
        b_p = tl.where(b_valid[:, None], tl.exp2(b_s - b_lse[:, None]), 0.0)
        o_n = o_t + i_tile * LAST
        stored = (b_entry >= 0)[:, None] & (o_n >= i_first * LAST)[None, :]
        tl.store(columns + o_n[None, :], _sum_queries(b_p, MEMBERS), mask=stored)
        b_p = tl.gather(b_p, b_rotated, 1)
        o_slash = o_t + seq_len - (i_tile + 1) * LAST
        b_slash = b_carry + _sum_queries(tl.where(b_own, b_p, 0.0), MEMBERS)
        tl.store(diagonals + o_slash[None, :], b_slash, mask=stored & (o_slash >= 0)[None, :])
        b_carry = _sum_queries(tl.where(b_own, 0.0, b_p), MEMBERS)


@triton.jit
def _sum_queries(b_p, MEMBERS: tl.constexpr):
    """[MEMBERS · 64, 64] → [MEMBERS, 64]: the sum over the queries of each stacked head."""
    return tl.sum(tl.reshape(b_p, [MEMBERS, LAST, LAST]), 1)


@triton.jit(do_not_specialize=["seq_len", "num_tiles", "k_vertical", "k_slash", "forced_verticals", "forced_slashes"])
def _keep_largest_kernel(
    sums, verticals, slashes_upto, seq_len, num_tiles, k_vertical, k_slash, forced_verticals, forced_slashes,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per row of sums: verticals to their positions, slashes to running counts."""
    num_entries = tl.num_programs(0) // 2
    i_entry, is_slash = tl.program_id(0) % num_entries, tl.program_id(0) >= num_entries
    width = num_tiles.to(tl.int64) * LAST
    row = sums + tl.program_id(0) * width
    forced = tl.where(is_slash, forced_slashes, forced_verticals)
    threshold, num_ties = kth_largest(row, seq_len, tl.where(is_slash, k_slash, k_vertical), forced, CHUNK)
    above, ties = 0, 0
    for start in range(0, seq_len, CHUNK):
        b_bits = load_bits(row, start, seq_len, forced, CHUNK)
        b_kept, b_upto, above, ties = kept_in_chunk(b_bits, threshold, num_ties, above, ties)
        o_n = start + tl.arange(0, CHUNK)
        if is_slash:
            tl.store(slashes_upto + i_entry * width + o_n, b_upto, mask=o_n < seq_len)
        else:
            tl.store(verticals + i_entry.to(tl.int64) * k_vertical + b_upto - 1, o_n, mask=b_kept)
