"""FlexPrefill's vertical-slash (arXiv:2502.20766), as SharePrefill falls back to it (arXiv:2505.19578, Algorithm 5).

Â = softmax of the last 64 queries against all keys, as in MInference; but how many lines are kept follows from the
data: the fewest columns with γ of Â's mass, and the fewest diagonals with γ of it. Columns are kept as stripes,
diagonals as blocks.

Deviations from Algorithm 5:

* Diagonals are summed in bands of 64 offsets, and the fewest bands with γ of the mass are kept. A tile computes whole
  blocks, so that one diagonal costs it as much as its band. Chosen one by one, diagonals of diffuse heads lie
  everywhere and keep nearly all blocks: on a trained model at γ = 0.9 and 8K tokens, bands brought density from 0.36 to
  0.26 and recall from 0.97 to 0.93. (The authors' code sorts pooled blocks too, but keeps as many as the count of
  single diagonals suggests, which holds less than γ: recall 0.86 at density 0.20.)
* A tile keeps at most ``max_stripes`` stripes (fewer where a row has very many tiles). If a head's columns exceed that,
  the blocks with the most columns are kept whole, until the rest fits: more keys, never fewer.
* Columns and bands tied at the threshold are all kept. The first block and the diagonal ones are always kept, as in the
  authors' code; its minimum budgets are left out.
* The last queries are those of the row's chunk in this step, fewer than 64 if the chunk is shorter.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.select.base import Method, require
from vllm_sparse_kernels.select.lines import Lines, write_lines
from vllm_sparse_kernels.select.lists import append
from vllm_sparse_kernels.select.vertical_slash import last_query_sums

LAST_QUERIES = 64

BAND = tl.constexpr(64)
"""Diagonals that are kept or left together."""

ROW_STRIPES = 1 << 19
"""Room for the stripes of one row, all of its tiles together: 2 MiB per head."""

FEWEST_STRIPES = 1024


@dataclass(frozen=True)
class FlexVerticalSlash(Method):
    """γ ``gamma``: the share of the estimated mass that columns, and that diagonals, hold."""

    gamma: float = 0.9
    max_stripes: int = 8192

    def __post_init__(self) -> None:
        require(0 < self.gamma <= 1, "gamma", self.gamma, "a share in (0, 1]")
        require(self.max_stripes >= 0, "max_stripes", self.max_stripes, ">= 0")

    @property
    def kernel_share(self) -> float:
        """γ for ``mass_threshold``, which keeps values of zero only for a share that cannot be reached."""
        return self.gamma if self.gamma < 1 else math.inf

    def stripes_of_row(self, rows: Rows, row: int) -> int:
        """Stripes that one tile of a row may keep. Depends on the row's own size alone."""
        num_tiles = rows.tile_starts[row + 1] - rows.tile_starts[row]
        return min(self.max_stripes, max(FEWEST_STRIPES, ROW_STRIPES // num_tiles))

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        offsets, total = [], 0
        for tile in rows.tile_list:
            offsets.append(total)
            total += min(self.stripes_of_row(rows, tile.row), tile.position)
        return StripeLayout(tuple(offsets), total)

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        for row in range(index.rows.num_rows):
            sums = last_query_sums(q, cache, index.rows, row, heads, scale, LAST_QUERIES)
            write_lines(index, row, heads, self._keep_lines(sums, index, row), BAND.value)

    def _keep_lines(self, sums: torch.Tensor, index: SparseIndex, row: int) -> Lines:
        """Column and diagonal sums [2, n, width] of one row → the fewest columns and bands with γ of the mass."""
        num_heads, width, seq_len = sums.shape[1], sums.shape[2], index.rows.seq_lens[row]
        num_blocks, num_bands = ceil_div(seq_len, index.block_tokens), ceil_div(seq_len, BAND.value)
        capacity = self.stripes_of_row(index.rows, row)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=sums.device)

        columns, num_columns = empty(num_heads, max(1, min(capacity, seq_len))), empty(num_heads)
        whole = empty(num_heads, num_blocks, dtype=torch.uint8)
        _keep_columns_kernel[(num_heads,)](
            sums, width, seq_len, self.kernel_share, capacity, columns, columns.stride(0), num_columns, whole,
            num_blocks, BLOCK_N=index.block_tokens, CHUNK=8192, num_warps=16,
        )  # fmt: skip
        bands, bands_upto = empty(num_heads, num_bands, dtype=torch.float32), empty(num_heads, num_bands)
        _sum_bands_kernel[(ceil_div(num_bands, 32), num_heads)](sums[1], width, seq_len, bands, num_bands, BANDS=32)
        _keep_bands_kernel[(num_heads,)](bands, bands_upto, num_bands, self.kernel_share, CHUNK=1024)
        return Lines(columns, num_columns, whole, bands_upto)


@triton.jit
def mass_threshold(values, length, share, CHUNK: tl.constexpr):
    """Bits of the largest threshold t such that the values >= t hold ``share`` of the sum of values[:length].

    Values must not be negative: then their bits, as integers, are ordered as they are, and the digits of t in base 4
    are found from the highest down. With a share of infinity t is 0. Sums have a fixed order.
    """
    threshold = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    b_0 = tl.zeros([CHUNK], tl.float32)
    for start in range(0, length, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_0 += tl.load(values + o_n, mask=o_n < length, other=0.0)
    goal = tl.sum(b_0, 0) * share
    for _ in range(16):
        b_1 = tl.zeros([CHUNK], tl.float32)
        b_2 = tl.zeros([CHUNK], tl.float32)
        b_3 = tl.zeros([CHUNK], tl.float32)
        for start in range(0, length, CHUNK):
            o_n = start + tl.arange(0, CHUNK)
            b_x = tl.load(values + o_n, mask=o_n < length, other=0.0)
            b_bits = b_x.to(tl.uint32, bitcast=True)
            b_1 += tl.where(b_bits >= threshold + step, b_x, 0.0)
            b_2 += tl.where(b_bits >= threshold + 2 * step, b_x, 0.0)
            b_3 += tl.where(b_bits >= threshold + 3 * step, b_x, 0.0)
        digit = (tl.sum(b_1, 0) >= goal).to(tl.uint32) + (tl.sum(b_2, 0) >= goal).to(tl.uint32)
        threshold += step * (digit + (tl.sum(b_3, 0) >= goal).to(tl.uint32))
        step = step >> 2
    return threshold


@triton.jit
def _kept_columns(row, start, seq_len, threshold, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Keys [blocks, BLOCK_N] from ``start`` on, which of them are kept, and how many of each block."""
    o_n = start + tl.reshape(tl.arange(0, CHUNK), [CHUNK // BLOCK_N, BLOCK_N])
    b_x = tl.load(row + o_n, mask=o_n < seq_len, other=0.0)
    b_kept = (o_n < seq_len) & (b_x.to(tl.uint32, bitcast=True) >= threshold)
    return o_n, b_kept, tl.sum(b_kept.to(tl.int32), 1)


@triton.jit(do_not_specialize=["width", "seq_len", "capacity", "stride_columns", "num_blocks"])
def _keep_columns_kernel(
    sums, width, seq_len, share, capacity, columns, stride_columns, num_columns, whole, num_blocks,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The kept columns of one head: blocks that are kept whole, and the others one by one, at most ``capacity``."""
    i_entry = tl.program_id(0).to(tl.int64)
    row = sums + i_entry * width
    threshold = mass_threshold(row, seq_len, share, CHUNK)
    # left[c] columns remain if blocks with c or more are kept whole; the largest c that fits, or 1: none remain.
    o_c = 2 + tl.arange(0, BLOCK_N)
    b_left = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, seq_len, CHUNK):
        _, _, b_count = _kept_columns(row, start, seq_len, threshold, BLOCK_N, CHUNK)
        b_left += tl.sum(tl.where(b_count[:, None] < o_c[None, :], b_count[:, None], 0), 0)
    most = tl.max(tl.where(b_left <= capacity, o_c, 1), 0)

    count = 0
    for start in range(0, seq_len, CHUNK):
        o_n, b_kept, b_count = _kept_columns(row, start, seq_len, threshold, BLOCK_N, CHUNK)
        o_block = start // BLOCK_N + tl.arange(0, CHUNK // BLOCK_N)
        b_whole = (b_count >= most) | (o_block == 0)
        tl.store(whole + i_entry * num_blocks + o_block, b_whole, mask=o_block < num_blocks)
        b_free = tl.reshape(b_kept & (b_whole[:, None] == 0), [CHUNK])
        count = append(columns + i_entry * stride_columns, count, tl.reshape(o_n, [CHUNK]), b_free)
    tl.store(num_columns + i_entry, count)


@triton.jit(do_not_specialize=["width", "seq_len", "num_bands"])
def _sum_bands_kernel(diagonals, width, seq_len, bands, num_bands, BANDS: tl.constexpr):
    i_entry = tl.program_id(1).to(tl.int64)
    o_band = tl.program_id(0) * BANDS + tl.arange(0, BANDS)
    o_slash = o_band[:, None] * BAND + tl.arange(0, BAND)[None, :]
    b_x = tl.load(diagonals + i_entry * width + o_slash, mask=o_slash < seq_len, other=0.0)
    tl.store(bands + i_entry * num_bands + o_band, tl.sum(b_x, 1), mask=o_band < num_bands)


@triton.jit(do_not_specialize=["num_bands"])
def _keep_bands_kernel(bands, bands_upto, num_bands, share, CHUNK: tl.constexpr):
    """How many bands are kept up to and with each."""
    i_entry = tl.program_id(0).to(tl.int64)
    threshold = mass_threshold(bands + i_entry * num_bands, num_bands, share, CHUNK)
    count = 0
    for start in range(0, num_bands, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_x = tl.load(bands + i_entry * num_bands + o_n, mask=o_n < num_bands, other=0.0)
        b_kept = ((o_n < num_bands) & (b_x.to(tl.uint32, bitcast=True) >= threshold)).to(tl.int32)
        tl.store(bands_upto + i_entry * num_bands + o_n, count + tl.cumsum(b_kept, 0), mask=o_n < num_bands)
        count += tl.sum(b_kept, 0)
