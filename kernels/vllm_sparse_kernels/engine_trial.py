# SPDX-License-Identifier: Apache-2.0
"""Trial of an engine: one batch through attention or selection, before a server, a profile or a test uses the engine.

The result of attention is compared with float64, within an error budget: the error of eager torch in the same dtype,
times 3. In the tests, a kernel's largest error is 0.2 to 0.5 times that of eager torch in fp16, and as large in fp32.
In fp32 at head_dim 256 it is up to 2.4 times as large, because two libraries sum 256 products in different orders.

The result of selection is compared with the result of the method's portable engine. Engines round differently, so
blocks with estimates next to a threshold may differ. The lists must agree on most of their entries
(``LEAST_AGREEMENT``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from vllm_sparse_kernels.attention.engine import AttendEngine
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.reference import attend, exact_weights, fp8_weights
from vllm_sparse_kernels.call import NO_HEADS, Call, HeadGroup
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.paged import FP8, PagedCache, wide_dtype
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import SelectEngine

LEAST_AGREEMENT = 0.8
"""Of the blocks and stripes that either of two engines keeps, the minimum share that both must keep.

On random batches with queries times ``SHARPEN``, on an H100 at head dims 64, 128 and 256, Hopper's and the portable
kernels agree on at least 0.96 of ``top_p``'s blocks and on all of SALE's. The agreement of a kernel that keeps wrong
blocks is only estimated."""

SHARPEN = 3.0
"""Factor of the queries in a trial of selection."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one layer in a trial.

    Attributes:
        q: [num_tokens, num_heads, head_dim] queries.
        cache: Keys and values.
        rows: The rows of the batch.
        scale: Factor from q·k to scores.
        out_dtype: Type of the attention output; None for the type of q, or fp16 if q is fp8.
        sinks: [num_heads] learnt sinks; None without sinks.
    """

    q: torch.Tensor
    cache: PagedCache
    rows: Rows
    scale: float
    out_dtype: torch.dtype | None = None
    sinks: torch.Tensor | None = None

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    def call(self, index: SparseIndex, heads: HeadGroup[Any] = NO_HEADS) -> Call:
        """Return the arguments of attention over an index, or of the selection of some heads."""
        return Call(self.q, self.cache, index, self.scale, heads)

    def empty_out(self) -> torch.Tensor:
        """Allocate the output, filled with NaN so that a missing write shows.

        Returns:
            [num_tokens, num_heads, head_dim] of ``out_dtype``.
        """
        return torch.full_like(self.q, float("nan"), dtype=self.out_dtype or wide_dtype(self.q.dtype))


@dataclass(frozen=True)
class Expected:
    """The expected result of attention over an index. Tokens outside the index's rows are NaN."""

    out: torch.Tensor
    budget: float


def expected_attention(batch: Batch, index: SparseIndex, options: AttendOptions | None = None) -> Expected:
    """Compute the exact attention of a batch over an index, and the error budgets of a kernel in q's dtype.

    If q is fp8, the budgets allow for weights rounded to fp8 and results rounded to fp16: engines may round weights,
    and matrix units keep only about 13 bits of a sum of fp8 products.

    Args:
        batch: Queries, cache and rows.
        index: The keys to attend to.
        options: Approximations that heads request, which become part of the expected result; None without any.

    Returns:
        The output in float64 with its budget.
    """
    results = []
    is_fp8 = batch.q.dtype == FP8  # products of its elements are too large for fp16
    eager = torch.float32 if is_fp8 else batch.q.dtype
    for dtype, out_dtype, round_weights in (
        (torch.float64, torch.float64, exact_weights),
        (eager, wide_dtype(batch.q.dtype), fp8_weights if is_fp8 else exact_weights),
    ):
        out = torch.full_like(batch.q, float("nan"), dtype=out_dtype)
        attend(batch.call(index), out, options, batch.sinks, dtype, round_weights)
        results.append(out)
    exact, eager_out = results
    counted = ~exact.isnan()
    error = (eager_out.double() - exact)[counted].abs().max()
    # At least roundings of the largest value: eager may be exact by luck if there are few numbers.
    rounding = torch.finfo(eager_out.dtype).eps * exact[counted].abs().max()
    return Expected(exact, 3 * float(torch.maximum(error, rounding)))


def failure(engine: AttendEngine, batch: Batch, index: SparseIndex, options: AttendOptions | None) -> str | None:
    """Run an attention engine once and check its result.

    Args:
        engine: The engine.
        batch: Queries, cache and rows.
        index: The keys to attend to.
        options: Approximations that heads request, or None. With them, only exceptions and NaN count as failures.
    """
    out = batch.empty_out()
    try:
        with index.workspace.frame():
            engine.attend(batch.call(index), out, options=options, sinks=batch.sinks)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
    except Exception as exception:  # of a compiler, launch or library
        return _reason(exception)
    if out.isnan().any():
        return "its result in a trial holds NaN"
    if options is None:
        exact = expected_attention(batch, index)
        error = float((out.double() - exact.out).abs().max())
        if not error <= exact.budget:
            return f"its result in a trial is off by {error:.2e}, expected at most {exact.budget:.2e}"
    return None


def selection_failure(engine: SelectEngine, batch: Batch, layer: Layer, heads: HeadGroup[Any]) -> str | None:
    """Run a selection engine once, and compare its lists with those of the method's portable engine.

    Args:
        engine: The engine.
        batch: Queries, cache and rows.
        layer: The layer.
        heads: The heads to select.
    """
    try:
        index = _selection(engine, batch, layer, heads)
    except AssertionError as error:
        return f"its selection in a trial breaks the index: {error}"
    except Exception as error:  # the reason is any exception of a compiler, launch or library
        return _reason(error)
    portable = heads.method.select_engines[-1]
    if engine.name == portable.name:
        return None
    try:
        expected = _selection(portable, batch, layer, heads)
    except Exception:
        return None  # there is nothing to compare with
    share = agreement(index, expected, heads.heads)
    if share < LEAST_AGREEMENT:
        return (
            f"its selection in a trial agrees with the portable engine's on {share:.0%} of what either keeps, "
            f"expected at least {LEAST_AGREEMENT:.0%}"
        )
    return None


def _selection(engine: SelectEngine, batch: Batch, layer: Layer, heads: HeadGroup[Any]) -> SparseIndex:
    """Return the checked lists of an engine for longer queries, whose block masses differ by more than rounding."""
    index = layer.allocate_index(batch.rows)
    index.block_counts.zero_()
    q = (SHARPEN * batch.q.float()).to(batch.q.dtype)
    with index.workspace.frame():
        engine.select(replace(batch, q=q).call(index, heads))
    index.check(heads.heads)
    return index


def agreement(index: SparseIndex, other: SparseIndex, heads: Sequence[int]) -> float:
    """Return the number of blocks and stripes that both indices keep, divided by the number that at least one keeps.

    This copies lists from the device.
    """
    shared = total = 0
    for head, i_tile in product(heads, range(index.rows.num_tiles)):
        for list_of in (SparseIndex.blocks_of, SparseIndex.stripes_of):
            kept, other_kept = list_of(index, head, i_tile), list_of(other, head, i_tile)
            num_shared = int(torch.isin(kept, other_kept).sum())
            shared += num_shared
            total += len(kept) + len(other_kept) - num_shared
    return shared / total


def _reason(error: Exception) -> str:
    return f"it fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
