# SPDX-License-Identifier: Apache-2.0
"""Scaled QK averaged over blocks of keys, and its softmax over blocks: the estimates and maps of SharePrefill.

A tile of queries and a block of keys before its diagonal meet in all of their pairs, and the average of q·k over all
pairs is (mean q) · (mean k): nothing but means is needed. Blocks on the diagonal, at most three a tile, are averaged
over the pairs that the causal mask leaves, pair by pair. Keys are read once, by the programs that average them: these
score the last queries of a key head's query heads too.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache, key_args, load_keys
from vllm_sparse_kernels.rows import TILE_FIELDS, TILE_TOKENS, ceil_div, to_device
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, tile_blocks


class Spans(NamedTuple):
    """Per row: its key blocks among those of all rows, its tiles, and its last queries as a tile."""

    block_tokens: int
    num_blocks: int  # of all rows
    max_blocks: int  # of one row
    last_tiles: torch.Tensor  # [num_rows, 4] int32, the chunk's last 128 queries, like Rows.tiles
    block_starts: torch.Tensor  # [num_rows + 1] int64
    tile_starts: torch.Tensor  # [num_rows + 1] int32, ``Rows.tile_starts``

    @staticmethod
    def of(index: SparseIndex) -> "Spans":
        rows, block_tokens = index.rows, index.block_tokens
        blocks = [ceil_div(seq_len, block_tokens) for seq_len in rows.seq_lens]
        lasts, block_starts = [], [0]
        for row, query_len in enumerate(rows.query_lens):
            length = min(query_len, TILE_TOKENS)
            lasts += [row, rows.tokens[row] + query_len - length, length, rows.seq_lens[row] - length]
            block_starts.append(block_starts[-1] + blocks[row])
        return Spans(
            block_tokens,
            sum(blocks),
            max(blocks),
            to_device(lasts, torch.int32, rows.device).view(-1, TILE_FIELDS),
            to_device(block_starts, torch.int64, rows.device),
            to_device(rows.tile_starts, torch.int32, rows.device),
        )


class QueryArgs(NamedTuple):
    q: Any
    stride_token: int
    stride_head: int
    scale: float


class JobArgs(NamedTuple):
    """Which (head, tile) pairs are scored, and where the scores of a tile's key blocks go.

    Job j scores head ``heads[j]``, or ``heads[places[j, row]]`` where places are given: none if that is −1, nor where
    ``clusters[j]``, if given, is below 0. What is written goes to row ``out_rows[j]`` of ``out``, or j where these are
    not given. ``scores`` of all query heads with the blocks before the diagonal are taken where they are given, else
    made from mean keys. ``sparsity`` [jobs, num_rows] takes the distance to the uniform distribution, if it is asked
    for.
    """

    heads: Any
    clusters: Any
    places: Any
    tiles: Any
    out: Any
    out_rows: Any
    out_offsets: Any
    scores: Any
    sparsity: Any


class BlockAverages:
    """Softmax over blocks of block-averaged scaled QK, for the (head, tile) pairs that are asked for.

    With ``clusters`` [heads] int32 only heads where it is not below 0 can be; key heads that have none are not read.
    """

    def __init__(
        self,
        q: torch.Tensor,
        cache: PagedCache,
        index: SparseIndex,
        heads: torch.Tensor,
        scale: float,
        spans: Spans,
        clusters: torch.Tensor | None = None,
    ) -> None:
        self.queries = QueryArgs(q, q.stride(0), q.stride(1), scale)
        self.keys = key_args(cache, index.rows.block_table)
        self.index, self.heads, self.clusters, self.spans = index, heads, clusters, spans
        num_heads, num_kv_heads, head_dim = q.shape[1], cache.num_kv_heads, cache.head_dim
        self.options = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "FIELDS": TILE_FIELDS}
        self.group, self.is_float32 = num_heads // num_kv_heads, q.dtype == torch.float32
        room, num_rows = index.workspace.empty, index.rows.num_rows
        self.mean_keys = room(num_kv_heads, spans.num_blocks, head_dim)
        self.scores = room(num_heads, spans.num_blocks)
        mean_queries = room(num_heads, num_rows, head_dim)
        _mean_queries_kernel[(num_heads, num_rows)](
            self.queries, spans.last_tiles, mean_queries, **self.options, BLOCK_M=TILE_TOKENS
        )
        _mean_keys_kernel[(num_kv_heads, spans.max_blocks, num_rows)](
            self.keys, heads, clusters, len(heads), spans.last_tiles, spans.block_starts, spans.num_blocks,
            mean_queries, num_rows, self.mean_keys, self.scores, **self.options, BLOCK_N=index.block_tokens,
            GROUP=self.group, MEMBERS=triton.next_power_of_2(self.group), ENTRIES=triton.next_power_of_2(len(heads)),
            num_warps=2,
        )  # fmt: skip

    def estimates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every head's last queries: [heads, all rows' key blocks] (â), and sqrt(JSD) of each to the uniform
        distribution (d_sparse), [heads, num_rows]; float32."""
        out = self.index.workspace.empty(len(self.heads), self.spans.num_blocks)
        sparsity = self.index.workspace.empty(len(self.heads), self.index.rows.num_rows)
        tiles, starts = self.spans.last_tiles, self.spans.block_starts
        self._average(JobArgs(self.heads, self.clusters, None, tiles, out, None, starts, self.scores, sparsity))
        return out, sparsity

    def maps(self, places: torch.Tensor, out: torch.Tensor, out_rows: torch.Tensor) -> None:
        """Of all tiles of the heads at ``places`` (Ã), into out [.., block_capacity] float32, laid out as block_ids.

        places [jobs, num_rows] int32 point into ``heads``; where one is −1, nothing is computed. out_rows [jobs] int32.
        """
        index = self.index
        self._average(
            JobArgs(self.heads, None, places, index.rows.tiles, out, out_rows, index.block_offsets, None, None)
        )

    def _average(self, jobs: JobArgs) -> None:
        num_jobs = len(jobs.heads if jobs.places is None else jobs.places)
        _averages_kernel[(len(jobs.tiles), num_jobs)](
            self.queries, self.keys, jobs, self.index.rows.num_rows, jobs.out.stride(0), self.spans.num_blocks,
            self.mean_keys, self.spans.block_starts, **self.options, BLOCK_N=self.index.block_tokens,
            GROUP=self.group, BLOCK_M=TILE_TOKENS, CHUNK=max(16, 65536 // self.options["BLOCK_D"]),
            CHUNK_KEYS=32 if self.is_float32 else min(64, self.index.block_tokens), CHUNK_BLOCKS=CHUNK_BLOCKS,
            PRECISION="ieee" if self.is_float32 else "tf32", num_warps=16,
        )  # fmt: skip


@triton.jit
def _mean_queries_kernel(
    queries, last_tiles, mean_queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The scaled mean of the last queries of one (head, row)."""
    i_head, i_row = tl.program_id(0), tl.program_id(1)
    token, length = tl.load(last_tiles + i_row * FIELDS + 1), tl.load(last_tiles + i_row * FIELDS + 2)
    b_q = load_queries(queries, i_head, token, length, BLOCK_M, HEAD_DIM, BLOCK_D)
    b_mean = tl.sum(b_q.to(tl.float32), 0) * (queries.scale / length)
    o_d = tl.arange(0, BLOCK_D)
    target = mean_queries + (i_head * tl.num_programs(1) + i_row) * HEAD_DIM
    tl.store(target + o_d, b_mean, mask=o_d < HEAD_DIM)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def _mean_keys_kernel(
    keys, heads, clusters, num_entries, last_tiles, block_starts, num_blocks, mean_queries, num_rows,
    mean_keys, scores,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The mean key of every block of every row, a row's last one may be short; and its products with mean queries."""
    # Kv heads side by side: in vLLM's usual layout those of a token lie beside each other.
    i_kv, i_block, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(last_tiles + i_row * FIELDS + 2) + tl.load(last_tiles + i_row * FIELDS + 3)
    if i_block * BLOCK_N >= seq_len:
        return
    if clusters is not None:
        o_e = tl.arange(0, ENTRIES)
        b_head = tl.load(heads + o_e, mask=o_e < num_entries, other=-1)
        b_cluster = tl.load(clusters + o_e, mask=o_e < num_entries, other=-1)
        if tl.max(tl.where(b_head // GROUP == i_kv, b_cluster, -1), 0) < 0:
            return
    o_n, o_d, o_g = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, MEMBERS)
    o_head = i_kv * GROUP + o_g
    in_q = (o_g < GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    b_q = tl.load(mean_queries + (o_head * num_rows + i_row)[:, None] * HEAD_DIM + o_d[None, :], mask=in_q, other=0.0)
    b_k = load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM, BLOCK_D)
    b_mean = tl.sum(b_k.to(tl.float32), 0) / tl.minimum(seq_len - i_block * BLOCK_N, BLOCK_N)
    i_out = tl.load(block_starts + i_row) + i_block
    tl.store(mean_keys + (i_kv * num_blocks + i_out) * HEAD_DIM + o_d, b_mean, mask=o_d < HEAD_DIM)
    tl.store(scores + o_head * num_blocks + i_out, tl.sum(b_q * b_mean[None, :], 1), mask=o_g < GROUP)


@triton.jit
def load_queries(queries, i_head, token, length, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries [BLOCK_M, BLOCK_D] from ``token`` on, zero from ``length`` on."""
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_q = (token + o_m).to(tl.int64)
    return tl.load(
        queries.q + o_q[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :],
        mask=(o_m < length)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def head_of(heads, places, num_rows, i_job, i_row):
    """The query head that job ``i_job`` is about in a row, or −1."""
    place = i_job
    if places is not None:
        place = tl.load(places + i_job * num_rows + i_row)
    return tl.load(heads + place, mask=place >= 0, other=-1)


@triton.jit
def divergence(b_a, b_b):
    """Terms of JSD(a‖b), elementwise, natural logarithm; 0 · log 0 is 0."""
    b_m = (b_a + b_b) * 0.5
    b_from_a = tl.where(b_a > 0, b_a * tl.log(b_a / b_m), 0.0)
    b_from_b = tl.where(b_b > 0, b_b * tl.log(b_b / b_m), 0.0)
    return (b_from_a + b_from_b) * 0.5


@triton.jit
def _keep_scores(out, b_s, o_n, end, peak, total):
    """Store scores of blocks before ``end``; (their maximum, sum of exponentials relative to it), those before told."""
    tl.store(out + o_n, b_s, mask=o_n < end)
    b_s = tl.where(o_n < end, b_s, float("-inf"))
    higher = tl.maximum(peak, tl.max(b_s, 0))
    return higher, total * tl.exp(peak - higher) + tl.sum(tl.exp(b_s - higher), 0)


@triton.jit(do_not_specialize=["num_rows", "stride_out", "num_blocks"])
def _averages_kernel(
    queries, keys, jobs, num_rows, stride_out, num_blocks, mean_keys, block_starts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, CHUNK_KEYS: tl.constexpr, CHUNK_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax over the causal blocks of one (tile, head). Scores stand in its place until their sum is known."""
    i_tile, i_job = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(jobs.tiles + i_tile * FIELDS)
    i_head = head_of(jobs.heads, jobs.places, num_rows, i_job, i_row).to(tl.int64)
    if jobs.clusters is not None:
        i_head = tl.where(tl.load(jobs.clusters + i_job) < 0, -1, i_head)
    if i_head < 0:
        return
    i_kv = i_head // GROUP
    token = tl.load(jobs.tiles + i_tile * FIELDS + 1)
    length = tl.load(jobs.tiles + i_tile * FIELDS + 2)
    first = tl.load(jobs.tiles + i_tile * FIELDS + 3)
    diagonal, num_causal = tile_blocks(jobs.tiles, i_tile, BLOCK_N, FIELDS)
    o_d = tl.arange(0, BLOCK_D)
    b_q = load_queries(queries, i_head, token, length, BLOCK_M, HEAD_DIM, BLOCK_D)
    start_block = tl.load(block_starts + i_row)
    i_out = i_job
    if jobs.out_rows is not None:
        i_out = tl.load(jobs.out_rows + i_job)
    out = jobs.out + i_out.to(tl.int64) * stride_out + tl.load(jobs.out_offsets + i_tile)

    peak, total = float("-inf"), 0.0
    if jobs.scores is not None:
        scores = jobs.scores + i_head * num_blocks + start_block
        for start in range(0, diagonal, CHUNK_BLOCKS):
            o_n = start + tl.arange(0, CHUNK_BLOCKS)
            b_s = tl.load(scores + o_n, mask=o_n < diagonal, other=0.0)
            peak, total = _keep_scores(out, b_s, o_n, diagonal, peak, total)
    else:
        b_mean = tl.sum(b_q.to(tl.float32), 0) * (queries.scale / length)
        means = mean_keys + (i_kv * num_blocks + start_block) * HEAD_DIM
        for start in range(0, diagonal, CHUNK):
            o_n = start + tl.arange(0, CHUNK)
            in_keys = (o_n < diagonal)[:, None] & (o_d < HEAD_DIM)[None, :]
            b_k = tl.load(means + o_n[:, None] * HEAD_DIM + o_d[None, :], mask=in_keys, other=0.0)
            peak, total = _keep_scores(out, tl.sum(b_k * b_mean[None, :], 1), o_n, diagonal, peak, total)
    for i_block in range(diagonal, num_causal):
        score = _causal_mean(
            b_q, keys, i_row, i_kv, i_block, first, length,
            HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_M, CHUNK_KEYS, PRECISION,
        ) * queries.scale  # fmt: skip
        tl.store(out + i_block, score)
        higher = tl.maximum(peak, score)
        total = total * tl.exp(peak - higher) + tl.exp(score - higher)
        peak = higher
    tl.debug_barrier()
    b_apart = tl.zeros([CHUNK_BLOCKS], tl.float32)
    for start in range(0, num_causal, CHUNK_BLOCKS):
        o_n = start + tl.arange(0, CHUNK_BLOCKS)
        causal = o_n < num_causal
        b_p = tl.exp(tl.load(out + o_n, mask=causal, other=float("-inf")) - peak) / total
        tl.store(out + o_n, b_p, mask=causal)
        if jobs.sparsity is not None:
            b_apart += divergence(b_p, tl.where(causal, 1.0 / num_causal, 0.0))
    if jobs.sparsity is not None:
        tl.store(jobs.sparsity + i_job * num_rows + i_row, tl.sqrt(tl.maximum(tl.sum(b_apart, 0), 0.0)))


@triton.jit
def _causal_mean(
    b_q, keys, i_row, i_kv, i_block, first, length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The mean of q·k over the pairs of a tile and a block that the causal mask leaves."""
    total = 0.0
    count = 0
    for start in range(0, BLOCK_N, CHUNK):
        o_m, o_n = tl.arange(0, BLOCK_M), i_block * BLOCK_N + start + tl.arange(0, CHUNK)
        b_k = load_keys(keys, i_row, i_kv, o_n, first + length, HEAD_DIM, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        seen = (o_n[None, :] <= first + o_m[:, None]) & (o_m < length)[:, None]
        total += tl.sum(tl.where(seen, b_s, 0.0))
        count += tl.sum(seen.to(tl.int32))
    return total / count
