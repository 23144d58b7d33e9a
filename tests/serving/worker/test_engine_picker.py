# SPDX-License-Identifier: Apache-2.0
"""The choice of engines at start-up: refusals and trials, the log, and the error if no engine is left."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")


if torch.cuda.is_available():
    pytest.skip("engines are chosen in Triton's interpreter here", allow_module_level=True)


from tests.helpers.batches import random_batch, random_index
from tests.helpers.paged_varlen import STAND_IN
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.engine_picker import EnginePicker, failure, refuse_on_cpu
from vllm_sparse_kernels.attention import PORTABLE, AttendEngine, flash_engine
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.reference import attend as reference
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.layer import Layer, layer_plan
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.selection.engine import SelectEngine

CPU = torch.device("cpu")
BATCH = random_batch([(200, 140)], 2, 1, 64, 32, torch.float32)
for side in (BATCH.cache.keys, BATCH.cache.values):
    side.nan_to_num_(nan=1e3)  # FlashAttention multiplies values past a row's end by zero
SELECTED = random_batch([(900, 140)], 2, 1, 64, 32, torch.float32)
BLOCKS, STRIPES = random_index(BATCH, 64, 0.5), random_index(BATCH, 64, 0.5, stripes=20)


def broken(change: Callable[[torch.Tensor], None], name: str = "broken") -> AttendEngine:
    """Return an engine that computes the reference and then modifies its result."""

    def attend(call, out, options=None, sinks=None) -> None:
        reference(call, out, options=options, sinks=sinks)
        change(out)

    return AttendEngine(name, PORTABLE.refusal, attend)


def picker_of(*available: AttendEngine, wanted: str = "auto") -> EnginePicker:
    return EnginePicker(wanted, {engine.name: engine for engine in available})


def raises(out: torch.Tensor) -> None:
    raise RuntimeError("no kernel image\n is available")


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
    reason = failure(broken(change), BATCH, STRIPES, None)
    assert reason is None if says is None else says in str(reason)


def test_the_next_engine_is_taken_and_the_log_says_why(lines: list[str]) -> None:
    """An engine is refused or gives wrong results. ``flash`` supports no skipped products, so a trial can only find
    NaN."""
    wrong = broken(lambda out: out.mul_(1.01), "hopper")
    picker = picker_of(wrong, flash_engine(STAND_IN), PORTABLE)
    options = AttendOptions.from_heads([-1.0, None], [False, False], CPU)
    cases = [(BLOCKS, None), (STRIPES, None), (BLOCKS, options)]
    chosen = [picker.pick(BATCH, index, case_options) for index, case_options in cases]
    assert [engine.name for engine in chosen] == ["flash", "flash", "hopper"]
    assert picker_of(flash_engine(STAND_IN), PORTABLE).pick(BATCH, BLOCKS, options).name == "portable"
    engines = {0: chosen[0], 1: chosen[0], 5: chosen[1], 3: chosen[2]}
    picker.report({number: replace(LAYER, engine=engine) for number, engine in engines.items()})
    *reasons, on_flash, on_hopper, _ = lines
    assert on_flash == "sparse-prefill: attention: layers 0-1,5 on flash"
    assert on_hopper == "sparse-prefill: attention: layers 3 on hopper"
    assert reasons
    for line in reasons:
        assert line.startswith("sparse-prefill: engine hopper not used: its result in a trial is off by")


def test_an_engine_that_forgets_sinks_is_not_taken_for_layers_that_have_them() -> None:
    def attend(*given, sinks=None, **more) -> None:
        reference(*given, **more)

    picker = picker_of(AttendEngine("hopper", PORTABLE.refusal, attend), PORTABLE)
    sunk = replace(BATCH, sinks=torch.tensor([5.0, -5.0]))
    assert [picker.pick(batch, BLOCKS, None).name for batch in (BATCH, sunk)] == ["hopper", "portable"]


METHOD = TopP(0.5, sink_tokens=32, local_tokens=128, most_tokens=None)
SELECT = METHOD.select_engines[-1].select
LAYER = replace(Layer.of(layer_plan([METHOD, METHOD]), 64, CPU), by_kernels=True)


def select_engine(name: str, change: Callable[[SparseIndex], None] = lambda index: None) -> SelectEngine:
    """Return a selection engine that keeps the portable engine's lists and then modifies them."""

    def select(call) -> None:
        assert call.method.ramp_tokens == 1, "a trial has few keys, of which nearly all would be kept"
        SELECT(call)
        change(call.index)

    return SelectEngine(name, lambda spec: None, select)


def out_of_memory(index: SparseIndex) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def keep_others(index: SparseIndex) -> None:
    """Replace the lists with sorted lists that include the diagonal but not the heaviest blocks."""
    for i_tile, head in product(range(index.rows.num_tiles), range(index.num_heads)):
        tile = index.rows.tile_list[i_tile]
        kept = torch.ones(index.num_causal_blocks(tile), dtype=torch.bool)
        kept[index.blocks_of(head, i_tile)] = False
        kept[index.first_diagonal_block(tile) :] = True
        index.set_blocks(head, i_tile, kept)


def offered(monkeypatch: pytest.MonkeyPatch, first: SelectEngine) -> None:
    """Offer this engine before the portable engine of ``top_p``."""
    monkeypatch.setattr(TopP, "select_engines", (first, select_engine("portable")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda index: None, None),
        (out_of_memory, "it fails: OutOfMemoryError: CUDA out of memory"),
        (keep_others, "its selection in a trial agrees with the portable engine's on "),
        (lambda index: index.block_counts.zero_(), "its selection in a trial breaks the index: head 0, tile 0"),
    ],
)
def test_selection_is_tried_at_start_up(change, says: str | None, monkeypatch, lines: list[str]) -> None:
    """The engine before the portable engine is taken if its lists agree with the portable engine's; the log has the
    reason."""
    offered(monkeypatch, select_engine("hopper", change))
    picker = picker_of(PORTABLE)
    (engine,) = picker.pick_selection(LAYER, SELECTED)
    assert engine.name == ("hopper" if says is None else "portable")
    picker.report({0: replace(LAYER, select_engines=(engine,))})
    assert f"sparse-prefill: selection by top_p: layers 0 on {engine.name}" in lines
    if says is not None:
        assert lines[0].startswith(f"sparse-prefill: selection engine hopper not used: {says}")


def test_no_engine_is_left_to_select(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = (select_engine("hopper", out_of_memory), select_engine("portable", out_of_memory))
    monkeypatch.setattr(TopP, "select_engines", engines)
    with pytest.raises(
        ConfigurationError, match=r"no engine can run selection by top_p .*: hopper: it fails.*portable: it fails"
    ):
        picker_of(PORTABLE).pick_selection(LAYER, SELECTED)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("flash", "flash: there is no FlashAttention for this device"),
        ("portable", "portable: its result in a trial holds NaN"),
    ],
)
def test_an_engine_that_is_asked_for_and_cannot_be_had(wanted: str, says: str) -> None:
    available = (flash_engine(None), broken(lambda out: out.fill_(float("nan")), "portable"))
    with pytest.raises(ConfigurationError) as error:
        picker_of(*available, wanted=wanted).pick(BATCH, BLOCKS, None)
    assert f"attention (--additional-config sparse_prefill.engine is '{wanted}'): {says}" in str(error.value)


def test_on_a_cpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "IS_CPU", True)
    refuse_on_cpu("auto")
    with pytest.raises(ConfigurationError, match="given 'flash', expected 'auto': on a CPU, attention runs in torch"):
        refuse_on_cpu("flash")
    assert compat.flash_attention() is None
    monkeypatch.setattr(compat, "IS_CPU", False)
    refuse_on_cpu("flash")
