# SPDX-License-Identifier: Apache-2.0
"""Workspace memory of a layer, counted by the code that allocates it.

The host half of selection and attention runs on torch's meta device, where tensors have no memory, and kernels are not
launched. What the host allocates depends on the rows only, not on what kernels compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from triton.runtime.jit import KernelInterface

from vllm_sparse_kernels.attention import AttendSpec, FlashAttention, engines
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.paged import USUAL_PAGE_SIZE, PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import SelectSpec
from vllm_sparse_kernels.workspace import Workspace

META = torch.device("meta")


@contextmanager
def without_launches() -> Iterator[None]:
    """Make launches of Triton's and Gluon's kernels do nothing in this process."""
    # All launches ``kernel[grid](…)``, of jitted, interpreted and Gluon kernels, go through this method. Triton has no
    # other switch: with an empty grid it still compiles, and it refuses tensors on the meta device. Memory is counted
    # at start-up, when no other thread launches kernels.
    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **options: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch


def count_bytes(layer: Layer, rows: Rows, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the workspace memory that a layer needs for some rows, with any of the engines that may run it.

    The smallest pages count: FlashAttention's block tables are widest with them, and ``hopper`` copies the most boxes.
    In other pages, ``flash`` may need 0.1 % more, because it rounds parts to whole sequences. The arena's slack has
    room for that.

    Args:
        layer: The layer.
        rows: Rows whose block table is on the meta device.
        num_kv_heads: Key-value heads of this rank.
        head_dim: Elements of a head's query or key.
        dtype: Type of queries, keys and values.
    """
    workspace = Workspace(META)
    q = torch.empty(rows.end_token, layer.num_heads, head_dim, dtype=dtype, device=META)
    page = torch.empty(1, USUAL_PAGE_SIZE, num_kv_heads, 2 * head_dim, dtype=dtype, device=META)
    cache = PagedCache(*page.split(head_dim, dim=-1))
    with workspace.frame(), without_launches():
        call = layer.new_call(q, cache, rows, 1.0, workspace)
        if not layer.by_kernels:  # the references allocate nothing else here
            return workspace.peak_bytes
        for group in layer.plan.groups:
            spec = SelectSpec(group.method, META, head_dim)
            for select_engine in group.method.select_engines:
                if select_engine.refusal(spec) is None:
                    with workspace.frame():
                        select_engine.select(replace(call, heads=group))
        # FlashAttention's own function allocates its log-sum-exps outside the workspace.
        no_attention = FlashAttention.of_version(3, lambda **arguments: (None, None))
        for engine in engines(no_attention).values():
            if engine.refusal(AttendSpec.of(cache, call.index, layer.options)) is None:
                with workspace.frame():
                    engine.attend(call, torch.empty_like(q), options=layer.options)
    return workspace.peak_bytes
