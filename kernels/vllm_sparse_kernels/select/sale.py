"""SALE (Ji et al., 2025: "SALE: Low-bit Estimation for Efficient Sparse Attention in Long-context LLM Prefilling").

Blocks of b_q = 64 queries × b_k = 32 keys. Sink and local blocks are kept; of the blocks between them, those with an
element whose relative attention score, estimated from 4-bit queries and keys, is τ or more (Algorithm 1):

1. Quantisation (section 3.2 names SageAttention-2's; the rest is from the authors' code): q − q̄ and k − k̄, with q̄ the
   head's mean query of this step and k̄ the row's mean key, become integers −7 … 7. In a block of 32, keys j of equal
   (j mod 8) // 2 share a scale: eight keys, those that one thread holds in the matrix instruction's result.
2. m̃ and l̃: row maximum and sum of exponentials over sink and local region, in full precision.
3. S̃ = scale · (Q̃K̃ᵀ dequantised + q̄(k − k̄)ᵀ + q k̄ᵀ) and exp(S̃ − m̃)/l̃ ≥ τ (equation 3). Equation 4 misplaces a
   parenthesis, "S̃ ≥ ln(τ·l̃ + m̃)": taking logarithms gives S̃ ≥ ln τ + ln l̃ + m̃, which is what is tested. The terms that
   do not change along a row, q k̄ᵀ with them, go into one threshold per query.

What decides the local region's size (appendix C): blocks between sink and local region are taken in segments of four,
and those left over at the row's end (fewer than four) join the local region, which so has 128 to 224 tokens.

Where the paper leaves a choice, or this departs from it:

* Every query has a scale of its own. The authors' queries share one by pairs, r and r + 8 of each 16, because a thread
  of their instruction holds both.
* Hopper has no 4-bit matrix instruction. The integers are exact in int8 and in e4m3: nothing of the arithmetic is lost.
  From Hopper on they are multiplied as e4m3, whose results need no conversion: a sum is an integer of at most
  49 · head_dim ≤ 12,544 < 2^14, and Hopper's fp8 accumulator, though narrower than float32, keeps 14 bits (tests hold
  it to that). Elsewhere they are int8.
* The authors round q̄(k − k̄)ᵀ to an integer and compare in half precision. On Hopper comparing is what costs, and what
  they do is done here too where it is safe: e4m3 products are added up in half precision, which has every integer
  up to 2,048, and so has all sums exactly while |q̃| · |k̃| is no more (Cauchy and Schwarz); with q̄(k − k̄)ᵀ, at most
  2,048 steps as well, scores are off by 2^-11 of themselves and 2^-10 of it at most, a fraction of what 4 bits lose.
  A program whose queries or keys may exceed this compares in float32, and so do all elsewhere.
* Query blocks are counted from the row's first query of this step and lie askew of absolute positions. A tile of 128
  queries keeps the union of its two, a block of 64 or 128 keys the union of its 32-key blocks. As the second query
  block's local region begins no earlier than the first's, only keys before the first's are tested.
* Both means are over what this step sees, so selection depends on the chunking, and on later queries of the same chunk.
* The authors run prompts of at most 1,024 tokens dense. That is for the backend to decide.
* The paper computes attention over the selected blocks in 8 bits (SageAttention). That is ``attend``'s option, off
  unless ``int8_scores`` asks for it: attention over what was kept is then exact to rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache, key_args, key_means, load_keys
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div
from vllm_sparse_kernels.select.base import Method, PerHead, on_device, require
from vllm_sparse_kernels.select.lists import compact_blocks

QUERY_BLOCK = tl.constexpr(64)  # b_q
KEY_BLOCK = tl.constexpr(32)  # b_k
LEVELS = tl.constexpr(7.0)
TINY = tl.constexpr(1e-20)  # stands in for the largest magnitude of a vector of zeros
LEAST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

WORD_BLOCKS = 64
"""Index blocks that one program tests: a bit of a word for each."""

TEST_TILES = 2
"""Tiles that one program tests together: keys are read half as often as with one. L2 could not keep up otherwise."""

TEST_WARPS = 4
"""A warp group's: a thread then holds 128 registers of scores, and two programs run on one multiprocessor."""

HALF_INTEGERS = tl.constexpr(2048.0)
"""Half precision has every integer up to this one."""

VARYING = ("i_row", "token", "context_len", "query_len", "seq_len", "num_heads", "stride_kept", "block_offsets")
"""Kernel arguments that change from step to step: they shall not call for new variants of a kernel."""


class QueryArgs(NamedTuple):
    """q, head_dim contiguous."""

    q: Any
    stride_token: int
    stride_head: int


class RoundedQueries(NamedTuple):
    """A row's queries in 4 bits. Integers are of type int8 or e4m3; scores are counted in (query step) · (key step)."""

    integers: Any  # [len(heads), num_queries, BLOCK_D]
    thresholds: Any  # [len(heads), num_queries] float32, in query steps; infinity past the row's end
    inverse_steps: Any  # [len(heads), num_queries] float32, 0 past the row's end
    squares: Any  # [len(heads), num_queries] float32, of the integers' length
    num_queries: int  # whole tiles


class RoundedKeys(NamedTuple):
    """A row's keys in 4 bits. What belongs to kv heads that none of ``heads`` reads is undefined."""

    integers: Any  # [num_kv_heads, num_keys, BLOCK_D]
    steps: Any  # [num_kv_heads, num_keys / 8] float32
    biases: Any  # [len(heads), num_keys] float32, q̄(k − k̄)ᵀ in key steps
    squares: Any  # [num_kv_heads, num_keys / 64] float32, of the longest of 64 keys' integers
    largest_biases: Any  # [len(heads), num_keys / 64] float32, largest magnitude among those of 64 keys
    num_keys: int  # a multiple of 128


@dataclass(frozen=True)
class Sale(Method):
    """Parameters of SALE; the defaults are the paper's (sections 3.2 and 4.1)."""

    tau: float = 0.004
    """τ, in [0, 1): relative attention score from which a block is kept. 0 keeps every block. The paper calibrates it
    per head, from 0.008 downwards by halves."""

    sink_tokens: int = 32
    """Keys at the sequence's begin that are always kept, in whole 32-key blocks."""

    local_tokens: int = 128
    """l, the least number of keys before a query block's end that are always kept; the module says when more are."""

    int8_scores: bool = False
    """Multiply queries and keys of the kept blocks in 8 bits."""

    SEGMENT_TOKENS: ClassVar[int] = 128
    """Four 32-key blocks: what lies between sink and local region is a multiple of this."""

    def __post_init__(self) -> None:
        require(0 <= self.tau < 1, "tau", self.tau, "a number in [0, 1)")
        for name, value, least in (("sink_tokens", self.sink_tokens, 0), ("local_tokens", self.local_tokens, 128)):
            whole = isinstance(value, int) and value >= least and value % KEY_BLOCK.value == 0
            require(whole, name, value, f"a multiple of {KEY_BLOCK.value} >= {least}")

    @property
    def alike(self) -> "Sale":
        return Sale(sink_tokens=self.sink_tokens, local_tokens=self.local_tokens)

    @classmethod
    def merged(cls, methods: Sequence[Self]) -> Method:
        return SaleLayer.join(methods)

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        index.stripe_counts.index_fill_(0, heads.long(), 0)
        taus = [one.tau for one in self.of_heads(len(heads))]
        if not any(taus):
            compact_blocks(None, index, heads)
            return
        log_taus = on_device(tuple(math.log(tau) if tau else -math.inf for tau in taus), q.device)
        kept = torch.ones(len(heads), index.block_ids.shape[1], dtype=torch.uint8, device=q.device)
        for row in range(index.rows.num_rows):
            queries, keys = _round_row(self, q, cache, index.rows, row, heads, log_taus, scale)
            _test_row(self, queries, keys, index, row, heads, q.shape[1] // cache.num_kv_heads, kept)
        compact_blocks(kept, index, heads)


@dataclass(frozen=True)
class SaleLayer(PerHead, Sale):
    """Heads that differ in τ or in what they ask of attention; keys are quantised once for all."""


def integer_dtype(device: torch.device) -> torch.dtype:
    """What the 4-bit integers are multiplied as."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return torch.float8_e4m3fn if hopper else torch.int8


def adds_up_in_half(device: torch.device) -> bool:
    """Whether e4m3 products are known to be added up in half precision without loss, where the sums fit."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def _round_row(
    method: Sale,
    q: torch.Tensor,
    cache: PagedCache,
    rows: Rows,
    row: int,
    heads: torch.Tensor,
    log_taus: torch.Tensor,
    scale: float,
) -> tuple[RoundedQueries, RoundedKeys]:
    """Quantise the queries and keys of one row, and find the queries' thresholds."""
    token, query_len, seq_len = rows.tokens[row], rows.query_lens[row], rows.seq_lens[row]
    block_d = triton.next_power_of_2(cache.head_dim)
    num_tiles = ceil_div(query_len, TILE_TOKENS)
    num_queries, num_keys = num_tiles * TILE_TOKENS, ceil_div(seq_len, 128) * 128
    shape = {"HEAD_DIM": cache.head_dim, "BLOCK_D": block_d, "GROUP": q.shape[1] // cache.num_kv_heads}
    cached = key_args(cache, rows.block_table)
    query_args = QueryArgs(q, q.stride(0), q.stride(1))
    dtype = integer_dtype(q.device)

    def room(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    means = key_means(cache, rows.block_table, row, seq_len)
    query_means = q[token : token + query_len].mean(0, dtype=torch.float32)

    keys = RoundedKeys(
        room(cache.num_kv_heads, num_keys, block_d, dtype=dtype),
        room(cache.num_kv_heads, num_keys // 8), room(len(heads), num_keys),
        room(cache.num_kv_heads, num_keys // 64), room(len(heads), num_keys // 64), num_keys,
    )  # fmt: skip
    _round_keys_kernel[(num_keys // 64, cache.num_kv_heads)](
        cached, keys, means, query_means, heads, len(heads), row, seq_len,
        **shape, HEADS=triton.next_power_of_2(len(heads)), BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    queries = RoundedQueries(
        room(len(heads), num_queries, block_d, dtype=dtype),
        room(len(heads), num_queries), room(len(heads), num_queries), room(len(heads), num_queries), num_queries,
    )  # fmt: skip
    _round_queries_kernel[(num_tiles, len(heads))](
        query_args, cached, queries, means, query_means, heads,
        row, token, rows.context_lens[row], query_len,
        method.sink_tokens, method.local_tokens, log_taus, scale,
        **shape, SEGMENT=method.SEGMENT_TOKENS, BLOCK_M=TILE_TOKENS, BLOCK_N=64,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
    return queries, keys


def _test_row(
    method: Sale, queries: RoundedQueries, keys: RoundedKeys, index: SparseIndex, row: int, heads: torch.Tensor,
    group: int, kept: torch.Tensor,
) -> None:  # fmt: skip
    """Clear the flags of one row's blocks between sink and local region in which no element passes."""
    rows = index.rows
    first_tile, end_tile = rows.tile_starts[row], rows.tile_starts[row + 1]
    num_programs = ceil_div(end_tile - first_tile, TEST_TILES)
    half = keys.integers.dtype == torch.float8_e4m3fn and adds_up_in_half(kept.device)
    _test_kernel[(num_programs, ceil_div(rows.seq_lens[row], WORD_BLOCKS * index.block_tokens), len(heads))](
        queries, keys, heads, kept, kept.stride(0), index.block_offsets[first_tile:end_tile],
        rows.context_lens[row], rows.query_lens[row], method.sink_tokens, method.local_tokens,
        SEGMENT=method.SEGMENT_TOKENS, GROUP=group, BLOCK_D=keys.integers.shape[2], TILE=TILE_TOKENS, TILES=TEST_TILES,
        INDEX_N=index.block_tokens, WORD=WORD_BLOCKS, WARPS=TEST_WARPS, HALF=half, PACKED=half and kept.is_cuda,
        num_warps=TEST_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _round_keys_kernel(
    keys, rounded, key_means, query_means, heads, num_heads, i_row, seq_len,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Step 1 for BLOCK_N keys of one kv head, if any of ``heads`` reads it, and its heads' q̄(k − k̄)ᵀ."""
    i_n = tl.program_id(0)
    i_kv = tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_h = tl.arange(0, HEADS)
    b_heads = tl.load(heads + o_h, mask=o_h < num_heads, other=0)
    readers = tl.sum(((b_heads // GROUP == i_kv) & (o_h < num_heads)).to(tl.int32), 0)
    if readers > 0:
        b_k = load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM, BLOCK_D).to(tl.float32)
        b_k = tl.where((o_n < seq_len)[:, None], b_k - tl.load(key_means + i_kv * BLOCK_D + o_d)[None, :], 0.0)
        b_largest = tl.reshape(tl.max(tl.abs(b_k), 1), [BLOCK_N // 32, 4, 4, 2])
        b_step = tl.maximum(tl.max(tl.max(b_largest, 3), 1), TINY) / LEVELS
        o_step = i_kv.to(tl.int64) * rounded.num_keys // 8 + i_n * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
        tl.store(rounded.steps + o_step, tl.reshape(b_step, [BLOCK_N // 8]))
        b_steps = tl.reshape(tl.broadcast_to(b_step[:, None, :, None], [BLOCK_N // 32, 4, 4, 2]), [BLOCK_N])
        b_int = tl.floor(b_k * (1.0 / b_steps)[:, None] + 0.5)
        tl.store(rounded.squares + i_kv * (rounded.num_keys // BLOCK_N) + i_n, tl.max(tl.sum(b_int * b_int, 1), 0))
        o_int = (i_kv.to(tl.int64) * rounded.num_keys + o_n)[:, None] * BLOCK_D + o_d[None, :]
        tl.store(rounded.integers + o_int, b_int.to(rounded.integers.dtype.element_ty))
        for i in range(num_heads):
            i_head = tl.load(heads + i)
            if i_head // GROUP == i_kv:
                b_mean = tl.load(query_means + i_head * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)
                b_bias = tl.sum(b_k * b_mean[None, :], 1) / b_steps
                tl.store(rounded.biases + tl.cast(i, tl.int64) * rounded.num_keys + o_n, b_bias)
                largest = tl.max(tl.abs(b_bias), 0)
                tl.store(rounded.largest_biases + i * (rounded.num_keys // BLOCK_N) + i_n, largest)


@triton.jit
def _local_start(i_end, context_len, query_len, sink_tokens, local_tokens, SEGMENT: tl.constexpr):
    """Where the local region of the 64-query block begins that ends at the row's ``i_end``-th query, or before."""
    end = context_len + tl.minimum(i_end, query_len)
    between = (end + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK - sink_tokens - local_tokens
    return tl.where(between >= 0, sink_tokens + between // SEGMENT * SEGMENT, 0)


@triton.jit(do_not_specialize=VARYING)
def _round_queries_kernel(
    queries, keys, rounded, key_means, query_means, heads, i_row, token, context_len, query_len,
    sink_tokens, local_tokens, log_taus, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps 1 and 2 for one tile of one head."""
    i_tile = tl.program_id(0)
    i_group = tl.program_id(1)
    i_head = tl.load(heads + i_group)
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    in_row = o_m < query_len
    in_head = in_row[:, None] & (o_d < HEAD_DIM)[None, :]
    o_q = (token + o_m).to(tl.int64)[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :]
    b_q = tl.load(queries.q + o_q, mask=in_head, other=0.0)
    # The query blocks of the tile, and their local regions: b_local per query, begin for the first of them.
    begin = _local_start(i_tile * BLOCK_M + QUERY_BLOCK, context_len, query_len, sink_tokens, local_tokens, SEGMENT)
    later = _local_start(i_tile * BLOCK_M + BLOCK_M, context_len, query_len, sink_tokens, local_tokens, SEGMENT)
    b_local = tl.where(o_m < i_tile * BLOCK_M + QUERY_BLOCK, begin, later)
    where = (keys, i_row, i_head // GROUP, context_len + o_m, context_len + query_len)
    b_lse = _local_lse(b_q, where, b_local, begin, sink_tokens, scale, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION)

    b_q = b_q.to(tl.float32)
    b_mean = tl.load(key_means + i_head // GROUP * BLOCK_D + o_d)
    b_threshold = (tl.load(log_taus + i_group) + b_lse) / scale - tl.sum(b_q * b_mean[None, :], 1)
    b_mean = tl.load(query_means + i_head * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)
    b_q = tl.where(in_head, b_q - b_mean[None, :], 0.0)
    b_step = tl.maximum(tl.max(tl.abs(b_q), 1), TINY) / LEVELS
    b_int = tl.floor(b_q * (1.0 / b_step)[:, None] + 0.5)
    o_r = i_group.to(tl.int64) * rounded.num_queries + o_m
    tl.store(rounded.integers + o_r[:, None] * BLOCK_D + o_d[None, :], b_int.to(rounded.integers.dtype.element_ty))
    tl.store(rounded.squares + o_r, tl.sum(b_int * b_int, 1))
    tl.store(rounded.thresholds + o_r, tl.where(in_row, b_threshold / b_step, float("inf")))
    tl.store(rounded.inverse_steps + o_r, tl.where(in_row, 1.0 / b_step, 0.0))


@triton.jit
def _local_lse(
    b_q, where, b_local, begin, sink_tokens, scale,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ln l̃ + m̃ of each query over sink and local region: [BLOCK_M]."""
    keys, i_row, i_kv, o_m, seq_len = where
    begin = begin // BLOCK_N * BLOCK_N
    end = tl.minimum(tl.max(o_m, 0) + 1, seq_len)
    sink_steps = (tl.minimum(sink_tokens, begin) + BLOCK_N - 1) // BLOCK_N
    local_steps = (end - begin + BLOCK_N - 1) // BLOCK_N
    b_max = tl.full([b_q.shape[0]], LEAST, tl.float32)
    b_sum = tl.zeros([b_q.shape[0]], tl.float32)
    for i in range(sink_steps + local_steps):
        o_n = tl.where(i < sink_steps, i * BLOCK_N, begin + (i - sink_steps) * BLOCK_N) + tl.arange(0, BLOCK_N)
        b_k = load_keys(keys, i_row, i_kv, o_n, end, HEAD_DIM, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2_E)
        seen = (o_n < sink_tokens)[None, :] | (o_n[None, :] >= b_local[:, None])
        b_s = tl.where(seen & (o_n[None, :] <= o_m[:, None]), b_s, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        b_sum = b_sum * tl.exp2(b_max - b_new_max) + tl.sum(tl.exp2(b_s - b_new_max[:, None]), 1)
        b_max = b_new_max
    return (b_max + tl.log2(b_sum)) * LN_2


@triton.jit(do_not_specialize=VARYING)
def _test_kernel(
    queries, keys, heads, kept, stride_kept, block_offsets, context_len, query_len, sink_tokens, local_tokens,
    SEGMENT: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    INDEX_N: tl.constexpr, WORD: tl.constexpr, WARPS: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Step 3 for TILES tiles of one head and WORD index blocks: flags of those between sink and local region."""
    i_tile = tl.program_id(0) * TILES
    i_first = tl.program_id(1) * WORD
    i_group = tl.program_id(2)
    last = tl.minimum(i_tile + TILES, (query_len + TILE - 1) // TILE) - 1
    stop = _local_start(last * TILE + QUERY_BLOCK, context_len, query_len, sink_tokens, local_tokens, SEGMENT)
    begin = tl.maximum((sink_tokens + INDEX_N - 1) // INDEX_N, i_first)
    end = tl.minimum(stop // INDEX_N, i_first + WORD)
    if begin < end:
        i_kv = tl.load(heads + i_group) // GROUP
        where = (i_group, i_kv, begin, end, i_first)
        in_half = False
        if HALF:
            in_half = _fits_half(queries, keys, where, TILES * TILE, INDEX_N, WORD)
        if in_half:
            b_word = _test_blocks(queries, keys, where, BLOCK_D, TILE, TILES, INDEX_N, WARPS, HALF, PACKED)
        else:
            b_word = _test_blocks(queries, keys, where, BLOCK_D, TILE, TILES, INDEX_N, WARPS, False, False)
        o_t = i_tile + tl.arange(0, TILES)
        o_b = i_first + tl.arange(0, WORD)
        b_stop = _local_start(o_t * TILE + QUERY_BLOCK, context_len, query_len, sink_tokens, local_tokens, SEGMENT)
        tested = (o_b >= begin)[None, :] & (o_b[None, :] < (b_stop // INDEX_N)[:, None]) & (o_t <= last)[:, None]
        o_kept = tl.load(block_offsets + o_t, mask=o_t <= last, other=0)[:, None] + o_b[None, :]
        b_flag = (b_word[:, None] >> tl.arange(0, WORD)[None, :]) & 1
        tl.store(kept + i_group.to(tl.int64) * stride_kept + o_kept, b_flag.to(tl.uint8), mask=tested)


@triton.jit
def _fits_half(queries, keys, where, BLOCK_M: tl.constexpr, INDEX_N: tl.constexpr, WORD: tl.constexpr):
    """Whether half precision has all sums of products exactly, and biases in range."""
    i_group, i_kv, begin, end, i_first = where
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_q = i_group.to(tl.int64) * queries.num_queries + o_m
    b_square = tl.load(queries.squares + o_q, mask=o_m < queries.num_queries, other=0.0)
    b_inverse = tl.load(queries.inverse_steps + o_q, mask=o_m < queries.num_queries, other=0.0)
    PARTS: tl.constexpr = INDEX_N // 64
    o_n = i_first * PARTS + tl.arange(0, WORD * PARTS)
    tested = (o_n >= begin * PARTS) & (o_n < end * PARTS)
    num_parts = keys.num_keys // 64
    longest = tl.max(b_square, 0) * tl.max(tl.load(keys.squares + i_kv * num_parts + o_n, mask=tested, other=0.0), 0)
    inverse = tl.max(b_inverse, 0)
    bias = tl.max(tl.load(keys.largest_biases + i_group * num_parts + o_n, mask=tested, other=0.0), 0)
    # Each factor alone in half precision's range, below 2^16, with room.
    in_range = (inverse <= 32768) & (bias <= 32768) & (inverse * bias <= HALF_INTEGERS)
    return in_range & (longest <= HALF_INTEGERS * HALF_INTEGERS)


@triton.jit
def _test_blocks(
    queries, keys, where, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, INDEX_N: tl.constexpr,
    WARPS: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """[TILES] words: bit b says whether an element of index block ``i_first`` + b passes, for blocks [begin, end)."""
    i_group, i_kv, begin, end, i_first = where
    BLOCK_M: tl.constexpr = TILES * TILE
    # Scores of as many bytes, half or float32.
    BLOCK_N: tl.constexpr = 128 if HALF else 64
    STAGES: tl.constexpr = 3 if HALF else 4
    BLOCKS: tl.constexpr = BLOCK_N // INDEX_N if BLOCK_N > INDEX_N else 1  # index blocks of a step
    dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    o_step = tl.arange(0, BLOCK_N // 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    in_row = o_m < queries.num_queries
    o_q = i_group.to(tl.int64) * queries.num_queries + o_m
    b_q = tl.load(queries.integers + o_q[:, None] * BLOCK_D + o_d[None, :], mask=in_row[:, None], other=0.0)
    b_threshold = tl.load(queries.thresholds + o_q, mask=in_row, other=float("inf"))
    b_inverse = tl.load(queries.inverse_steps + o_q, mask=in_row, other=0.0).to(dtype)
    b_inverse = tl.broadcast_to(b_inverse[:, None], [BLOCK_M, BLOCK_N])
    integers = keys.integers + i_kv.to(tl.int64) * keys.num_keys * BLOCK_D
    steps = keys.steps + i_kv.to(tl.int64) * (keys.num_keys // 8)
    biases = keys.biases + i_group.to(tl.int64) * keys.num_keys
    b_bits = tl.zeros([TILES, WARPS, 8, 4], tl.int64)
    for i in tl.range(begin * INDEX_N // BLOCK_N, (end * INDEX_N + BLOCK_N - 1) // BLOCK_N, num_stages=STAGES):
        b_k = tl.load(integers + (i * BLOCK_N + o_n)[:, None] * BLOCK_D + o_d[None, :])
        b_bias = tl.load(biases + i * BLOCK_N + o_n)
        b_step = tl.load(steps + i * (BLOCK_N // 8) + o_step)
        b_bias = tl.broadcast_to(b_bias.to(dtype)[None, :], [BLOCK_M, BLOCK_N])
        b_top = _largest(_multiply(b_q, b_k, b_inverse, b_bias, HALF, PACKED), PACKED) * b_step[None, :, :]
        b_top = tl.max(tl.reshape(b_top, [BLOCK_M, BLOCKS, BLOCK_N // 32 // BLOCKS, 4]), 2)
        # Axes 1 and 3 lie in one thread: queries 8 apart of the 16 that a warp holds of every 16 · WARPS.
        b_over = b_top - b_threshold[:, None, None]
        b_over = tl.reshape(b_over, [TILES, TILE // (16 * WARPS), WARPS, 2, 8, BLOCKS, 4])
        b_passes = (tl.max(tl.max(b_over, 3), 1) >= 0).to(tl.int64) << tl.arange(0, BLOCKS)[:, None]
        b_bits |= tl.reduce_or(b_passes, 3) << (i * BLOCK_N // INDEX_N - i_first)
    return tl.reduce_or(tl.reshape(b_bits, [TILES, WARPS * 32]), 1)


@triton.jit
def _multiply(b_q, b_k, b_inverse, b_bias, HALF: tl.constexpr, PACKED: tl.constexpr):
    """Scores in (query step) · (key step): [BLOCK_M, BLOCK_N], in half precision if HALF, two at once if PACKED."""
    if not HALF:
        return tl.fma(b_inverse, b_bias, tl.dot(b_q, tl.trans(b_k)).to(tl.float32))
    b_s = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float16)
    if PACKED:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [b_inverse, b_bias, b_s], tl.float16, is_pure=True, pack=2
        )
    return tl.fma(b_inverse, b_bias, b_s)


@triton.jit
def _largest(b_s, PACKED: tl.constexpr):
    """[queries, BLOCK_N // 32, 4] float32: largest of the eight scores that share a key step. One thread has them."""
    NUM: tl.constexpr = b_s.shape[1] // 32
    if PACKED:
        b_s = tl.permute(tl.reshape(b_s, [b_s.shape[0], NUM, 2, 2, 4, 2]), [0, 1, 4, 5, 2, 3])
        b_even, b_odd = tl.split(b_s)
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        b_s = _larger_pairs(_larger_pairs(_larger_pairs(b_0, b_1), b_2), b_3)
    else:
        b_s = tl.max(tl.reshape(b_s, [b_s.shape[0], NUM, 4, 4, 2]), 2)
    return tl.max(b_s.to(tl.float32), 3)


@triton.jit
def _larger_pairs(b_a, b_b):
    """Maximum in half precision, two elements in one instruction."""
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [b_a, b_b], tl.float16, is_pure=True, pack=2)
