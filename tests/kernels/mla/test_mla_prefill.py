# SPDX-License-Identifier: Apache-2.0
"""MLA's prefill by kernels, compared with the reference in plain torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from vllm_sparse_kernels.mla import MlaAShape, MlaMethod, MlaPrefill, MlaRow, MlaTopP, reference
from vllm_sparse_kernels.mla.reference import RunningSums

HEADS, KEY_DIM, VALUE_DIM = 2, 192, 128
SCALE = KEY_DIM**-0.5
POISON = 7777.0
ROOM = 300


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


def prefill(device: str, dtype: torch.dtype = torch.float32, **sizes: int) -> MlaPrefill:
    return MlaPrefill(
        num_heads=HEADS, scale=SCALE, qk_head_dim=KEY_DIM, v_head_dim=VALUE_DIM, dtype=dtype,
        device=torch.device(device), **{"max_query_tokens": 2304, "max_key_tokens": 2304} | sizes,
    )  # fmt: skip


def check_call(
    engine: MlaPrefill, method: MlaMethod, rows: Sequence[MlaRow], is_causal: bool, inputs: Inputs, tolerance: float
) -> int:
    """Run a call, compare it with the reference, and return the kept pairs. Running sums are not compared."""
    device = inputs.q.device
    kept = torch.full((1,), 5, dtype=torch.int64, device=device)
    engine.attend(
        method, inputs.q, inputs.k, inputs.v, rows, is_causal=is_causal, out=inputs.out, lse=inputs.lse, kept_pairs=kept
    )
    out, lse = torch.full_like(inputs.out, POISON), torch.full_like(inputs.lse, POISON)
    expected = reference.attend(
        method, inputs.q, inputs.k, inputs.v, rows, scale=SCALE, is_causal=is_causal,
        sums=RunningSums.zeros(HEADS, ROOM * 10, device), out=out, lse=lse,
    )  # fmt: skip
    torch.testing.assert_close(inputs.out, out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs.lse, lse, rtol=tolerance, atol=tolerance)
    assert int(kept) - 5 == expected
    return expected


CALLS: dict[str, tuple[bool, list[MlaRow]]] = {
    "one token": (True, [MlaRow(0, 1, 0, 0, 0, 1, 0)]),
    "63 new tokens after a context": (True, [MlaRow(2, 63, 1000, 0, 5, 63, 1000)]),
    "two rows": (True, [MlaRow(4, 200, 37, 0, 3, 200, 37), MlaRow(204, 65, 0, 200, 210, 65, 0)]),
    "a chunk": (False, [MlaRow(0, 130, 700, 0, 0, 321, 0)]),
    "a chunk in the window": (False, [MlaRow(1, 130, 700, 0, 7, 433, 267)]),
    "a chunk between sinks and window": (False, [MlaRow(1, 20, 900, 0, 7, 200, 300)]),
    "two rows of a chunk": (False, [MlaRow(0, 140, 401, 0, 1, 401, 0), MlaRow(150, 9, 72, 140, 410, 7, 65)]),
    "a row without keys": (False, [MlaRow(0, 5, 401, 0, 0, 300, 101), MlaRow(5, 9, 72, 5, 300, 0, 0)]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("method", [MlaAShape(11, 37), MlaAShape(0, 300), MlaTopP(1.0)], ids=str)
def test_kernels_equal_the_reference(name: str, method: MlaMethod, device: str) -> None:
    is_causal, rows = CALLS[name]
    dtype = torch.float32 if device == "cpu" else torch.float16
    inputs = inputs_of(rows, device, dtype)
    kept = check_call(prefill(device, dtype), method, rows, is_causal, inputs, 2e-4 if device == "cpu" else 1e-2)
    if method == MlaTopP(1.0):
        pairs = sum(
            row.num_queries * (row.num_queries + 1) // 2 if is_causal else row.num_queries * row.num_keys
            for row in rows
        )  # fmt: skip
        assert kept == HEADS * pairs
    if name == "a chunk between sinks and window" and method == MlaAShape(11, 37):
        assert kept == 0
        assert (inputs.out[1:21] == 0).all() and (inputs.lse[:, 1:21] == -torch.inf).all()
