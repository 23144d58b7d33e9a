# SPDX-License-Identifier: Apache-2.0
"""Attention over a ``SparseIndex`` by FlashAttention's kernel, through block tables that are built from the index.

FlashAttention reads a paged cache through a block table with one row for each sequence; the pages of a sequence may lie
anywhere. Every (query head, tile) therefore becomes a sequence with one head, whose block table lists the kept blocks:

* All diagonal blocks are in the list and come last, so that the last keys of the sequence are the tile's own positions.
  FlashAttention aligns its causal mask to the end of the keys. The mask is correct because the list ends exactly at the
  tile's last position.
* Keys and values are viewed as *units* of consecutive tokens of one kv head, [num_units, unit, 1, head_dim], whose
  first stride is the greatest common divisor of the cache's strides (the *granule*). The number of a unit is its offset
  in granules, which encodes the page, the place in the page and the kv head. Units overlap, and are only read.
* A unit is as wide as blocks and pages allow. Stripes are units of one token. They lie before the tile's first query
  and need no mask. A second call processes them, and its result is merged with the result of the blocks by log-sum-exp.

Two kernels surround the calls: one copies the queries of each sequence together and writes the tables, the other merges
the results, applies sinks, and copies the output back.

On Hopper, version 3 reads an fp8 cache with fp8 queries, rounds weights to fp8 and writes bf16. The scales of
queries and keys are part of the softmax scale, and the last kernel applies the scale of values. FlashAttention itself
receives no scales.

Values past a row's end on its last page must be finite: FlashAttention-3 multiplies them by zero, so that NaN and
infinities reach the output (Dao-AILab/flash-attention, issue 2374). vLLM's own prefill has the same requirement.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch

from vllm_sparse_kernels.attention.engine import AttendArgs, AttendEngine, AttendSpec
from vllm_sparse_kernels.attention.flash.kernels import (
    SLICE_TOKENS,
    SliceShape,
    finish_kernel,
    prepare_kernel,
)
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import compile_time
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import FP8, PagedCache
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div

PART_BYTES = 512 << 20
"""Workspace limit of the sequences that run at a time. Larger steps run in parts. 8,192 queries of 32 heads of 128
need 0.2 GB with blocks only, and 0.3 GB with room for 8,192 stripes per tile.
"""

PART_SEQUENCES = 32768
"""Maximum number of sequences of a call: FlashAttention-2 launches them along a grid axis of at most 65,535."""


@dataclass(frozen=True)
class FlashAttention:
    """FlashAttention's function for paged caches, and its limits.

    Attributes:
        varlen: A function that is called like vLLM's ``flash_attn_varlen_func``, by keyword, with seqused_k and
            block_table, and returns (out, log-sum-exp [num_heads, num_tokens]). If it reads pages of one token, its
            log-sum-exp of a sequence without keys must be −∞.
        page_multiple: The tokens of a page must be a multiple of this number.
        max_seqlen_q: Value of the argument of that name.
        dtypes: Types of queries, keys and values that it reads.
    """

    varlen: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    page_multiple: int = 1
    max_seqlen_q: int = TILE_TOKENS
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    @staticmethod
    def of_version(version: int, varlen: Callable[..., Any]) -> "FlashAttention":
        """Describe vLLM's ``flash_attn_varlen_func`` for FlashAttention 2 or 3.

        Version 3 reads fp8 and pages of any size. Version 2 reads only pages whose size is a multiple of 16 tokens.
        Version 3 reads pages by bulk copies only if ``max_seqlen_q`` exceeds its tile of 128 queries.
        """
        versioned = partial(varlen, fa_version=version, num_splits=1)
        if version == 2:
            return FlashAttention(versioned, page_multiple=16)
        return FlashAttention(versioned, max_seqlen_q=2 * TILE_TOKENS, dtypes=(torch.float16, torch.bfloat16, FP8))


def attend(
    flash: FlashAttention | None,
    call: Call,
    out: torch.Tensor,
    options: AttendOptions | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention of a layer that ``refusal`` accepts; see ``AttendEngine``."""
    assert flash is not None
    queries = AttendArgs.of(call.q, out, sinks)
    for part in _parts(call.index, call.cache):
        with call.workspace.frame():
            _attend_part(flash, call, queries, part)


def flash_engine(flash: FlashAttention | None) -> AttendEngine:
    return AttendEngine("flash", partial(refusal, flash), partial(attend, flash))


def refusal(flash: FlashAttention | None, spec: AttendSpec) -> str | None:
    """Check whether FlashAttention can run a layer."""
    if flash is None:
        return "there is no FlashAttention for this device"
    if spec.skips or spec.int8:
        return f"{'the skip of products' if spec.skips else '8-bit scores'}: FlashAttention has no such option"
    if spec.dtype not in flash.dtypes:
        return f"it reads {', '.join(map(str, flash.dtypes))}, not {spec.dtype}"
    step = 16 if spec.dtype == FP8 else 8
    if spec.head_dim % step or spec.head_dim > 256:
        return f"head_dim {spec.head_dim} is not a multiple of {step} up to 256"
    unit = gcd(spec.block_tokens, spec.page_size)
    if unit % flash.page_multiple:
        return f"pages of {unit} tokens would be needed, and it reads multiples of {flash.page_multiple}"
    if spec.has_stripes and flash.page_multiple > 1:
        return f"single keys need pages of 1 token, and it reads multiples of {flash.page_multiple}"
    if gcd(*spec.strides) * spec.dtype.itemsize % 16:
        return f"the cache's strides {spec.strides} are not multiples of 16 bytes"
    return None


class GranuleStrides(NamedTuple):
    """Strides of the cache in granules, from which the number of a unit follows."""

    page_size: int
    page_granules: int
    token_granules: int
    head_granules: int


class Sequences(NamedTuple):
    """FlashAttention's inputs for the sequences of a part. The fields of stripes are None if there are none."""

    q: Any  # [num_tokens, 1, head_dim]
    ends: Any  # [num_sequences + 1] int32, from 0
    keys: Any  # [num_sequences] int32, number of keys in blocks
    table: Any  # [num_sequences, width] int32, numbers of units
    stripe_keys: Any  # [num_sequences] int32, number of stripes
    stripe_table: Any  # [num_sequences, width] int32, numbers of units of one token


class Part(NamedTuple):
    """Sequences [first, first + num_sequences) and their queries.

    They are numbered by kv head, then by tile with the longest first, then by query head of the group, so that the keys
    of one kv head stay in the L2 cache while all of its readers run.
    """

    first: int
    num_sequences: int
    first_token: int
    num_tokens: int


def _attend_part(flash: FlashAttention, call: Call, queries: AttendArgs, part: Part) -> None:
    """Prepare a part, call FlashAttention for its blocks and, if there are any, its stripes, and merge the results."""
    cache, index, rows, group = call.cache, call.index, call.rows, call.group
    unit = gcd(index.block_tokens, cache.page_size)
    sequences = _allocate_sequences(index, cache, part)
    lists = index.args, rows.once(_starts)[1]
    varying = (part.first, part.first_token, rows.num_tiles, sum(rows.query_lens))
    shape = compile_time(SliceShape(cache.head_dim, cache.padded_head_dim, group, index.block_tokens, unit))
    grid = (part.num_sequences, TILE_TOKENS // SLICE_TOKENS.value)
    stripe_table = sequences.stripe_table
    prepare_kernel[grid](
        queries, *lists, _granule_strides(cache), sequences, *varying,
        rows.block_table, rows.block_table.stride(0),
        sequences.table.stride(0), 0 if stripe_table is None else stripe_table.stride(0),
        shape,
    )  # fmt: skip

    def flash_call(
        keys: torch.Tensor, table: torch.Tensor, unit: int, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return flash.varlen(
            q=sequences.q,
            k=_units(cache, cache.keys, unit),
            v=_units(cache, cache.values, unit),
            out=index.workspace.empty(*sequences.q.shape, dtype=_result_dtype(cache)),
            cu_seqlens_q=sequences.ends,
            max_seqlen_q=flash.max_seqlen_q,
            seqused_k=keys,
            max_seqlen_k=table.shape[1] * unit,
            softmax_scale=call.scale,
            causal=causal,
            block_table=table,
            return_softmax_lse=True,
        )

    results = flash_call(sequences.keys, sequences.table, unit, causal=True)
    by_stripes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if stripe_table is not None:
        by_stripes = flash_call(sequences.stripe_keys, stripe_table, 1, causal=False)
    finish_kernel[grid](queries, *lists, *results, *by_stripes, cache.value_scale, *varying, shape)


def _parts(index: SparseIndex, cache: PagedCache) -> Iterator[Part]:
    """Yield all sequences of the index, in parts that fit the workspace."""
    rows, heads = index.rows, index.num_heads
    group = heads // cache.num_kv_heads
    starts, _ = rows.once(_starts)
    total = sum(rows.query_lens)
    copies = 3 if index.has_stripes else 2
    bytes_each = copies * TILE_TOKENS * cache.head_dim * _result_dtype(cache).itemsize
    bytes_each += 4 * sum(_widths(index, cache))
    num_sequences = rows.num_tiles * heads
    at_once = max(1, min(PART_SEQUENCES, PART_BYTES // bytes_each))
    index.workspace.expect(min(num_sequences, at_once) * bytes_each)
    count = ceil_div(num_sequences, ceil_div(num_sequences, at_once))

    def first_token(sequence: int) -> int:
        i_kv, in_kv_head = divmod(sequence, rows.num_tiles * group)
        rank, i_head = divmod(in_kv_head, group)
        length = rows.tile_list[rows.tile_order[rank]].length_tokens if i_head else 0
        return (i_kv * total + starts[rank]) * group + i_head * length

    for first in range(0, num_sequences, count):
        end = min(first + count, num_sequences)
        token, end_token = first_token(first), total * heads if end == num_sequences else first_token(end)
        yield Part(first, end - first, token, end_token - token)


def _allocate_sequences(index: SparseIndex, cache: PagedCache, part: Part) -> Sequences:
    """Allocate the tensors of a part."""
    int32 = partial(index.workspace.empty, dtype=torch.int32)
    width, stripe_width = _widths(index, cache)
    return Sequences(
        index.workspace.empty(part.num_tokens, 1, cache.head_dim, dtype=cache.keys.dtype),
        int32(part.num_sequences + 1),
        int32(part.num_sequences),
        int32(part.num_sequences, width),
        int32(part.num_sequences) if stripe_width else None,
        int32(part.num_sequences, stripe_width) if stripe_width else None,
    )


def _result_dtype(cache: PagedCache) -> torch.dtype:
    """Return the dtype that FlashAttention writes."""
    return torch.bfloat16 if cache.keys.dtype == FP8 else cache.keys.dtype


def _widths(index: SparseIndex, cache: PagedCache) -> tuple[int, int]:
    """Return the columns of the tables of blocks and of stripes: upper bounds over all tiles."""
    unit = gcd(index.block_tokens, cache.page_size)
    return ceil_div(max(index.rows.seq_lens), unit), index.longest_stripes


def _starts(rows: Rows) -> tuple[list[int], torch.Tensor]:
    """Count the queries of the tiles before each tile of ``rows.tile_order``, on the host and on the device."""
    lengths = (rows.tile_list[i_tile].length_tokens for i_tile in rows.tile_order)
    starts = [*accumulate(lengths, initial=0)][:-1]
    return starts, rows.to_device(starts)


def _granule_strides(cache: PagedCache) -> GranuleStrides:
    granule = gcd(*cache.strides)
    num_granules = cache.last_offset // granule
    if num_granules >= 1 << 31:
        raise ValueError(
            f"attend: given a cache of {num_granules} · {granule} elements, expected fewer than 2³¹ · {granule}"
        )
    return GranuleStrides(cache.page_size, *(stride // granule for stride in cache.strides))


def _units(cache: PagedCache, x: torch.Tensor, unit: int) -> torch.Tensor:
    """View the cache's keys or values as overlapping units [n, unit, 1, head_dim]."""
    granule, stride_token, head_dim = gcd(*cache.strides), cache.strides[1], cache.head_dim
    num_units = (cache.last_offset - (unit - 1) * stride_token) // granule + 1
    return x.as_strided((num_units, unit, 1, head_dim), (granule, stride_token, head_dim, 1))
