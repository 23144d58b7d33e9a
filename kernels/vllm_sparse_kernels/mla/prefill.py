# SPDX-License-Identifier: Apache-2.0
"""``MlaPrefill``: runs the calls of MLA's prefill by kernels, or by plain torch where Triton has no device."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict, Unpack

import torch
import triton

from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED, HALF_SCORED
from vllm_sparse_kernels.mla import reference
from vllm_sparse_kernels.mla.attention import attend_kernel, run_attention
from vllm_sparse_kernels.mla.calls import (
    EVERYTHING,
    Call,
    MlaAShape,
    MlaLimits,
    MlaMethod,
    MlaRow,
    MlaTopP,
    Tensors,
    kept_pairs_of_a_shape,
    method_problem,
)
from vllm_sparse_kernels.mla.reference import RunningSums
from vllm_sparse_kernels.mla.selection import MOST_ROWS, Selection
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div

HEAD_DIMS = (192, 128)
"""Channels of keys and of values: those of DeepSeek-V3, DeepSeek-R1 and Kimi-K2."""

CACHED_CALLS = 64
"""Calls whose rows stay on the device: all layers of a step make the same calls."""


class MlaResults(TypedDict):
    """Tensors that a call writes."""

    out: torch.Tensor
    """[tokens, heads, v_head_dim], of the queries' dtype."""
    lse: torch.Tensor
    """[heads, tokens] float32, log-sum-exp in natural units."""
    kept_pairs: NotRequired[torch.Tensor | None]
    """[1] int64 on the device; the number of kept pairs of a query and a key, over all heads, is added."""


class MlaPrefill:
    """Sparse MLA prefill of a worker: scratch memory, and the running sums of one layer of one step."""

    @staticmethod
    def refusal(
        num_heads: int, qk_head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Check whether layers of this kind can run.

        Args:
            num_heads: Heads of this worker.
            qk_head_dim: Channels of queries and keys.
            v_head_dim: Channels of values.
            dtype: Type of queries, keys and values.
            device: The device.
        """
        if num_heads < 1:
            return f"a layer has {num_heads} heads, expected at least 1"
        if (qk_head_dim, v_head_dim) != HEAD_DIMS:
            return (
                f"keys of {qk_head_dim} and values of {v_head_dim} channels are not supported, only keys of "
                f"{HEAD_DIMS[0]} and values of {HEAD_DIMS[1]}"
            )
        dtypes = (torch.float16, torch.bfloat16)
        if device.type == "cuda" and dtype not in dtypes:
            return f"queries are {dtype}, and the kernels read {' and '.join(map(str, dtypes))}"
        if device.type == "cuda" and capability_of(device) < (8, 0):
            return f"the GPU has compute capability {'.'.join(map(str, capability_of(device)))}, and the least is 8.0"
        if device.type not in ("cuda", "cpu"):
            return f"the device is {device.type}, and the kernels run on cuda and cpu"
        return None

    def __init__(
        self,
        *,
        num_heads: int,
        scale: float,
        qk_head_dim: int,
        v_head_dim: int,
        limits: MlaLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate all memory: running sums and, unless ``limits.num_scored`` is 0, the scratch of the selection."""
        reason = self.refusal(num_heads, qk_head_dim, v_head_dim, dtype, device)
        if reason is not None:
            raise ValueError(f"MlaPrefill: {reason}")
        if min(limits.query_tokens, limits.key_tokens) < 1 or scale <= 0:
            raise ValueError(f"MlaPrefill: given {limits} and scale {scale}, expected tokens and a scale above 0")
        if limits.num_scored not in (ALL_SCORED, HALF_SCORED, 0):
            raise ValueError(
                f"MlaPrefill: given {limits}, expected num_scored {ALL_SCORED}, {HALF_SCORED}, or 0 without top_p"
            )
        self.num_heads, self.scale, self.most_scored = num_heads, scale, limits.num_scored
        self.head_dims, self.dtype, self.device = (qk_head_dim, v_head_dim), dtype, device
        self.max_query_tokens = limits.query_tokens
        self.max_key_tokens = max(limits.key_tokens, limits.query_tokens)
        # Whole tiles, so that the sums of every head are aligned.
        num_state_tokens = ceil_div(limits.query_tokens, TILE_TOKENS) * TILE_TOKENS
        self.sums = RunningSums.zeros(num_heads, num_state_tokens, device)
        self._has_selected = False  # before the first selection, no sum needs a restart
        self._runs_kernels = False  # False to run the reference
        self._selection: Selection | None = None
        if device.type == "cuda" or not isinstance(attend_kernel, triton.JITFunction):
            self.use_kernels()
        self._calls: dict[tuple[MlaRow, ...], Call] = {}

    def use_kernels(self) -> None:
        """Run kernels from now on, and allocate their scratch memory. The constructor calls this if kernels can run."""
        self._runs_kernels = True
        if self.most_scored > 0:
            limits = MlaLimits(self.max_query_tokens, self.max_key_tokens, self.most_scored)
            self._selection = Selection(self.num_heads, self.head_dims[0], limits, self.device)

    def attend(
        self,
        method: MlaMethod,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Sequence[MlaRow],
        *,
        is_causal: bool,
        **results: Unpack[MlaResults],
    ) -> None:
        """Compute attention of the rows' queries over the keys that the method keeps, without waiting for the device.

        Queries of other rows are not touched. A query that keeps nothing gets zeros and a log-sum-exp of -inf.

        All calls of ``top_p`` for a row in a step and layer must have the same ``queries``. A call for new tokens
        restarts the sums of those queries only that it scores, so a chunk that scores others would continue the sums
        of an earlier layer.

        Args:
            method: The method of all rows.
            q: [tokens, heads, qk_head_dim].
            k: [keys, heads, qk_head_dim].
            v: [keys, heads, v_head_dim]; like q and k, it may be a view with contiguous channels.
            rows: The rows. Those without queries are ignored.
            is_causal: True for the rows' new tokens, which restarts the running sums of their scored queries; False
                for a chunk of context.
            results: ``MlaResults``, by keyword: out and lse, and optionally kept_pairs.

        Raises:
            ValueError: A parameter, a shape, a dtype or a row does not fit.
        """
        rows = tuple(row for row in rows if row.num_queries > 0)
        tensors, kept_pairs = Tensors.of(q, k, v, results["out"], results["lse"]), results.get("kept_pairs")
        self._check(method, tensors, rows, is_causal, kept_pairs)
        if not rows:
            return
        if not self._runs_kernels:
            num_kept = reference.attend(method, tensors, rows, scale=self.scale, is_causal=is_causal, sums=self.sums)
            if kept_pairs is not None:
                kept_pairs += num_kept
        elif isinstance(method, MlaTopP) and method.kept_mass < 1:
            assert self._selection is not None  # otherwise _check refuses the method
            self._has_selected = True
            for first in range(0, len(rows), MOST_ROWS):
                call = self._call(rows[first : first + MOST_ROWS])
                self._selection.attend(method, tensors, call, self.sums, self.scale, is_causal, kept_pairs)
        else:
            window = method if isinstance(method, MlaAShape) else MlaAShape(0, EVERYTHING)
            self._attend_window(window, tensors, rows, is_causal, kept_pairs)

    def _attend_window(
        self,
        method: MlaAShape,
        tensors: Tensors,
        rows: tuple[MlaRow, ...],
        is_causal: bool,
        kept_pairs: torch.Tensor | None,
    ) -> None:
        """Attend to sinks and a window. Running sums restart, because a later chunk may be of ``top_p``."""
        call = self._call(rows)
        if is_causal and self._has_selected:
            for start, length in call.state_ranges:
                self.sums.part(start, length).clear()
        # Windows are counted in keys: more than all positions is the same as all.
        run_attention(
            tensors, call.whole(), self.scale, is_causal,
            sink_tokens=min(method.sink_tokens, EVERYTHING), local_tokens=min(method.local_tokens, EVERYTHING),
        )  # fmt: skip
        if kept_pairs is not None:
            kept_pairs += self.num_heads * kept_pairs_of_a_shape(rows, method)

    def _call(self, rows: tuple[MlaRow, ...]) -> Call:
        """Return the rows on the device. Later layers of a step find those of the first."""
        call = self._calls.pop(rows, None)
        if call is None:
            call = Call.of(rows, self.device)
            while len(self._calls) >= CACHED_CALLS:
                del self._calls[next(iter(self._calls))]
        self._calls[rows] = call
        return call

    def _check(
        self,
        method: MlaMethod,
        tensors: Tensors,
        rows: tuple[MlaRow, ...],
        is_causal: bool,
        kept_pairs: torch.Tensor | None,
    ) -> None:
        problem = method_problem(method)
        if problem is not None:
            raise ValueError(f"MlaPrefill.attend: {problem}")
        is_selected = isinstance(method, MlaTopP) and method.kept_mass < 1
        if is_selected and method.num_scored > self.most_scored:
            raise ValueError(
                f"MlaPrefill.attend: given {method}, expected at most {self.most_scored} scored queries of a tile: "
                f"build MlaPrefill with limits of num_scored {method.num_scored}"
            )
        qk_head_dim, v_head_dim = self.head_dims
        q, k, v, out, lse = tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse
        for name, tensor, head_dim in (("q", q, qk_head_dim), ("k", k, qk_head_dim), ("v", v, v_head_dim),
                                       ("out", out, v_head_dim)):  # fmt: skip
            if tensor.shape[1:] != (self.num_heads, head_dim) or tensor.dtype != self.dtype or tensor.stride(2) != 1:
                raise ValueError(
                    f"MlaPrefill.attend: given {name} of shape {tuple(tensor.shape)}, {tensor.dtype} and strides "
                    f"{tensor.stride()}, expected [tokens, {self.num_heads}, {head_dim}], {self.dtype} and contiguous "
                    "channels"
                )
        if lse.shape[0] != self.num_heads or lse.dtype != torch.float32 or lse.stride(1) != 1:
            raise ValueError(
                f"MlaPrefill.attend: given lse of shape {tuple(lse.shape)} and {lse.dtype}, expected "
                f"[{self.num_heads}, tokens] of torch.float32 with contiguous tokens"
            )
        if kept_pairs is not None and (kept_pairs.shape != (1,) or kept_pairs.dtype != torch.int64):
            raise ValueError(
                f"MlaPrefill.attend: given kept_pairs of shape {tuple(kept_pairs.shape)} and {kept_pairs.dtype}, "
                "expected [1] of torch.int64"
            )
        num_queries, num_keys = min(len(q), len(out), lse.shape[1]), min(len(k), len(v))
        for row in rows:
            fits = (
                min(row) >= 0
                and row.query_start + row.num_queries <= min(num_queries, self.max_query_tokens)
                and row.state_start + row.num_queries <= self.max_query_tokens
                and row.key_start + row.num_keys <= min(num_keys, self.max_key_tokens)
            )
            if not fits:
                raise ValueError(
                    f"MlaPrefill.attend: given {row}, {num_queries} queries and {num_keys} keys, expected indices "
                    f"within them, below {self.max_query_tokens} for queries and {self.max_key_tokens} for keys: build "
                    "MlaPrefill with the largest sizes of a step"
                )
            is_ordered = (
                (row.key_position, row.num_keys) == (row.query_position, row.num_queries)
                if is_causal
                else row.key_position + row.num_keys <= row.query_position
            )
            if not is_ordered:
                expected = "the queries' own keys" if is_causal else "keys that all precede the queries"
                raise ValueError(f"MlaPrefill.attend: given {row} with is_causal={is_causal}, expected {expected}")
