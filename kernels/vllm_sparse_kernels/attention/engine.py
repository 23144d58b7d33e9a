# SPDX-License-Identifier: Apache-2.0
"""``AttendEngine``: the interface of the kernels that compute attention over a ``SparseIndex``.

An engine reports at start-up whether it can serve a layer (``refusal``). The fastest engine that accepts the layer is
chosen once, before the first step (``engine_choice.py``). Engines differ only in speed and in rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache


@dataclass(frozen=True)
class AttendSpec:
    """Properties of a layer's attention that are known before the first step.

    Attributes:
        device: Device of the tensors.
        dtype: Type of queries, keys and values. The result has 16 bits if this is fp8.
        head_dim: Elements of a head's query or key.
        page_size: Tokens of a page of the cache.
        strides: (page, token, head) strides of the cache, in elements. The elements of a head are contiguous.
        block_tokens: Keys of an index block.
        has_stripes: Whether any head has room for stripes.
        skips: Whether any head skips products (``AttendOptions``).
        int8: Whether any head has 8-bit scores.
        sinks: Whether the layer has learnt sinks.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    page_size: int
    strides: tuple[int, int, int]
    block_tokens: int
    has_stripes: bool
    skips: bool = False
    int8: bool = False
    sinks: bool = False

    @staticmethod
    def of(
        cache: PagedCache, index: SparseIndex, options: AttendOptions | None = None, sinks: torch.Tensor | None = None
    ) -> "AttendSpec":
        """Build the specification from the arguments of ``attend``."""
        return AttendSpec(
            device=cache.keys.device,
            dtype=cache.keys.dtype,
            head_dim=cache.head_dim,
            page_size=cache.page_size,
            strides=cache.strides,
            block_tokens=index.block_tokens,
            has_stripes=index.has_stripes,
            skips=options is not None and options.skips,
            int8=options is not None and options.int8_heads is not None,
            sinks=sinks is not None,
        )


@dataclass(frozen=True)
class AttendEngine:
    """One way to compute attention.

    ``attend(call, out, options=None, sinks=None)`` writes softmax(scale · q kᵀ) v into ``out`` for the tokens of the
    index's rows and leaves other tokens untouched. Temporary tensors come from the index's workspace. It does not
    synchronise with the device.

    Attributes:
        name: Name by which an operator selects the engine.
        refusal: Returns why the engine cannot serve a layer, as the end of a sentence; None if it can.
    """

    name: str
    refusal: Callable[[AttendSpec], str | None]
    attend: Callable[..., None]


class AttendArgs(NamedTuple):
    """Tensors of ``attend`` as arguments of kernels."""

    q: Any
    out: Any
    sinks: Any
    stride_token: int
    stride_head: int
    stride_out_token: int
    stride_out_head: int

    @staticmethod
    def of(q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None) -> "AttendArgs":
        """Build the arguments with the strides of the tensors."""
        return AttendArgs(q, out, sinks, q.stride(0), q.stride(1), out.stride(0), out.stride(1))
