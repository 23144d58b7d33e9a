# SPDX-License-Identifier: Apache-2.0
"""The contract between a layer and what computes its attention: ``SparseIndex → out``, whatever engine fulfils it.

An engine says from what is known at start-up whether it can serve a layer; of those that can, the fastest is chosen
once, before the first step (``engine_choice.py``). Engines differ in speed and in rounding, in nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache


@dataclass(frozen=True)
class AttendSpec:
    """What is known of a layer's attention before the first step."""

    device: torch.device
    dtype: torch.dtype  # of queries, keys and values; the result may be of another where that is fp8
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    strides: tuple[int, int, int]  # (page, token, head) of the cache, in elements; a head's own are contiguous
    block_tokens: int  # of the index
    has_stripes: bool
    skips: bool = False
    """Whether any head asks for the skip of products (``AttendOptions``)."""

    int8: bool = False
    """Whether any head asks for 8-bit scores."""

    sinks: bool = False
    """Whether the layer has learnt sinks."""

    @staticmethod
    def of(
        cache: PagedCache, index: SparseIndex, options: AttendOptions | None = None, sinks: torch.Tensor | None = None
    ) -> "AttendSpec":
        return AttendSpec(
            device=cache.keys.device,
            dtype=cache.keys.dtype,
            num_heads=index.num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            page_size=cache.page_size,
            strides=cache.strides,
            block_tokens=index.block_tokens,
            has_stripes=index.has_stripes,
            skips=options is not None and options.skips,
            int8=options is not None and options.int8_heads is not None,
            sinks=sinks is not None,
        )

    @property
    def capability(self) -> tuple[int, int]:
        """The device's compute capability; (0, 0) of what is no CUDA device."""
        return capability_of(self.device)


class Attend(Protocol):
    """Write softmax(scale · q kᵀ) v over the index's keys into ``out`` for the index's tokens; scale > 0.

    q and out: [num_tokens, num_heads, head_dim] of the cache's dtype, head_dim contiguous; out in 16 bits where that is
    fp8. ``scale`` takes products of elements to scores (``PagedCache.score_scale`` is in it), the cache's
    ``value_scale`` multiplies the result. lse: [num_heads, num_tokens] float32, natural logarithm, or None. Tokens
    outside the index's rows stay untouched. Temporary tensors come from
    ``index.workspace``. Nothing waits for the device. Raises ValueError on shapes that do not fit the index.

    sinks: [num_heads] of any float dtype, or None: scores of one more key each, that has no value. The softmax's sum is
    Σ exp(s) + exp(sink) then, which scales a query's output by exp(lse) / (exp(lse) + exp(sink)). The log-sum-exp
    remains that of the keys.
    """

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedCache,
        index: SparseIndex,
        out: torch.Tensor,
        scale: float,
        lse: torch.Tensor | None = None,
        options: AttendOptions | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class Engine:
    name: str
    refusal: Callable[[AttendSpec], str | None]
    """Why the engine cannot serve a layer, in words that end a sentence; None if it can."""

    attend: Attend


class AttendArgs(NamedTuple):
    """q, what is written, and sinks, for kernels: out of q's shape, the log-sum-exp [num_heads, num_tokens] or None."""

    q: Any
    out: Any
    lse: Any
    sinks: Any  # [num_heads] or None
    stride_token: int
    stride_head: int
    stride_out_token: int
    stride_out_head: int
    stride_lse_head: int

    @staticmethod
    def of(
        q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None = None
    ) -> "AttendArgs":
        strides = q.stride(0), q.stride(1), out.stride(0), out.stride(1)
        return AttendArgs(q, out, lse, sinks, *strides, 0 if lse is None else lse.stride(0))


def check_shapes(
    q: torch.Tensor, out: torch.Tensor, cache: PagedCache, index: SparseIndex, sinks: torch.Tensor | None = None
) -> None:
    """Raise ValueError where tensors do not fit the index or each other."""
    num_heads = index.num_heads
    if q.shape[1:] != (num_heads, cache.head_dim) or out.shape[1:] != q.shape[1:] or num_heads % cache.num_kv_heads:
        raise ValueError(
            f"attend: q {tuple(q.shape)} and out {tuple(out.shape)} must be [num_tokens, {num_heads}, "
            f"{cache.head_dim}] with heads a multiple of the cache's {cache.num_kv_heads} kv heads"
        )
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"attend: sinks {tuple(sinks.shape)} must be [{num_heads}], contiguous")
