# SPDX-License-Identifier: Apache-2.0
"""Scaled QK averaged over blocks of keys, and its softmax over blocks: the estimates and maps of SharePrefill.

The causal mask allows all pairs of a tile of queries and a block of keys before its diagonal. The average of q·k over
all pairs is (mean q) · (mean k), so only means are needed. The few blocks on a tile's diagonal are averaged pair by
pair, over the pairs that the mask allows. Keys are read once, by the programs that average them. These programs
also score the last queries of a key head's query heads. kernels.py makes maps once their heads are known.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import Constant, compile_time
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import load_keys, load_queries, padded_dim, widen
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div
from vllm_sparse_kernels.selection.lists import CHUNK_BLOCKS, load_tile, tile_blocks
from vllm_sparse_kernels.vectors import load_padded, store_padded

MEANS_AT_ONCE = Constant(128)
"""Mean keys that are multiplied by a mean query at a time. This number, or twice as many, are buffered."""


class Spans(NamedTuple):
    """Per row: the range of its key blocks among those of all rows, its tiles, and its last queries as a tile."""

    num_blocks: int  # of all rows
    max_blocks: int  # of one row
    last_tiles: torch.Tensor  # [num_rows, 4] int32, the chunk's last 128 queries, like Rows.tiles
    block_starts: torch.Tensor  # [num_rows + 1] int64

    @staticmethod
    def of(index: SparseIndex) -> "Spans":
        """Return the spans of an index's rows, copied to the device."""
        rows, block_tokens = index.rows, index.block_tokens
        blocks = [ceil_div(seq_len, block_tokens) for seq_len in rows.seq_lens]
        block_starts = [0, *accumulate(blocks)]
        lasts: list[tuple[int, int, int, int]] = []
        for row, query_len in enumerate(rows.query_lens):
            length = min(query_len, TILE_TOKENS)
            lasts.append((row, rows.query_starts[row] + query_len - length, length, rows.seq_lens[row] - length))
        return Spans(
            block_starts[-1],
            max(blocks),
            rows.to_device(lasts),
            rows.to_device(block_starts, torch.int64),
        )


class ScaledQueries(NamedTuple):
    """Queries and the softmax's scale as arguments of kernels; head_dim is contiguous."""

    q: Any
    stride_token: int
    stride_head: int
    scale: float


class TileShape(NamedTuple):
    """Compile-time sizes of the kernels that average queries and keys; every field is a ``tl.constexpr``."""

    HEAD_DIM: Any
    BLOCK_D: Any  # HEAD_DIM rounded up to a power of two
    BLOCK_N: Any  # keys of a block
    GROUP: Any  # query heads of a kv head
    BLOCK_M: Any  # queries of a tile
    CHUNK_KEYS: Any  # keys of a diagonal block that are multiplied at a time
    MAP_STAGES: Any  # pipeline stages of the loop over mean keys, in which maps are made


def _map_stages(head_dim: int, limit_bytes: int) -> int:
    """Return the pipeline stages of the loop over mean keys."""
    block_d = padded_dim(head_dim)
    one_buffer = MEANS_AT_ONCE.value * block_d * 4
    if one_buffer + 1024 > limit_bytes:
        return 1
    return 3 if block_d <= 128 and 2 * one_buffer + 1024 <= limit_bytes else 2


class BlockAverages:
    """Inputs of softmaxes over blocks of block-averaged, scaled QK, and these softmaxes for each head's last queries.

    ``mean_keys`` [kv heads, all rows' key blocks, head_dim] float32 has the blocks before a row's last tile.
    ``scores`` [query heads, all rows' key blocks] has the scores of the last queries, ``estimates`` [selected heads,
    all rows' key blocks] their softmax, and ``sparsity`` [selected heads, rows] its distance from uniform. All cover
    only heads whose entry in ``clusters`` [heads] int32 is at least 0. Key heads without such a query head are not
    read.
    """

    def __init__(self, call: Call, spans: Spans, clusters: torch.Tensor) -> None:
        q, cache, index, heads = call.q, call.cache, call.index, call.head_ids
        self.queries = ScaledQueries(q, q.stride(0), q.stride(1), call.scale)
        self.keys = call.key_args
        num_kv_heads, num_heads, head_dim = cache.num_kv_heads, index.num_heads, cache.head_dim
        self.shape = compile_time(
            TileShape(
                HEAD_DIM=head_dim,
                BLOCK_D=cache.padded_head_dim,
                BLOCK_N=index.block_tokens,
                GROUP=call.group,
                BLOCK_M=TILE_TOKENS,
                CHUNK_KEYS=16 if q.dtype == torch.float32 else index.block_tokens,
                MAP_STAGES=_map_stages(head_dim, shared_bytes(q.device)),
            )
        )
        empty, num_rows = index.workspace.empty, index.rows.num_rows
        self.mean_keys = empty(num_kv_heads, spans.num_blocks, head_dim)
        self.scores = empty(num_heads, spans.num_blocks)
        mean_queries = empty(num_heads, num_rows, head_dim)
        selected = {"SELECTED": triton.next_power_of_2(len(heads))}
        _last_queries_kernel[(num_heads, num_rows)](
            self.queries, self.keys, heads, clusters, len(heads), spans.last_tiles, spans.block_starts,
            spans.num_blocks, mean_queries, self.scores, self.shape, **selected, num_warps=8,
        )  # fmt: skip
        _mean_keys_kernel[(num_kv_heads, spans.max_blocks, num_rows)](
            self.keys, heads, clusters, len(heads), spans.last_tiles, spans.block_starts, spans.num_blocks,
            mean_queries, num_rows, self.mean_keys, self.scores, self.shape, **selected,
            MEMBERS=triton.next_power_of_2(call.group),
        )  # fmt: skip
        self.estimates = empty(call.num_selected, spans.num_blocks)
        self.sparsity = empty(call.num_selected, num_rows)
        _estimates_kernel[(call.num_selected, num_rows)](
            heads, clusters, self.scores, spans.block_starts, spans.num_blocks, self.estimates, self.sparsity
        )


@triton.jit
def _is_clustered(i_group, heads, clusters, num_selected, GROUP: tl.constexpr, SELECTED: tl.constexpr):
    """Return whether any of the GROUP heads from ``i_group`` · GROUP on is in a cluster."""
    o_e = tl.arange(0, SELECTED)
    b_head = tl.load(heads + o_e, mask=o_e < num_selected, other=-GROUP)
    b_cluster = tl.load(clusters + o_e, mask=o_e < num_selected, other=-1)
    return tl.max(((b_head // GROUP == i_group) & (b_cluster >= 0)).to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["num_selected", "num_blocks"])
def _last_queries_kernel(
    queries, keys, heads, clusters, num_selected, last_tiles, block_starts, num_blocks, mean_queries, scores, SHAPE,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """Compute the scaled mean of the last queries of one (head, row), and their scores with the diagonal blocks.

    Grid: (heads, rows). Bound by latency: one tile of queries with its diagonal blocks.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        clusters: [n] int32, each head's cluster in the layer; below 0: none.
        last_tiles: [num_rows, 4] int32, each row's last queries as a tile.
        block_starts: [num_rows + 1] int64, a row's first block among those of all rows.
        mean_queries: [heads, num_rows, HEAD_DIM] float32; written.
        scores: [heads, num_blocks] float32, of diagonal blocks; written.
    """
    i_head, i_row = tl.program_id(0), tl.program_id(1)
    if not _is_clustered(i_head, heads, clusters, num_selected, 1, SELECTED):
        return
    diagonal_scores = scores + i_head * num_blocks + tl.load(block_starts + i_row)
    b_mean = average_tile(queries, keys, last_tiles, i_row, i_head, diagonal_scores, SHAPE)
    store_padded(mean_queries, i_head * tl.num_programs(1) + i_row, b_mean, SHAPE.HEAD_DIM)


@triton.jit(do_not_specialize=["num_selected", "num_blocks", "num_rows"])
def _mean_keys_kernel(
    keys, heads, clusters, num_selected, last_tiles, block_starts, num_blocks, mean_queries, num_rows, mean_keys,
    scores, SHAPE, MEMBERS: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Compute the mean key of one (kv head, block, row).

    If the block is before the diagonal, its products with mean queries are also computed. A row's last block may be
    short.

    Grid: (kv heads, blocks of the longest row, rows). Bound by memory: it reads each key once.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        clusters: [n] int32, each head's cluster in the layer; below 0: none.
        last_tiles: [num_rows, 4] int32, each row's last queries as a tile.
        block_starts: [num_rows + 1] int64, a row's first block among those of all rows.
        mean_queries: [heads, num_rows, HEAD_DIM] float32.
        mean_keys: [kv heads, num_blocks, HEAD_DIM] float32; written.
        scores: [heads, num_blocks] float32, of blocks before the diagonal; written.
    """
    # Programs of neighbouring kv heads run together: in vLLM's usual layout, the kv heads of a token are adjacent.
    i_kv, i_row = tl.program_id(0).to(tl.int64), tl.program_id(2)
    is_clustered = _is_clustered(i_kv, heads, clusters, num_selected, SHAPE.GROUP, SELECTED)
    _, _, length, first = load_tile(last_tiles, i_row)
    start, seq_len = tl.program_id(1) * SHAPE.BLOCK_N, first + length
    o_g = tl.arange(0, MEMBERS)
    o_head, i_out = i_kv * SHAPE.GROUP + o_g, tl.load(block_starts + i_row) + tl.program_id(1)
    # Queries are loaded before keys, which reuse their shared memory. All loads of keys start before the first wait.
    b_q = load_padded(mean_queries, o_head * num_rows + i_row, o_g < SHAPE.GROUP, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
    if (start >= seq_len) | (not is_clustered):
        return
    b_k = load_keys(keys, i_row, i_kv, start + tl.arange(0, SHAPE.BLOCK_N), seq_len, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
    b_mean = _sum_of(b_k) / tl.minimum(seq_len - start, SHAPE.BLOCK_N)
    store_padded(mean_keys, i_kv * num_blocks + i_out, b_mean, SHAPE.HEAD_DIM)
    b_s = tl.sum(b_q * b_mean[None, :], 1)
    num_scored = tl.where(start + SHAPE.BLOCK_N <= first, SHAPE.GROUP, 0)
    tl.store(scores + o_head * num_blocks + i_out, b_s, mask=o_g < num_scored)


@triton.jit
def _sum_of(b_k):
    """Sum keys [n, D] in float32: [D]. A product with a matrix of 1s takes far fewer instructions."""
    if b_k.dtype == tl.float32:
        return tl.sum(b_k, 0)
    else:
        b_x = widen(b_k)
        return tl.max(tl.dot(tl.full([16, b_x.shape[0]], 1.0, b_x.dtype), b_x), 0)  # 16 equal rows


@triton.jit(do_not_specialize=["num_blocks"])
def _estimates_kernel(heads, clusters, scores, block_starts, num_blocks, out, sparsity):
    """Compute the softmax over the blocks of one (head, row).

    Grid: (n, rows). Bound by latency: it reads 4 bytes per block, three times.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        clusters: [n] int32, each head's cluster in the layer; below 0: none.
        scores: [heads, num_blocks] float32.
        block_starts: [num_rows + 1] int64, a row's first block among those of all rows.
        out: [n, num_blocks] float32, â; written.
        sparsity: [n, num_rows] float32, sqrt(JSD) to the uniform distribution; written.
    """
    i, i_row, num_rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(clusters + i) < 0:
        return
    start = tl.load(block_starts + i_row)
    count = (tl.load(block_starts + i_row + 1) - start).to(tl.int32)
    scores += tl.load(heads + i) * num_blocks + start
    out += i * num_blocks + start
    peak, total = softmax_sums(scores, count)
    b_apart = tl.zeros([CHUNK_BLOCKS], tl.float32)
    for first in range(0, count, CHUNK_BLOCKS):
        o_n = first + tl.arange(0, CHUNK_BLOCKS)
        b_p = tl.exp(tl.load(scores + o_n, mask=o_n < count, other=float("-inf")) - peak) / total
        tl.store(out + o_n, b_p, mask=o_n < count)
        b_apart += divergence(b_p, tl.where(o_n < count, 1.0 / count, 0.0))
    tl.store(sparsity + i * num_rows + i_row, tl.sqrt(tl.maximum(tl.sum(b_apart, 0), 0.0)))


@triton.jit
def softmax_sums(scores, count):
    """Compute the maximum and the sum of a softmax."""
    peak, total = float("-inf"), 0.0
    for first in range(0, count, CHUNK_BLOCKS):
        o_n = first + tl.arange(0, CHUNK_BLOCKS)
        b_s = tl.load(scores + o_n, mask=o_n < count, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(b_s, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(b_s - higher), 0)
        peak = higher
    return peak, total


@triton.jit
def divergence(b_a, b_b):
    """Compute the terms of JSD(a‖b) in natural logarithms; 0 · log 0 is 0."""
    b_m = (b_a + b_b) * 0.5
    b_from_a = tl.where(b_a > 0, b_a * tl.log(b_a / b_m), 0.0)
    b_from_b = tl.where(b_b > 0, b_b * tl.log(b_b / b_m), 0.0)
    return (b_from_a + b_from_b) * 0.5


@triton.jit
def _load_chunk(keys, i_row, i_kv, start, end, SHAPE):
    """Load CHUNK_KEYS keys from ``start`` on: [CHUNK_KEYS, BLOCK_D], 0 from ``end`` on."""
    return load_keys(keys, i_row, i_kv, start + tl.arange(0, SHAPE.CHUNK_KEYS), end, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)


@triton.jit
def average_tile(queries, keys, tiles, i_tile, i_head, out, SHAPE):
    """Average the queries of a tile, and its scores with its diagonal blocks."""
    i_row, token, length, first = load_tile(tiles, i_tile)
    diagonal, num_causal = tile_blocks(tiles, i_tile, SHAPE.BLOCK_N)
    i_kv, o_m = i_head // SHAPE.GROUP, tl.arange(0, SHAPE.BLOCK_M)
    # Keys are loaded before the program waits for queries, and the next keys before these keys are multiplied.
    b_k = _load_chunk(keys, i_row, i_kv, diagonal * SHAPE.BLOCK_N, first + length, SHAPE)
    b_q = load_queries(queries, i_head, token, length, SHAPE.BLOCK_M, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
    b_sum = tl.zeros([SHAPE.BLOCK_M], tl.float32)
    for start in tl.range(diagonal * SHAPE.BLOCK_N, num_causal * SHAPE.BLOCK_N, SHAPE.CHUNK_KEYS, num_stages=1):
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        end = start + SHAPE.CHUNK_KEYS
        b_k = _load_chunk(keys, i_row, i_kv, end, first + length, SHAPE)
        seen = (start + tl.arange(0, SHAPE.CHUNK_KEYS)[None, :] <= first + o_m[:, None]) & (o_m < length)[:, None]
        b_sum += tl.sum(tl.where(seen, b_s, 0.0), 1)
        if end % SHAPE.BLOCK_N == 0:
            b_pairs = tl.minimum(tl.maximum(first + 1 + SHAPE.BLOCK_N - end + o_m, 0), SHAPE.BLOCK_N)
            num_pairs = tl.sum(tl.where(o_m < length, b_pairs, 0), 0)
            # [1]: for compute capability 10, Triton 3.6 cannot compile a sum from one dimension to a scalar here.
            b_total = tl.sum(b_sum[:, None], 0)
            tl.store(out + end // SHAPE.BLOCK_N - 1 + tl.arange(0, 1), b_total / num_pairs * queries.scale)
            b_sum = tl.zeros([SHAPE.BLOCK_M], tl.float32)
    return tl.sum(b_q.to(tl.float32), 0) * (queries.scale / length)
