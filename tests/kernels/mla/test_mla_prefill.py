# SPDX-License-Identifier: Apache-2.0
"""MLA's prefill by kernels, compared with the reference in plain torch."""

import pytest
import torch

from tests.helpers.mla_calls import HEADS, KEY_DIM, VALUE_DIM, inputs_of, prefill, zero_sums
from vllm_sparse_kernels.methods.minference import AShape
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.mla import MlaMethod, MlaRow, attention, prefill as prefill_module

CALLS: dict[str, tuple[bool, list[MlaRow]]] = {
    "one token": (True, [MlaRow(0, 1, 0, 0, 0, 1, 0)]),
    "two rows": (True, [MlaRow(4, 200, 37, 0, 3, 200, 37), MlaRow(204, 65, 0, 200, 210, 65, 0)]),
    "a chunk in the window": (False, [MlaRow(1, 130, 700, 0, 7, 433, 267)]),
    "a chunk between sinks and window": (False, [MlaRow(1, 20, 900, 0, 7, 200, 300)]),
    "two rows of a chunk": (False, [MlaRow(0, 140, 401, 0, 1, 401, 0), MlaRow(150, 9, 72, 140, 410, 7, 65)]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("method", [AShape(11, 37), AShape(0, 300), TopP(kept_mass=1.0)], ids=str)
def test_kernels_equal_the_reference(name: str, method: MlaMethod, device: str) -> None:
    is_causal, rows = CALLS[name]
    engine, inputs = prefill(device), inputs_of(rows, device)
    call = engine.prepare(method, rows, is_causal=is_causal)
    kept = inputs.attend(engine, call)
    inputs.check(call, kept, zero_sums(device))
    if isinstance(method, TopP):
        assert kept == HEADS * call.causal_pairs
    if name == "a chunk between sinks and window" and method == AShape(11, 37):
        assert kept == 0
        assert (inputs.out[1:21] == 0).all()
        assert (inputs.lse[:, 1:21] == -torch.inf).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides itself")
def test_bulk_copies_read_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper and later, steps without a mask are boxes of a matrix of tokens. The interpreter copies boxes too."""
    monkeypatch.setattr(attention, "has_bulk_copies", lambda device: True)
    is_causal, rows = CALLS["two rows"]
    engine, inputs = prefill("cpu"), inputs_of(rows, "cpu")
    call = engine.prepare(TopP(kept_mass=1.0), rows, is_causal=is_causal)
    inputs.check(call, inputs.attend(engine, call), zero_sums("cpu"))


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without Triton's interpreter has no kernels: results are the reference's."""
    monkeypatch.setattr(prefill_module, "runs_kernels", lambda device: False)
    is_causal, rows = CALLS["two rows"]
    engine, inputs = prefill("cpu"), inputs_of(rows, "cpu")
    call = engine.prepare(TopP(kept_mass=0.8), rows, is_causal=is_causal)
    inputs.check(call, inputs.attend(engine, call), zero_sums("cpu"))


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "capability_of", lambda device: (7, 5))
    assert prefill_module.MlaPrefill.refusal(torch.device("cuda")) == (
        "the GPU has compute capability 7.5, and the least is 8.0"
    )


@pytest.mark.parametrize(
    "row", [MlaRow(2301, 4, 9, 0, 0, 4, 0), MlaRow(0, 4, 9, 2301, 0, 4, 0), MlaRow(0, 4, 9, 0, 2301, 4, 0)]
)
def test_rows_that_do_not_fit_the_memory_are_refused(row: MlaRow, device: str) -> None:
    with pytest.raises(ValueError, match="expected at most 2304 queries and 2304 keys: build MlaPrefill with"):
        prefill(device).prepare(TopP(), [row], is_causal=False)


def test_wrong_tensors_are_refused(device: str) -> None:
    engine = prefill(device)
    call = engine.prepare(TopP(kept_mass=1.0), [MlaRow(0, 4, 9, 0, 0, 4, 9)], is_causal=True)
    q = torch.zeros(4, HEADS, KEY_DIM, dtype=torch.float16, device=device)
    v = torch.zeros(4, HEADS, VALUE_DIM, dtype=torch.float16, device=device)
    tensors = {"q": q, "k": q, "v": v, "out": v.clone(), "lse": torch.zeros(HEADS, 4, device=device)}
    tensors["kept_pairs"] = torch.zeros(1, dtype=torch.int64, device=device)
    for name, tensor in ("v", v.float()), ("k", q[:, :1]), ("out", v.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ValueError, match=f"given {name} of shape"):
            engine.attend(call, **tensors | {name: tensor})
