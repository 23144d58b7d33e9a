# SPDX-License-Identifier: Apache-2.0
"""Inputs of MLA's prefill for tests: small heads, poisoned results, and NaN wherever nothing may be read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED
from vllm_sparse_kernels.mla import MlaLimits, MlaPrefill, MlaRow

HEADS, KEY_DIM, VALUE_DIM = 2, 192, 128
SCALE = KEY_DIM**-0.5
POISON = 7777.0
ROOM = 3000
"""Tokens of the reference's running sums."""


class Inputs(NamedTuple):
    """Tensors of a call. Keys and values outside of the rows are NaN, and results are poisoned."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def inputs_of(rows: Sequence[MlaRow], device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Return inputs whose last key is the last row's, so a read past it leaves the tensor."""
    generator = torch.Generator().manual_seed(seed)
    num_queries = max(row.query_start + row.num_queries for row in rows) + 3
    num_keys = max(row.key_start + row.num_keys for row in rows)
    q = 2 * torch.randn(num_queries, HEADS, KEY_DIM, generator=generator)
    k = torch.randn(num_keys, HEADS, KEY_DIM, generator=generator)
    k[:, :, 0] += 3 * torch.randn(num_keys, HEADS, generator=generator)
    up = torch.randn(num_keys, HEADS, 2 * VALUE_DIM, generator=generator)
    used = torch.zeros(num_keys, dtype=torch.bool)
    for row in rows:
        used[row.key_start : row.key_start + row.num_keys] = True
        if row.key_position == 0 and row.num_keys:
            k[row.key_start] += 0.7 * q.mean((0, 1))
    k[~used], up[~used] = torch.nan, torch.nan
    up[..., :VALUE_DIM] = torch.nan  # keys' part of the up-projection, next to the values
    up = up.to(dtype).to(device)
    return Inputs(
        q.to(dtype).to(device), k.to(dtype).to(device), up[..., VALUE_DIM:],
        torch.full((num_queries, HEADS, VALUE_DIM), POISON, dtype=dtype, device=device),
        torch.full((HEADS, num_queries), POISON, device=device),
    )  # fmt: skip


def prefill(device: str, dtype: torch.dtype = torch.float32, num_scored: int = ALL_SCORED) -> MlaPrefill:
    return MlaPrefill(
        num_heads=HEADS, scale=SCALE, qk_head_dim=KEY_DIM, v_head_dim=VALUE_DIM, dtype=dtype,
        device=torch.device(device), limits=MlaLimits(2304, 2304, num_scored),
    )  # fmt: skip
