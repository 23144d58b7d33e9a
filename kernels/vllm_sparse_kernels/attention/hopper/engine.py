# SPDX-License-Identifier: Apache-2.0
"""Attention over a SparseIndex on Hopper: bulk copies, asynchronous matrix products, one persistent launch.

``hopper_kernel`` describes the algorithm. There are two launches. The first is small: it locates every listed block and
stripe in the cache and orders the work. In the second, one program per multiprocessor takes items of work in that
order. The result of an item does not depend on the program that computes it, or on the time.
"""

from functools import lru_cache, partial
from math import gcd
from typing import Any, NamedTuple

import torch

from vllm_sparse_kernels.attention.engine import AttendArgs, AttendEngine, AttendSpec
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.engine_choice import MISSING_GLUON, gluon_refusal
from vllm_sparse_kernels.index import IndexArgs, SparseIndex
from vllm_sparse_kernels.paged import KeyArgs, key_args
from vllm_sparse_kernels.rows import ceil_div

if MISSING_GLUON is None:
    from vllm_sparse_kernels.attention.hopper.item import COLUMNS, HALF, SIZES
    from vllm_sparse_kernels.attention.hopper.kernel import hopper_kernel
    from vllm_sparse_kernels.attention.hopper.prepare import RANKED, prepare_kernel
    from vllm_sparse_kernels.gluon_compat import TensorDescriptor, gl

    GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

BLOCKS = (32, 64, 128)
"""Widths of an index's blocks."""

LEAST_BOX = 16
"""Fewest keys of a bulk copy."""


class HeadStrideArgs(NamedTuple):
    """Strides of heads in q and in the cache, both viewed as matrices whose rows are tokens."""

    columns_per_query_head: int
    columns_per_head: int


class WorkArgs(NamedTuple):
    """Output of ``prepare_kernel``: cache rows of blocks and stripes, and the order of the work."""

    places: Any  # [num_heads · block_capacity · boxes of a block] int32
    stripe_places: Any  # int32, of the shape of the index's stripe_positions, or None
    order: Any  # [num_tiles · num_heads] int32: tile · num_heads + head
    counter: Any  # [1] int32: items taken


def refusal(spec: AttendSpec) -> str | None:
    """Check whether the kernel can run a layer."""
    reason = gluon_refusal(spec.device)
    if reason is not None:
        return reason
    if spec.skips or spec.int8:
        return "it supports neither skipped products nor 8-bit scores"
    if spec.dtype not in GLUON_DTYPES or spec.head_dim not in SIZES:
        return f"it supports fp16 and bf16 with head_dim 64, 128 and 256, not {spec.dtype} with {spec.head_dim}"
    if spec.block_tokens > SIZES[spec.head_dim]["STEP"]:
        return f"blocks of {spec.block_tokens} keys with head_dim {spec.head_dim} do not fit into shared memory"
    if spec.block_tokens not in BLOCKS or spec.page_size % LEAST_BOX:
        return (
            f"it supports blocks of 32, 64 and 128 keys in pages of a multiple of {LEAST_BOX}, "
            f"not {spec.block_tokens} in pages of {spec.page_size}"
        )
    stride_page, stride_token, stride_head = spec.strides
    # In NHD the kv heads of a token lie side by side in its row; in HND they are stacked.
    is_matrix = stride_page % stride_token == 0 and (stride_head <= stride_token or stride_head % stride_token == 0)
    if not is_matrix or any(2 * stride % 16 for stride in spec.strides):
        return f"the cache's strides {spec.strides} do not form a matrix of tokens with rows of multiples of 16 bytes"
    return None


def attend(
    call: Call,
    out: torch.Tensor,
    options: AttendOptions | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention of a layer that ``refusal`` accepts; see ``AttendEngine``."""
    q, cache, index = call.q, call.cache, call.index
    if q.stride(1) * index.num_heads > q.stride(0):
        q = q.contiguous()
    num_heads, head_dim, num_tiles = index.num_heads, cache.head_dim, index.rows.num_tiles
    queries = _descriptor(q, q.shape[0], q.stride(1) * (num_heads - 1) + head_dim, q.stride(0), HALF.value)
    _, stride_token, stride_head = cache.strides
    num_rows = cache.last_offset // stride_token + 1
    columns_per_head = stride_head % stride_token  # 0 if heads are stacked
    columns = columns_per_head * (cache.num_kv_heads - 1) + head_dim
    box = gcd(index.block_tokens, cache.page_size)
    keys, values = (_descriptor(x, num_rows, columns, stride_token, box) for x in (cache.keys, cache.values))
    head_strides = HeadStrideArgs(q.stride(1), columns_per_head)
    shape = {"NUM_HEADS": num_heads, "GROUP": call.group, "BLOCK_N": index.block_tokens}
    cache_args, index_args = key_args(cache, call.rows.block_table, values=True), index.args
    with index.workspace.frame():
        work = _prepare(index, cache_args, index_args, shape | {"BOX": box})
        hopper_kernel[(min(num_tiles * num_heads, _num_multiprocessors(q.device)),)](
            queries, keys, values, AttendArgs.of(q, out, sinks), cache_args, head_strides, index_args, work,
            num_tiles, call.scale_in_base_2, **shape, D=head_dim, STRIPES=index.has_stripes, num_warps=4,
        )  # fmt: skip


def _prepare(index: SparseIndex, cache_args: KeyArgs, index_args: IndexArgs, shape: dict[str, int]) -> WorkArgs:
    """Launch ``prepare_kernel``, and return what it writes."""
    num_tiles, empty = index.rows.num_tiles, partial(index.workspace.empty, dtype=torch.int32)
    num_items = num_tiles * index.num_heads
    work = WorkArgs(
        places=empty(index.block_ids.numel() * shape["BLOCK_N"] // shape["BOX"]),
        stripe_places=empty(len(index.stripe_positions)) if index.has_stripes else None,
        order=empty(num_items),
        counter=empty(1),
    )
    stride_token = cache_args.stride_token
    rows_per_page, rows_per_head = cache_args.stride_page // stride_token, cache_args.stride_head // stride_token
    prepare_kernel[(ceil_div(num_items, RANKED.value) + num_items,)](
        index_args, cache_args, num_tiles, rows_per_page, rows_per_head, work, **shape
    )
    return work


def _descriptor(base: torch.Tensor, num_rows: int, num_columns: int, stride_row: int, box_rows: int) -> Any:
    """Describe a matrix for bulk copies of [box_rows, COLUMNS]."""
    box = [box_rows, COLUMNS.value]
    return TensorDescriptor(base, [num_rows, num_columns], [stride_row, 1], box, _box_layout(box_rows, base.dtype))


@lru_cache(maxsize=16)
def _box_layout(box_rows: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([box_rows, COLUMNS.value], GLUON_DTYPES[dtype])


@lru_cache(maxsize=8)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


HOPPER = AttendEngine("hopper", refusal, attend)
