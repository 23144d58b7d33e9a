# SPDX-License-Identifier: Apache-2.0
"""A trial: one batch through an engine of attention or selection. Servers and profiling make them before they use an
engine, and tests.

Attention is compared with float64, within an error budget.

A kernel may be as far from the exact result as eager torch is in the same dtype, times a small factor.
The factor is 3: over the tests' shapes the kernel's largest error is 0.2 to 0.5 times eager's in fp16, and around 1
times in fp32, but up to 2.4 times there at head_dim 256, where two libraries sum 256 products in different orders.

Selection is compared with the selection of the method's portable engine. Engines round differently, so blocks whose
estimates lie next to a threshold may differ; the lists must agree but for few of them (``LEAST_AGREEMENT``).
"""

from dataclasses import dataclass, replace

import torch

from vllm_sparse_kernels.attention.engine import Engine
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.reference import ReferenceAttend, fp8_weights
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import FP8, PagedCache, wide_dtype
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import SelectEngine

LEAST_AGREEMENT = 0.8
"""Share of the blocks and stripes that either of two engines keeps which both must keep. Rounding to two bits of
mantissa, the coarsest of any engine, leaves 0.95 and more on ``sharpened`` queries; kernels that keep other blocks than
they should agree by chance, on 0.1 to 0.4."""

SHARPEN = 3.0


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor  # [num_tokens, num_heads, head_dim]
    cache: PagedCache
    rows: Rows
    scale: float
    """What takes products of q's and the keys' elements to scores."""

    out_dtype: torch.dtype | None = None
    """Of attention's result; None: q's, or fp16 where that is fp8."""

    sinks: torch.Tensor | None = None  # [num_heads]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    def empty_out(self) -> torch.Tensor:
        return torch.full_like(self.q, float("nan"), dtype=self.out_dtype or wide_dtype(self.q.dtype))


def error_budget(eager: torch.Tensor, exact: torch.Tensor, factor: float = 3.0) -> float:
    """Largest error that a kernel's result may have, absolute.

    ``eager`` is computed by plain torch operations in the kernel's dtype, ``exact`` in float64, both of one shape;
    places where ``exact`` is NaN do not count. The budget is ``factor`` times eager's largest error, but no less than
    ``factor`` roundings of the largest exact value, since on a few numbers eager may be exact by luck.
    """
    counted = ~exact.isnan()
    error = (eager.double() - exact)[counted].abs().max()
    rounding = torch.finfo(eager.dtype).eps * exact[counted].abs().max()
    return factor * float(torch.maximum(error, rounding))


@dataclass(frozen=True)
class Expected:
    """What attention over an index must give. Tokens outside the index's rows are NaN."""

    out: torch.Tensor  # [num_tokens, num_heads, head_dim] float64
    lse: torch.Tensor  # [num_heads, num_tokens] float64
    out_budget: float
    lse_budget: float


def expected_attention(batch: Batch, index: SparseIndex, options: AttendOptions | None = None) -> Expected:
    """The exact attention of a batch over an index, and the budgets of a kernel that computes it in q's dtype.

    Where that is fp8, weights are rounded to fp8 and results to fp16: engines may do the former, and matrix units keep
    no more than some 13 bits of a sum of fp8 products.

    Args:
        batch: Queries, cache and rows.
        index: What is attended to.
        options: What heads ask of ``attend``. Skips and 8-bit scores are then part of the expected result.

    Returns:
        Outputs and log-sum-exps in float64, and the largest errors that they allow.
    """
    results = []
    is_fp8 = batch.q.dtype == FP8  # products of its elements are too large for fp16
    eager = torch.float32 if is_fp8 else batch.q.dtype
    for dtype, out_dtype, weights in (
        (torch.float64, torch.float64, None),
        (eager, wide_dtype(batch.q.dtype), fp8_weights if is_fp8 else None),
    ):
        out = torch.full_like(batch.q, float("nan"), dtype=out_dtype)
        lse = out.new_full((batch.num_heads, len(batch.q)), float("nan"))
        attend = ReferenceAttend(dtype, weights)
        attend(batch.q, batch.cache, index, out, batch.scale, lse, options, batch.sinks)
        results.append((out, lse))
    (out, lse), (eager_out, eager_lse) = results
    return Expected(out, lse, error_budget(eager_out, out), error_budget(eager_lse, lse))


def failure(
    engine: Engine, batch: Batch, index: SparseIndex, options: AttendOptions | None, exact: Expected | None
) -> str | None:
    """What is wrong with an engine's result, or why there is none; None where it is right."""
    out = batch.empty_out()
    try:
        with index.workspace.frame():
            engine.attend(batch.q, batch.cache, index, out, batch.scale, options=options, sinks=batch.sinks)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
    except Exception as error:  # whatever a compiler, a launch or a library raises is the reason
        return _reason(error)
    if bool(out.isnan().any()):
        return "its result in a trial holds NaN"
    if exact is not None:
        off = float((out.double() - exact.out).abs().max())
        if not off <= exact.out_budget:
            return f"its result in a trial is off by {off:.2e}, expected at most {exact.out_budget:.2e}"
    return None


def sharpened(batch: Batch) -> Batch:
    """The batch with longer queries, whose attention differs more from block to block than rounding does."""
    return replace(batch, q=(SHARPEN * batch.q.float()).to(batch.q.dtype))


def selection_failure(
    engine: SelectEngine, method: Method, batch: Batch, index: SparseIndex, heads: torch.Tensor,
    expected: SparseIndex | None,
) -> str | None:  # fmt: skip
    """Run a selection engine once, and judge what it keeps.

    Args:
        engine: The engine.
        method: Of the heads, merged of theirs.
        batch: Queries, cache and rows.
        index: Room for these rows; the engine fills the lists of ``heads``.
        heads: [num_selected] int32 query heads on the device.
        expected: The portable engine's selection of the same heads; None judges the form of the lists alone.

    Returns:
        What is wrong with the selection, or why there is none; None where it is right.
    """
    index.block_counts.zero_()
    numbers = heads.tolist()
    try:
        with index.workspace.frame():
            engine.select(method, batch.q, batch.cache, index, heads, batch.scale)
        index.check(numbers)
    except AssertionError as error:
        return f"its selection in a trial breaks the index: {error}"
    except Exception as error:  # whatever a compiler, a launch or a library raises is the reason
        return _reason(error)
    if expected is None:
        return None
    shared = total = 0
    for head in numbers:
        for i_tile in range(index.rows.num_tiles):
            ours, theirs = _kept(index, head, i_tile), _kept(expected, head, i_tile)
            shared, total = shared + len(ours & theirs), total + len(ours | theirs)
    agreement = shared / total
    if agreement < LEAST_AGREEMENT:
        return (
            f"its selection in a trial agrees with the portable engine's on {agreement:.0%} of what either keeps, "
            f"expected at least {LEAST_AGREEMENT:.0%}"
        )
    return None


def _kept(index: SparseIndex, head: int, i_tile: int) -> set[tuple[str, int]]:
    blocks, stripes = index.blocks_of(head, i_tile).tolist(), index.stripes_of(head, i_tile).tolist()
    return {("block", number) for number in blocks} | {("stripe", position) for position in stripes}


def _reason(error: Exception) -> str:
    return f"it fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
