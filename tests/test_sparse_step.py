"""Layers of one step: which of them share an index, and that sharing one changes nothing that they select."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("vllm")

from vllm_sparse_backend.serving.step import SparseStep
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.plan import HeadGroup, LayerPlan
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.reference.attend import attend
from vllm_sparse_kernels.select import METHODS, name_of
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.testing.batches import Batch, random_batch

NUM_HEADS, NUM_KV_HEADS = 8, 2
DENSE = make_method("dense", {})
BLOCKS = make_method("block_sparse", {"top_blocks": 3})
SHAPE = make_method("a_shape", {"sink_tokens": 64, "local_tokens": 128})
LINES = make_method("vertical_slash", {"vertical_tokens": 40, "slash_tokens": 104})
MORE_LINES = make_method("vertical_slash", {"vertical_tokens": 41, "slash_tokens": 104})
WIDER = make_method("vertical_slash", {"vertical_tokens": 40, "slash_tokens": 180})
MASS = make_method("flex_vertical_slash", {"gamma": 0.4})
ANCHORS = make_method("anchor_attention", {"theta": 3.0, "step_tiles": 2})


def batch(lengths: Sequence[tuple[int, int]] = ((700, 300), (0, 131))) -> Batch:
    return random_batch(lengths, NUM_HEADS, NUM_KV_HEADS, 64, 16, gap_tokens=3)


def plan(*methods: Method) -> LayerPlan:
    """Head i has the i-th method, and so on in turn."""
    dealt = [methods[head % len(methods)] for head in range(NUM_HEADS)]
    return tuple(HeadGroup(tuple(h for h, m in enumerate(dealt) if m == method), method) for method in methods)


def select(groups: LayerPlan, layer: Batch, index: SparseIndex) -> None:
    for group in groups:
        heads = torch.tensor(group.heads, dtype=torch.int32)
        METHODS[name_of(group.method)].reference(group.method, layer.q, layer.cache, index, heads, layer.scale)


@pytest.mark.parametrize(
    ("other", "block_tokens", "shared"),
    [
        (plan(DENSE, LINES), 64, True),
        (plan(BLOCKS, LINES), 64, True),
        (plan(SHAPE, WIDER), 64, True),
        (plan(DENSE, LINES), 128, False),
        (plan(LINES, DENSE), 64, False),
        (plan(DENSE, MORE_LINES), 64, False),
        (plan(DENSE), 64, False),
    ],
)
def test_layers_that_need_equal_room_share_an_index(other: LayerPlan, block_tokens: int, shared: bool) -> None:
    step = SparseStep(batch().rows, ())
    index = step.index(plan(DENSE, LINES), NUM_HEADS, 64)
    assert (step.index(other, NUM_HEADS, block_tokens) is index) == shared
    assert step.index(plan(DENSE, LINES), NUM_HEADS, 64) is index


def test_steps_share_nothing() -> None:
    layer = batch()
    first, second = (SparseStep(layer.rows, ()).index(plan(DENSE), NUM_HEADS, 64) for _ in range(2))
    assert first.block_ids.data_ptr() != second.block_ids.data_ptr()


@pytest.mark.parametrize("lengths", [((700, 300), (0, 131)), ((0, 100),)], ids=str)
def test_a_shared_index_holds_what_the_layer_at_hand_selects(lengths: list[tuple[int, int]]) -> None:
    """Through layers of unlike plans in turn, each output is that of every head alone in an index of its own."""
    plans = [plan(DENSE, LINES, ANCHORS), plan(MASS), plan(BLOCKS, WIDER, ANCHORS), plan(SHAPE, LINES, ANCHORS)]
    first, indices = batch(lengths), set()
    step = SparseStep(first.rows, ())
    for i, groups in enumerate([*plans, *plans]):
        layer = dataclasses.replace(first, q=first.q.roll(i, 1) * (1 + i % 3))
        index = step.index(groups, NUM_HEADS, 64)
        indices.add(id(index))
        select(groups, layer, index)
        index.check()
        out, alone = layer.empty_out(), layer.empty_out()
        attend(layer.q, layer.cache, index, out, layer.scale)
        for group in groups:
            layouts = {head: group.method.stripe_layout(layer.rows) for head in range(NUM_HEADS)}
            own = SparseIndex.allocate(layer.rows, NUM_HEADS, 64, layouts)
            select((HeadGroup(tuple(range(NUM_HEADS)), group.method),), layer, own)
            every = layer.empty_out()
            attend(layer.q, layer.cache, own, every, layer.scale)
            alone[:, list(group.heads)] = every[:, list(group.heads)]
        assert torch.equal(out.nan_to_num(7), alone.nan_to_num(7))
    assert len(indices) <= 2
