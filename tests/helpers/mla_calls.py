# SPDX-License-Identifier: Apache-2.0
"""Inputs of MLA's prefill for tests: small heads, poisoned results, and NaN wherever nothing may be read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_sparse_kernels.mla import MlaCall, MlaPrefill, MlaRow, reference
from vllm_sparse_kernels.mla.calls import KEY_D, VALUE_D, Tensors
from vllm_sparse_kernels.mla.reference import RunningSums

HEADS, KEY_DIM, VALUE_DIM = 2, KEY_D.value, VALUE_D.value
SCALE = KEY_DIM**-0.5
POISON = 7777.0
MAX_TOKENS = 2304


class Inputs(NamedTuple):
    """Tensors of a call. Keys and values outside of the rows are NaN, and results are poisoned."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def attend(self, engine: MlaPrefill, call: MlaCall) -> int:
        """Run a call and return the number of kept pairs."""
        kept = torch.full((1,), 5, dtype=torch.int64, device=self.q.device)
        engine.attend(call, self.q, self.k, self.v, out=self.out, lse=self.lse, kept_pairs=kept)
        return int(kept) - 5

    def check(self, call: MlaCall, kept: int, sums: RunningSums) -> None:
        """Compare results with the reference's."""
        out, lse = torch.full_like(self.out, POISON), torch.full_like(self.lse, POISON)
        assert kept == reference.attend(call, Tensors.of(self.q, self.k, self.v, out, lse), SCALE, sums)
        tolerance = 2e-4 if self.q.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(self.out, out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(self.lse, lse, rtol=tolerance, atol=tolerance)


def inputs_of(rows: Sequence[MlaRow], device: str, seed: int = 0) -> Inputs:
    """Return inputs whose last key is the last row's, so a read past it leaves the tensor."""
    generator, dtype = torch.Generator().manual_seed(seed), torch.float32 if device == "cpu" else torch.float16
    num_queries = max(row.query_start + row.num_queries for row in rows) + 3
    num_keys = max(row.key_start + row.num_keys for row in rows)
    q = 2 * torch.randn(num_queries, HEADS, KEY_DIM, generator=generator)
    k = torch.randn(num_keys, HEADS, KEY_DIM, generator=generator)
    k[:, :, 0] += 3 * torch.randn(num_keys, HEADS, generator=generator)
    up = torch.randn(num_keys, HEADS, 2 * VALUE_DIM, generator=generator)
    used = torch.zeros(num_keys, dtype=torch.bool)
    for row in rows:
        used[row.key_start : row.key_start + row.num_keys] = True
        if row.key_position == 0:
            k[row.key_start] += 0.7 * q.mean((0, 1))
    k[~used], up[~used] = torch.nan, torch.nan
    up[..., :VALUE_DIM] = torch.nan  # keys' part of the up-projection, next to the values
    up = up.to(dtype).to(device)
    return Inputs(
        q.to(dtype).to(device), k.to(dtype).to(device), up[..., VALUE_DIM:],
        torch.full((num_queries, HEADS, VALUE_DIM), POISON, dtype=dtype, device=device),
        torch.full((HEADS, num_queries), POISON, device=device),
    )  # fmt: skip


def prefill(device: str) -> MlaPrefill:
    return MlaPrefill(HEADS, SCALE, MAX_TOKENS, MAX_TOKENS, torch.device(device), selects=True)


def zero_sums(device: str) -> RunningSums:
    return RunningSums(*torch.zeros(3, HEADS, MAX_TOKENS, device=device))
