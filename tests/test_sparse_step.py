# SPDX-License-Identifier: Apache-2.0
"""Layers of one step share the memory of their indices, and that changes nothing that they select."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("vllm")

from vllm_sparse_backend.serving.step import Slab
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.plan import HeadGroup, LayerPlan
from vllm_sparse_kernels import SparseIndex, Workspace
from vllm_sparse_kernels.attend.reference import attend
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.testing.batches import Batch, random_batch

NUM_HEADS, NUM_KV_HEADS = 8, 2
CPU = torch.device("cpu")
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


def fits(index: SparseIndex, buffer: torch.Tensor) -> bool:
    """Whether what an index is filled with lies in the buffer."""
    tensors = [index.block_counts, index.block_ids, index.stripe_positions]
    if index.has_stripes:  # else nothing fills their counts: they are the layout's zeros
        tensors.append(index.stripe_counts)
    begin, end = buffer.data_ptr(), buffer.data_ptr() + len(buffer)
    return all(t.numel() == 0 or begin <= t.data_ptr() <= end - t.numel() * 4 for t in tensors)


def test_layers_take_the_same_room_one_after_the_other() -> None:
    """And layers of one plan one layout, which is all that a step keeps."""
    slab, plans = Slab(batch().rows), [plan(DENSE, LINES), plan(DENSE, MORE_LINES), plan(MASS), plan(DENSE)]
    needed = [SparseIndex.bytes_for(slab.rows, NUM_HEADS, 64, capacity(slab, groups)) for groups in plans]
    arena = Workspace(CPU, torch.empty(max(needed), dtype=torch.uint8))
    assert arena.buffer is not None
    offsets = {}
    for groups in [*plans, *plans]:
        with arena.frame():
            index = slab.index(groups, NUM_HEADS, 64, arena)
            assert fits(index, arena.buffer)
            assert offsets.setdefault(id(groups), index.stripe_offsets) is index.stripe_offsets
            assert not index.stripe_counts.any()
            if not index.has_stripes:
                assert index.stripe_counts is slab.index(groups, NUM_HEADS, 64, arena).stripe_counts
    assert arena.peak_bytes == max(needed)
    assert slab.index(plans[0], NUM_HEADS, 128, Workspace(CPU)).block_ids.shape[1] < index.block_ids.shape[1]


def capacity(slab: Slab, groups: LayerPlan) -> int:
    return sum(slab.stripes(group.method.alike).capacity * len(group.heads) for group in groups)


@pytest.mark.parametrize("lengths", [((700, 300), (0, 131)), ((0, 100),)], ids=str)
def test_nothing_of_the_layer_before_shows(lengths: list[tuple[int, int]]) -> None:
    """Through layers of unlike plans in turn, each output is that of every head alone in an index of its own."""
    plans = [plan(DENSE, LINES, ANCHORS), plan(MASS), plan(BLOCKS, WIDER, ANCHORS), plan(SHAPE, LINES, ANCHORS)]
    first = batch(lengths)
    slab = Slab(first.rows)
    arena = Workspace(CPU, torch.empty(64 << 20, dtype=torch.uint8))
    for i, groups in enumerate([*plans, *plans]):
        layer = dataclasses.replace(first, q=first.q.roll(i, 1) * (1 + i % 3))
        arena.used_bytes = 0
        assert arena.buffer is not None
        arena.buffer.fill_(0x7F)  # what the layer before left
        index = slab.index(groups, NUM_HEADS, 64, arena)
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
