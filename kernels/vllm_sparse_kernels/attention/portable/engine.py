# SPDX-License-Identifier: Apache-2.0
"""Attention over a SparseIndex by one Triton kernel, for every device that Triton supports and with all options.

A program owns one (query head, tile), or a part of the tile's queries if the GPU cannot hold all of them
(``program_queries``). It walks the tile's blocks with FlashAttention's online softmax (in base 2), masks only where a
block touches the diagonal, then gathers the tile's stripes.

Programs run kv head by kv head, with the heaviest tile first and the heads of a group side by side. The keys and values
of one kv head therefore stay in the L2 cache while all of its readers run.

Heads may request the approximations of ``AttendOptions``. One launch serves a layer of mixed heads, and each program
uses its head's options.
"""

import torch
import triton

from vllm_sparse_kernels.attention.engine import AttendArgs, AttendEngine, AttendSpec
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.portable.kernel import AttendShape, attend_kernel
from vllm_sparse_kernels.attention.smooth_keys import SmoothKeys, smooth_keys
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import compile_time
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache, key_args, padded_dim
from vllm_sparse_kernels.rows import TILE_TOKENS

STRIPE_STEP = 64
"""Stripes that are gathered per step."""

MIN_QUERIES = 64
"""Fewest queries of a program: the minimum of Hopper's matrix instruction."""

RESULT_ELEMENTS = 128 * 256
"""Largest result of a program, in float32 elements held in registers: 128 per thread of 8 warps."""


def attend(
    call: Call,
    out: torch.Tensor,
    options: AttendOptions | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention, exact to rounding without ``options``, in fp16, bf16 or fp8; fp32 in the interpreter."""
    q, cache, index, rows = call.q, call.cache, call.index, call.rows
    num_heads, head_dim = index.num_heads, cache.head_dim
    block_d, limit_bytes = padded_dim(head_dim), shared_bytes(q.device)
    num_queries = program_queries(head_dim, limit_bytes)
    num_parts = TILE_TOKENS // num_queries
    shape = compile_time(
        AttendShape(
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            NUM_HEADS=num_heads,
            GROUP=call.group,
            BLOCK_M=num_queries,
            PARTS=num_parts,
            BLOCK_N=index.block_tokens,
            STRIPES=STRIPE_STEP if index.has_stripes else 0,
            AHEAD=_buffers_ahead(index.block_tokens, head_dim, limit_bytes, options is not None and options.skips),
        )
    )
    num_warps = 8 if num_queries * block_d >= 128 * 128 else 4  # a thread holds at most 128 elements of the result
    num_stages = _num_stages(index.block_tokens, head_dim, limit_bytes)
    attend_kernel[(rows.num_tiles * num_heads * num_parts,)](
        AttendArgs.of(q, out, sinks), key_args(cache, rows.block_table, values=True), index.args,
        call.scale_in_base_2, cache.value_scale, *_option_args(options, cache, index),
        shape, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def refusal(spec: AttendSpec) -> str | None:
    """Check whether the kernel can run a layer."""
    if spec.device.type == "cpu" and isinstance(attend_kernel, triton.JITFunction):
        return "Triton runs kernels on a CPU only in its interpreter (TRITON_INTERPRET=1)"
    limit_bytes = shared_bytes(spec.device)
    if _needed_bytes(spec.block_tokens, spec.head_dim, 1, limit_bytes) > limit_bytes:
        return (
            f"blocks of {spec.block_tokens} keys of {spec.head_dim} do not fit the {limit_bytes} bytes of shared memory"
        )
    return None


def widest_block(head_dim: int, limit_bytes: int) -> int | None:
    """Return the widest block for which ``attend`` has shared memory. Blocks of 128 need two buffers to pay off."""
    if _needed_bytes(128, head_dim, 2, limit_bytes) <= limit_bytes:
        return 128
    return 64 if _needed_bytes(64, head_dim, 1, limit_bytes) <= limit_bytes else None


def program_queries(head_dim: int, limit_bytes: int) -> int:
    """Return the number of a tile's queries that a program processes."""
    fits_registers = TILE_TOKENS * padded_dim(head_dim) <= RESULT_ELEMENTS
    fits_memory = _program_bytes(64, head_dim, 1, TILE_TOKENS) <= limit_bytes
    return TILE_TOKENS if fits_registers and fits_memory else MIN_QUERIES


def _program_bytes(block_tokens: int, head_dim: int, num_buffers: int, num_queries: int) -> int:
    """Return the shared memory of 16-bit queries and buffered keys and values on Hopper; Ampere needs no more."""
    block_d = padded_dim(head_dim)
    return 2 * block_d * (num_queries + 2 * num_buffers * block_tokens) + 1024


def _needed_bytes(block_tokens: int, head_dim: int, num_buffers: int, limit_bytes: int) -> int:
    """Return ``_program_bytes`` for the number of queries that a program processes on a GPU with this shared memory."""
    return _program_bytes(block_tokens, head_dim, num_buffers, program_queries(head_dim, limit_bytes))


def _num_stages(block_tokens: int, head_dim: int, limit_bytes: int) -> int:
    """Return the pipeline stages of the loops over keys: 1 if two buffers do not fit, more for narrow blocks."""
    if _needed_bytes(block_tokens, head_dim, 2, limit_bytes) > limit_bytes:
        return 1
    return 3 if block_tokens * head_dim <= 64 * 128 else 2


def _buffers_ahead(block_tokens: int, head_dim: int, limit_bytes: int, with_margins: bool) -> int:
    """Return the number of buffers for whole steps; 0 if two of them do not fit and there are no margins."""
    # Two buffers of keys and values need a third buffer of keys, which are loaded a step earlier. Without them, the
    # compiler loads keys and values separately, which margins do not allow.
    extra = 2 * padded_dim(head_dim) * block_tokens
    return 2 if _needed_bytes(block_tokens, head_dim, 2, limit_bytes) + extra <= limit_bytes else int(with_margins)


def _option_args(
    options: AttendOptions | None, cache: PagedCache, index: SparseIndex
) -> tuple[torch.Tensor | None, torch.Tensor | None, SmoothKeys | None]:
    """Return margins to skip, flags of the 8-bit heads and 8-bit keys, or None for each."""
    # The results are separate arguments: Triton 3.6 cannot compare a tuple that contains None with None.
    if options is None:
        return None, None, None
    if options.int8_heads is None:
        return options.skip_margins, None, None
    int8_heads = None if options.all_int8 else options.int8_heads
    return options.skip_margins, int8_heads, smooth_keys(cache, index.rows, index.workspace)


PORTABLE = AttendEngine("portable", refusal, attend)
