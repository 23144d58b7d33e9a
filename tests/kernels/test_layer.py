# SPDX-License-Identifier: Apache-2.0
"""From plan to output: layers of a step share the memory of their indices, without effect on their results."""

import dataclasses
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch

from tests.helpers.batches import assert_close, random_batch
from tests.helpers.engine_cases import DTYPES, ENGINES, flash_attention
from tests.helpers.method_cases import all_lists
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_kernels import SparseIndex, Workspace
from vllm_sparse_kernels.attention import PORTABLE, AttendSpec
from vllm_sparse_kernels.engine_trial import Batch, expected_attention
from vllm_sparse_kernels.layer import Layer, LayerPlan, run
from vllm_sparse_kernels.memory import META
from vllm_sparse_kernels.methods.base import Method

NUM_HEADS, NUM_KV_HEADS = 4, 2
CPU = torch.device("cpu")
DENSE = make_method("dense", {})
SHAPE = make_method("a_shape", {"sink_tokens": 64, "local_tokens": 128})
LINES = make_method("vertical_slash", {"vertical_tokens": 40, "slash_tokens": 104})
MORE_LINES = make_method("vertical_slash", {"vertical_tokens": 41, "slash_tokens": 104})
MASS = make_method("flex_vertical_slash", {"gamma": 0.4})


def batch(lengths: Sequence[tuple[int, int]] = ((700, 300), (0, 131))) -> Batch:
    return random_batch(lengths, NUM_HEADS, NUM_KV_HEADS, 64, 16, gap_tokens=3)


def layer_of(*methods: Method) -> Layer:
    """Return a layer whose heads have these methods in turn, on a CPU on any machine."""
    plan = LayerPlan(tuple(methods[head % len(methods)] for head in range(NUM_HEADS)))
    return dataclasses.replace(Layer.of(plan, 64, CPU), block_tokens=64)


def run_layer(layer: Layer, batch: Batch, out: torch.Tensor, workspace: Workspace | None = None) -> SparseIndex:
    """Select and attend, and return the index."""
    call = layer.new_call(batch.q, batch.cache, batch.rows, batch.scale, workspace)
    run(layer, call, out)
    return call.index


def fits(index: SparseIndex, buffer: torch.Tensor) -> bool:
    """Return whether the data of an index lies in the buffer."""
    tensors = [index.block_counts, index.block_ids, index.stripe_positions]
    if index.has_stripes:  # without stripes, nothing fills counts: they are the layout's zeros
        tensors.append(index.stripe_counts)
    begin, end = buffer.data_ptr(), buffer.data_ptr() + len(buffer)
    return all(t.numel() == 0 or begin <= t.data_ptr() <= end - t.numel() * 4 for t in tensors)


def test_layers_take_the_same_room_one_after_the_other() -> None:
    """Layers of the same plan share a layout, the only data that a step keeps."""
    rows = batch().rows
    layers = [layer_of(DENSE, LINES), layer_of(DENSE, MORE_LINES), layer_of(MASS), layer_of(DENSE)]
    counted = Workspace(META)
    for layer in layers:
        with counted.frame():
            layer.allocate_index(rows, counted)
    arena = Workspace(CPU, torch.full((counted.peak_bytes,), 0xFF, dtype=torch.uint8))
    assert arena.buffer is not None
    offsets: dict[Layer, torch.Tensor] = {}
    for layer in [*layers, *layers]:
        with arena.frame():
            index = layer.allocate_index(rows, arena)
            assert fits(index, arena.buffer)
            assert offsets.setdefault(layer, index.stripe_offsets) is index.stripe_offsets
            assert not index.stripe_counts.any()
    assert arena.peak_bytes == counted.peak_bytes
    wider = dataclasses.replace(layers[0], block_tokens=128).allocate_index(rows)
    assert wider.block_ids.shape[1] < index.block_ids.shape[1]


@pytest.mark.parametrize("check", [False, True])
def test_an_index_is_looked_at_on_request(monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    looks, sample = Mock(), batch([(0, 100)])
    monkeypatch.setattr(SparseIndex, "check", looks)
    layer = layer_of(SHAPE)
    call = layer.new_call(sample.q, sample.cache, sample.rows, sample.scale)
    run(layer, call, sample.empty_out(), check=check)
    assert looks.call_count == check


def test_tensors_without_the_rows_tokens() -> None:
    sample = batch([(0, 5)])
    layer, out = layer_of(DENSE), sample.empty_out()
    for q, result, name in (
        (sample.q[:4], out, "query"),
        (sample.q, out[:4], "output"),
        (sample.q, out.mT.contiguous().mT, "output"),
    ):
        expected = "with at least 5 tokens, where the last row ends, and stride 1 along head_dim"
        with pytest.raises(ValueError, match=f"{name}: given shape .* with strides .* {expected}"):
            run(layer, layer.new_call(q, sample.cache, sample.rows, sample.scale), result)


@pytest.mark.parametrize(
    "method", [make_method("default", {"ramp_tokens": 1}), make_method("sale", {"tau": 0.03})], ids=str
)
@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    [
        ([(700, 70)], 64),
        *(pytest.param([(20_000, 2049), (0, 700)], head_dim, marks=pytest.mark.gpu) for head_dim in (64, 128, 256)),
    ],
)
def test_selection_does_not_depend_on_the_engine(
    device: str, lengths: list[tuple[int, int]], head_dim: int, method: Method
) -> None:
    """Engines with blocks of the same width keep equal blocks. If ``portable`` is configured, its blocks are wider, and
    it keeps all that contain such a block."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("blocks are narrow on GPUs of compute capability 9.0 (H100, H200)")
    sample = random_batch(lengths, NUM_HEADS, NUM_KV_HEADS, head_dim, 128, DTYPES[-1], device)
    for side in (sample.cache.keys, sample.cache.values):
        side.nan_to_num_()  # FlashAttention multiplies unused places by 0
    sample.q.mul_(3)
    plan = LayerPlan((method,) * NUM_HEADS)
    layer, wide = (
        dataclasses.replace(Layer.of(plan, head_dim, sample.q.device, wanted), by_kernels=True)
        for wanted in ("auto", PORTABLE.name)
    )
    spec, kept = AttendSpec.of(sample.cache, layer.allocate_index(sample.rows), None), {}
    for engine in (engine for engine in ENGINES.values() if engine.refusal(spec) is None):
        out = sample.empty_out()
        index = run_layer(dataclasses.replace(layer, engine=engine), sample, out)
        assert_close(expected_attention(sample, index), out)
        kept[engine.name] = all_lists(index)
    missing = {"hopper"} if device == "cpu" else {"flash"} if flash_attention() is None else set()
    assert kept.keys() == ENGINES.keys() - missing
    assert all(lists_of_engine == kept[PORTABLE.name] for lists_of_engine in kept.values())
    times = wide.block_tokens // layer.block_tokens
    assert times > 1
    for ours, theirs in zip(kept[PORTABLE.name], all_lists(run_layer(wide, sample, out))):
        assert [sorted({block // times for block in blocks}) for blocks, _ in ours] == [blocks for blocks, _ in theirs]
