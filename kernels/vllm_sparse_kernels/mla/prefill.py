# SPDX-License-Identifier: Apache-2.0
"""``MlaPrefill``: runs the calls of MLA's prefill by kernels, or by plain torch where Triton has no device."""

from collections.abc import Sequence

import torch
import triton

from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.mla import reference
from vllm_sparse_kernels.mla.attention import attend_kernel, run_attention
from vllm_sparse_kernels.mla.calls import KEY_D, MOST_ROWS, VALUE_D, MlaCall, MlaMethod, MlaRow, Part, Tensors
from vllm_sparse_kernels.mla.products import set_tiles
from vllm_sparse_kernels.mla.reference import RunningSums
from vllm_sparse_kernels.mla.selection import Selection


class MlaPrefill:
    """Sparse MLA prefill of a worker: scratch memory, and the running sums of one layer of one step."""

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        """Return why a device cannot run the kernels, or None if it can."""
        if device.type == "cuda" and capability_of(device) < (8, 0):
            return f"the GPU has compute capability {'.'.join(map(str, capability_of(device)))}, and the least is 8.0"
        return None

    def __init__(
        self,
        num_heads: int,
        scale: float,
        max_query_tokens: int,
        max_key_tokens: int,
        device: torch.device,
        *,
        selects: bool,
    ) -> None:
        """Allocate all memory, on a device for which there is no ``refusal``.

        Args:
            scale: The softmax's factor.
            max_query_tokens: New tokens of the largest step.
            max_key_tokens: Keys of the largest call.
            selects: Whether calls may have ``top_p``, whose scratch memory is allocated then.
        """
        self.num_heads, self.scale, self.device = num_heads, scale, device
        self.max_query_tokens, self.max_key_tokens = max_query_tokens, max_key_tokens
        self.sums = RunningSums(*torch.empty(3, num_heads, max_query_tokens, device=device))
        self._runs_kernels = runs_kernels(device)
        self._selection: Selection | None = None
        if selects and self._runs_kernels:
            self._selection = Selection(self.sums, scale, max_query_tokens, max_key_tokens)

    def prepare(self, method: MlaMethod, rows: Sequence[MlaRow], *, is_causal: bool) -> MlaCall:
        """Prepare a call for all layers of a step, without waiting for the device.

        Args:
            method: The method of all rows, the same for all calls of a row in a step.
            rows: The rows, each with at least one query and one key.
            is_causal: True for the rows' new tokens, which restart the running sums of their scored queries; False
                for a chunk of context.

        Raises:
            ValueError: A row does not fit the memory.
        """
        for row in rows:
            if (
                row.state_start + row.num_queries > self.max_query_tokens
                or row.query_start + row.num_queries > self.max_query_tokens
                or row.key_start + row.num_keys > self.max_key_tokens
            ):
                raise ValueError(
                    f"MlaPrefill.prepare: given {row}, expected at most {self.max_query_tokens} queries and "
                    f"{self.max_key_tokens} keys: build MlaPrefill with the largest sizes of a step"
                )
        parts: tuple[Part, ...] = ()
        if self._runs_kernels:
            parts = tuple(
                Part.of(rows[first : first + MOST_ROWS], set_tiles(self.device), self.device)
                for first in range(0, len(rows), MOST_ROWS)
            )
        return MlaCall(method, tuple(rows), is_causal, parts)

    def attend(
        self,
        call: MlaCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        kept_pairs: torch.Tensor,
    ) -> None:
        """Compute attention of the rows' queries over the keys that the method keeps, without waiting for the device.

        Queries of other rows are not touched. A query that keeps nothing gets zeros and a log-sum-exp of -inf.

        Args:
            call: The call.
            q: [tokens, heads, 192]; like the other tensors, it may be a view with contiguous channels.
            k: [keys, heads, 192].
            v: [keys, heads, 128].
            out: [tokens, heads, 128], of the queries' dtype; written.
            lse: [heads, tokens] float32, log-sum-exp in natural units; written.
            kept_pairs: [1] int64 on the device; the number of kept pairs of a query and a key, over all heads, is
                added.

        Raises:
            ValueError: A tensor has the wrong shape, dtype or layout.
        """
        for name, tensor, head_dim in (("q", q, KEY_D), ("k", k, KEY_D), ("v", v, VALUE_D), ("out", out, VALUE_D)):
            expected = (self.num_heads, head_dim.value)
            if tensor.shape[1:] != expected or tensor.dtype != q.dtype or tensor.stride(2) != 1:
                raise ValueError(
                    f"MlaPrefill.attend: given {name} of shape {tuple(tensor.shape)}, {tensor.dtype} and strides "
                    f"{tensor.stride()}, expected [tokens, {self.num_heads}, {head_dim.value}], {q.dtype} and "
                    "contiguous channels"
                )
        tensors = Tensors.of(q, k, v, out, lse)
        if not self._runs_kernels:
            kept_pairs += reference.attend(call, tensors, self.scale, self.sums)
            return
        for part in call.parts:
            lists = None
            if call.is_selected:
                assert self._selection is not None, "MlaPrefill is built with selects=False, and the call has top_p"
                lists = self._selection.select(tensors, call, part, kept_pairs)
            run_attention(tensors, call, part, self.scale, lists)
        if not call.is_selected:
            kept_pairs += self.num_heads * call.window_pairs


def runs_kernels(device: torch.device) -> bool:
    """Return whether Triton has a device, or interprets kernels."""
    return device.type == "cuda" or not isinstance(attend_kernel, triton.JITFunction)
