# SPDX-License-Identifier: Apache-2.0
"""One way from plan to output: layers of one step share the memory of their indices."""

import dataclasses
from collections.abc import Sequence
from unittest.mock import Mock, call

import torch

from benchmarks.batches import random_batch
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_kernels import SparseIndex, Workspace
from vllm_sparse_kernels.layer import HeadGroup, Layer, Watch, run, stripes_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.trial import Batch

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
    """Head i has the i-th method, and so on in turn. On a CPU, whatever machine this is."""
    dealt = [methods[head % len(methods)] for head in range(NUM_HEADS)]
    groups = tuple(HeadGroup(tuple(h for h, m in enumerate(dealt) if m == method), method) for method in methods)
    return dataclasses.replace(Layer.of(groups, 64, CPU), block_tokens=64)


def fits(index: SparseIndex, buffer: torch.Tensor) -> bool:
    """Whether what an index is filled with lies in the buffer."""
    tensors = [index.block_counts, index.block_ids, index.stripe_positions]
    if index.has_stripes:  # else nothing fills their counts: they are the layout's zeros
        tensors.append(index.stripe_counts)
    begin, end = buffer.data_ptr(), buffer.data_ptr() + len(buffer)
    return all(t.numel() == 0 or begin <= t.data_ptr() <= end - t.numel() * 4 for t in tensors)


def test_layers_take_the_same_room_one_after_the_other() -> None:
    """And layers of one plan one layout, which is all that a step keeps."""
    rows = batch().rows
    layers = [layer_of(DENSE, LINES), layer_of(DENSE, MORE_LINES), layer_of(MASS), layer_of(DENSE)]
    capacities = [sum(stripes_of(g.method, rows).capacity * len(g.heads) for g in one.groups) for one in layers]
    needed = [SparseIndex.bytes_for(rows, NUM_HEADS, 64, capacity) for capacity in capacities]
    arena = Workspace(CPU, torch.empty(max(needed), dtype=torch.uint8))
    assert arena.buffer is not None
    offsets: dict[Layer, torch.Tensor] = {}
    for layer in [*layers, *layers]:
        with arena.frame():
            index = layer.index(rows, arena)
            assert fits(index, arena.buffer)
            assert offsets.setdefault(layer, index.stripe_offsets) is index.stripe_offsets
            assert not index.stripe_counts.any()
    assert arena.peak_bytes == max(needed)
    wider = dataclasses.replace(layers[0], block_tokens=128).index(rows)
    assert wider.block_ids.shape[1] < index.block_ids.shape[1]


def test_a_watch_is_told_how_far_a_run_has_come() -> None:
    watch = Mock(spec=Watch)
    one = batch([(0, 100)])
    index = run(layer_of(SHAPE), one.q, one.cache, one.rows, one.empty_out(), one.scale, watch=watch)
    assert watch.mock_calls == [call.begins(), call.selected(index), call.attended()]
