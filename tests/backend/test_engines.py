# SPDX-License-Identifier: Apache-2.0
"""The choice of engines at start-up: by refusal and by trial, in the log and in the error where none is left."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")


if torch.cuda.is_available():
    pytest.skip("engines are chosen in Triton's interpreter here", allow_module_level=True)

from benchmarks.batches import random_batch, random_index
from tests.helpers.paged_varlen import STAND_IN
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.engines import EnginePicker, failure, refuse_on_cpu
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_kernels.attend import PORTABLE, Engine, flash_engine
from vllm_sparse_kernels.attend.options import AttendOptions
from vllm_sparse_kernels.attend.reference import attend as reference
from vllm_sparse_kernels.trial import expected_attention

CPU = torch.device("cpu")
BATCH = random_batch([(200, 140)], 2, 1, 64, 32, torch.float32)
for side in (BATCH.cache.keys, BATCH.cache.values):
    side.nan_to_num_(nan=1e3)  # FlashAttention multiplies what lies past a row's end by zero
BLOCKS, STRIPES = random_index(BATCH, 64, 0.5), random_index(BATCH, 64, 0.5, stripes=20)


def broken(change: Callable[[torch.Tensor], None], name: str = "broken") -> Engine:
    """An engine that is right, as the reference is, and then something done to its result."""

    def attend(q, cache, index, out, scale, lse=None, options=None, sinks=None) -> None:
        reference(q, cache, index, out, scale, lse, options=options, sinks=sinks)
        change(out)

    return Engine(name, PORTABLE.refusal, attend)


def raises(out: torch.Tensor) -> None:
    raise RuntimeError("no kernel image\n is available")


def table(*found: Engine) -> dict[str, Engine]:
    return {engine.name: engine for engine in found}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out: None, None),
        (raises, "it fails: RuntimeError: no kernel image is available"),
        (lambda out: out[3, 1, 5].fill_(float("nan")), "holds NaN"),
        (lambda out: out[3, 1, 5].add_(1e-3), "is off by 1.0"),
    ],
)
def test_what_a_trial_finds(change: Callable[[torch.Tensor], None], says: str | None) -> None:
    found = failure(broken(change), BATCH, STRIPES, None, expected_attention(BATCH, STRIPES))
    assert found is None if says is None else says in str(found)
    options = AttendOptions.from_heads([-1.0, None], [False, True], CPU)  # with these nothing but NaN can be found
    found = failure(broken(change), BATCH, BLOCKS, options, None)
    assert found is None if says is None or "off" in says else says in str(found)


def test_the_next_engine_is_taken_and_the_log_says_why(lines: list[str]) -> None:
    """Refused or found wrong: ``flash`` has no skip of products, whose trial can find nothing but NaN."""
    wrong = broken(lambda out: out.mul_(1.01), "hopper")
    picker = EnginePicker(table=table(wrong, flash_engine(STAND_IN), PORTABLE))
    options = AttendOptions.from_heads([-1.0, None], [False, False], CPU)
    asked = [(BLOCKS, None), (STRIPES, None), (BLOCKS, options)]
    chosen = [picker.pick(BATCH, *given) for given in asked]
    assert [engine.name for engine in chosen] == ["flash", "flash", "hopper"]
    others = EnginePicker(table=table(flash_engine(STAND_IN), PORTABLE))
    assert others.pick(BATCH, BLOCKS, options).name == "portable"
    picker.report({0: chosen[0], 1: chosen[0], 5: chosen[1], 3: chosen[2]})
    *reasons, last = lines
    assert last == "sparse-prefill: attention: layers 3 on hopper; layers 0-1,5 on flash"
    assert reasons
    for line in reasons:
        assert line.startswith("sparse-prefill: engine hopper not taken: its result in a trial is off by")


def test_an_engine_that_forgets_sinks_is_not_taken_for_layers_that_have_them() -> None:
    def attend(*given, sinks=None, **more) -> None:
        reference(*given, **more)

    picker = EnginePicker(table=table(Engine("hopper", PORTABLE.refusal, attend), PORTABLE))
    sunk = replace(BATCH, sinks=torch.tensor([5.0, -5.0]))
    assert [picker.pick(batch, BLOCKS, None).name for batch in (BATCH, sunk)] == ["hopper", "portable"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("hopper", "no engine is named 'hopper'; there are flash, portable"),
        ("flash", "flash: there is no FlashAttention for this device"),
        ("portable", "portable: its result in a trial holds NaN"),
    ],
)
def test_an_engine_that_is_asked_for_and_cannot_be_had(asked: str, says: str) -> None:
    found = table(flash_engine(None), broken(lambda out: out.fill_(float("nan")), "portable"))
    with pytest.raises(ConfigurationError) as error:
        EnginePicker(asked, found).pick(BATCH, BLOCKS, None)
    assert str(error.value).startswith(f"--additional-config sparse_prefill.engine: given '{asked}', but ")
    assert says in str(error.value)


def test_on_a_cpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "IS_CPU", True)
    refuse_on_cpu("auto")
    with pytest.raises(ConfigurationError, match="given 'flash', expected 'auto': vLLM runs on a CPU here"):
        refuse_on_cpu("flash")
    assert compat.flash_attention() is None
    monkeypatch.setattr(compat, "IS_CPU", False)
    refuse_on_cpu("flash")
