# SPDX-License-Identifier: Apache-2.0
"""MLA's prefill by kernels, compared with the reference in plain torch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.helpers.mla_calls import HEADS, KEY_DIM, POISON, ROOM, SCALE, VALUE_DIM, Inputs, inputs_of, prefill
from vllm_sparse_kernels.mla import (
    MlaAShape,
    MlaLimits,
    MlaMethod,
    MlaPrefill,
    MlaRow,
    MlaTopP,
    attention,
    calls,
    reference,
)
from vllm_sparse_kernels.mla.calls import Tensors
from vllm_sparse_kernels.mla.prefill import CACHED_CALLS
from vllm_sparse_kernels.mla.reference import RunningSums


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
        method, Tensors.of(inputs.q, inputs.k, inputs.v, out, lse), rows, scale=SCALE, is_causal=is_causal,
        sums=RunningSums.zeros(HEADS, ROOM, device),
    )  # fmt: skip
    torch.testing.assert_close(inputs.out, out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs.lse, lse, rtol=tolerance, atol=tolerance)
    assert int(kept) - 5 == expected
    return expected


def call_of(engine: MlaPrefill, method: MlaMethod, rows: Sequence[MlaRow], is_causal: bool, inputs: Inputs) -> None:
    engine.attend(method, inputs.q, inputs.k, inputs.v, rows, is_causal=is_causal, out=inputs.out, lse=inputs.lse)


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
        assert (inputs.out[1:21] == 0).all()
        assert (inputs.lse[:, 1:21] == -torch.inf).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides itself")
@pytest.mark.parametrize("name", ["two rows", "a chunk in the window"])
def test_bulk_copies_read_the_same_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper and later, steps without a mask are boxes of a matrix of tokens. The interpreter copies boxes too."""
    copies: list[int] = []
    matrices = attention._matrices
    monkeypatch.setattr(attention, "has_bulk_copies", lambda device: True)
    monkeypatch.setattr(
        attention, "_matrices", lambda *args: copies.extend(x is not None for x in matrices(*args)) or matrices(*args)
    )
    is_causal, rows = CALLS[name]
    for method in MlaAShape(11, 37), MlaTopP(1.0):
        check_call(prefill("cpu"), method, rows, is_causal, inputs_of(rows, "cpu"), 2e-4)
    assert copies
    assert all(copies)


def test_2049_tokens(device: str) -> None:
    """The rows' last keys are one key of a block, and their last queries one query of a tile."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    engine, tolerance = prefill(device, dtype), 2e-4 if device == "cpu" else 1e-2
    chunk = [MlaRow(0, 65, 2049, 0, 0, 2049, 0)]
    check_call(engine, MlaAShape(100, 900), chunk, False, inputs_of(chunk, device, dtype), tolerance)
    new = [MlaRow(0, 2049, 0, 0, 0, 2049, 0)]
    check_call(engine, MlaAShape(5, 130), new, True, inputs_of(new, device, dtype), tolerance)


@pytest.mark.parametrize("chunk_tokens", [64, 150, 401])
def test_chunks_do_not_show_in_an_a_shape(chunk_tokens: int, device: str) -> None:
    """Chunks of any size, merged by their log-sum-exp, equal attention over the whole row."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    method, context, new = MlaAShape(70, 140), 401, 130
    whole_row = MlaRow(0, new, context, 0, 0, context + new, 0)
    inputs = inputs_of([whole_row], device, dtype)
    out, lse = torch.zeros_like(inputs.out), torch.zeros_like(inputs.lse)
    reference.attend(
        method, Tensors.of(inputs.q, inputs.k, inputs.v, out, lse), [whole_row], scale=SCALE, is_causal=False,
        sums=RunningSums.zeros(HEADS, new, torch.device(device)),
    )  # fmt: skip
    engine = prefill(device, dtype)
    rows = [MlaRow(0, new, context, 0, context, new, context)]
    for start in range(0, context, chunk_tokens):
        rows.append(MlaRow(0, new, context, 0, start, min(chunk_tokens, context - start), start))
    merged_out, merged_lse = torch.zeros_like(out[:new]).float(), torch.full_like(lse[:, :new], -torch.inf)
    for i, row in enumerate(rows):
        call_of(engine, method, [row], i == 0, inputs)
        merged = torch.logaddexp(merged_lse, inputs.lse[:, :new])
        before, now = ((x - merged).exp().T[..., None] for x in (merged_lse, inputs.lse[:, :new]))
        merged_out, merged_lse = merged_out * before + inputs.out[:new].float() * now, merged
    tolerance = 2e-4 if device == "cpu" else 1e-2
    torch.testing.assert_close(merged_out, out[:new].float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(merged_lse, lse[:, :new], rtol=tolerance, atol=tolerance)


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without Triton's interpreter has no kernels: results are the reference's."""
    monkeypatch.setattr(MlaPrefill, "use_kernels", lambda self: None)
    engine = prefill("cpu", torch.bfloat16)
    for method in MlaAShape(11, 37), MlaTopP(0.8):
        is_causal, rows = CALLS["two rows"]
        check_call(engine, method, rows, is_causal, inputs_of(rows, "cpu", torch.bfloat16), 0.0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 192, 128, torch.bfloat16, "cpu"), "0 heads"),
        ((4, 128, 128, torch.bfloat16, "cpu"), "keys of 128 and values of 128 channels"),
        ((4, 192, 192, torch.bfloat16, "cpu"), "keys of 192 and values of 192 channels"),
        ((4, 192, 128, torch.float32, "cuda"), "torch.float32"),
        ((4, 192, 128, torch.bfloat16, "meta"), "the device is meta"),
    ],
)
def test_what_is_not_supported_is_refused(sizes: tuple[Any, ...], message: str) -> None:
    *numbers, device = sizes
    reason = MlaPrefill.refusal(*numbers, torch.device(device))
    assert reason is not None
    assert message in reason
    assert MlaPrefill.refusal(16, 192, 128, torch.float16, torch.device("cpu")) is None
    if device == "cpu":
        names = ("num_heads", "qk_head_dim", "v_head_dim", "dtype")
        with pytest.raises(ValueError, match=message):
            MlaPrefill(
                **dict(zip(names, numbers, strict=True)), scale=1.0, limits=MlaLimits(1, 1),
                device=torch.device(device),
            )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "row", "is_causal", "message"),
    [
        (MlaAShape(-1, 5), MlaRow(0, 4, 9, 0, 0, 4, 9), True, "sink_tokens of at least 0"),
        (MlaAShape(0, 0), MlaRow(0, 4, 9, 0, 0, 4, 9), True, "local_tokens of at least 1"),
        (MlaTopP(0.0), MlaRow(0, 4, 9, 0, 0, 4, 9), True, "kept_mass above 0"),
        (MlaTopP(0.9, 1.5), MlaRow(0, 4, 9, 0, 0, 4, 9), True, "most_share above 0"),
        (MlaTopP(0.9, queries="third"), MlaRow(0, 4, 9, 0, 0, 4, 9), True, "expected queries of half or all"),
        (MlaTopP(0.9), MlaRow(0, 4, 9, 0, 0, 3, 9), True, "the queries' own keys"),
        (MlaTopP(0.9), MlaRow(0, 4, 9, 0, 0, 4, 6), False, "keys that all precede the queries"),
        (MlaTopP(0.9), MlaRow(2, 4, 9, 0, 0, 4, 0), False, "indices within them"),
        (MlaTopP(0.9), MlaRow(0, 4, 9, 2303, 0, 4, 0), False, "indices within them"),
        (MlaTopP(0.9), MlaRow(0, 4, 9, 0, 1, 4, 0), False, "indices within them"),
        (MlaTopP(0.9), MlaRow(0, 4, -9, 0, 0, 4, 0), False, "indices within them"),
    ],
)
def test_wrong_calls_are_refused(method: MlaMethod, row: MlaRow, is_causal: bool, message: str, device: str) -> None:
    engine = prefill(device, torch.float16)
    q = torch.zeros(5, HEADS, KEY_DIM, dtype=torch.float16, device=device)
    k, v = q[:4], torch.zeros(4, HEADS, VALUE_DIM, dtype=torch.float16, device=device)
    out, lse = torch.zeros(5, HEADS, VALUE_DIM, dtype=torch.float16, device=device), torch.zeros(HEADS, 5).to(device)
    with pytest.raises(ValueError, match=message):
        engine.attend(method, q, k, v, [row], is_causal=is_causal, out=out, lse=lse)


def test_wrong_tensors_are_refused(device: str) -> None:
    engine = prefill(device, torch.float16)
    row = MlaRow(0, 4, 9, 0, 0, 4, 9)
    q = torch.zeros(4, HEADS, KEY_DIM, dtype=torch.float16, device=device)
    v = torch.zeros(4, HEADS, VALUE_DIM, dtype=torch.float16, device=device)
    tensors = {"q": q, "k": q, "v": v, "out": v.clone(), "lse": torch.zeros(HEADS, 4, device=device)}
    engine.attend(MlaTopP(1.0), rows=[row], is_causal=True, **tensors)
    wrong: list[tuple[str, torch.Tensor]] = [
        ("q", q.float()), ("k", q[:, :1]), ("v", q), ("out", v.transpose(1, 2).contiguous().transpose(1, 2)),
        ("lse", tensors["lse"].half()), ("lse", torch.zeros(4, HEADS, device=device).T),
    ]  # fmt: skip
    for name, tensor in wrong:
        with pytest.raises(ValueError, match=f"given {name} of shape"):
            engine.attend(MlaTopP(1.0), rows=[row], is_causal=True, **tensors | {name: tensor})
    counter = torch.zeros((), dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="given kept_pairs"):
        engine.attend(MlaTopP(1.0), rows=[row], is_causal=True, kept_pairs=counter, **tensors)


def test_every_call_of_a_step_copies_its_rows_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a step make the same calls. Memory of old calls is freed."""
    engine = prefill(device, torch.float16)
    made: list[int] = []
    copy_rows = calls.Call.of
    monkeypatch.setattr(calls.Call, "of", lambda *args: made.append(1) or copy_rows(*args))
    for _ in range(3):
        for position in 9, 10:
            engine._call((MlaRow(0, 4, position, 0, 0, 4, 0),))
    assert len(made) == 2
    for position in range(100, 300):
        engine._call((MlaRow(0, 4, position, 0, 0, 4, 0),))
    assert len(engine._calls) == CACHED_CALLS
