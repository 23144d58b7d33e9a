# SPDX-License-Identifier: Apache-2.0
"""An arena for all layers of a worker: its size, when it is allocated and by which part, and rows that do not all
fit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.arena_workers import WORKERS, Worker, count_cut_differently, count_misses
from tests.helpers.offline_compiler import without_launches
from tests.helpers.vllm_objects import CPU, make_builder, make_common, make_config, make_layers, make_model, make_step
from vllm_sparse_backend.config.crossover_table import Thresholds
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import arena as arenas
from vllm_sparse_backend.serving.worker.arena import (
    Arena,
    ArenaSize,
    LayerNeed,
    Memory,
    Room,
    SparseRow,
    kernel_rows,
    largest_steps,
)
from vllm_sparse_backend.serving.worker.metadata_builder import SparsePrefillMetadataBuilder
from vllm_sparse_backend.serving.worker.step import Slab
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash

MIN_TOKENS = 100
SHAPE = ModelShape("LlamaForCausalLM", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64)
LINES = {"vertical_tokens": 40, "slash_tokens": 104}
LONGEST = 40_000
LENGTHS = st.tuples(st.integers(0, LONGEST - 3000), st.integers(1, 3000))


def needs(method: str = "vertical_slash", **params: Any) -> list[LayerNeed]:
    plan = Plan.build(SparsePrefillConfig(method=method, params=params), SHAPE)
    return [LayerNeed.of(layer, SHAPE.num_kv_heads, SHAPE.head_dim, 2, CPU) for layer in plan.layers if layer]


def in_turn(lengths: list[tuple[int, int]]) -> list[SparseRow]:
    """Return rows of (context_len, query_len) with an unused token between them."""
    rows: list[SparseRow] = []
    for context_len, query_len in lengths:
        token = rows[-1].token + rows[-1].query_len + 1 if rows else 0
        rows.append(SparseRow(len(rows), token, query_len, context_len))
    return rows


def dealt(room: Room, rows: list[SparseRow]) -> list[list[SparseRow]]:
    """Return the rows of each slab as they were cut, identified by the block table."""
    slabs = room.slabs(rows, torch.arange(len(rows), dtype=torch.int32)[:, None])
    parts = [
        (slab.rows.block_table[:, 0].tolist(), slab.rows.query_starts, slab.rows.query_lens, slab.rows.context_lens)
        for slab in slabs
    ]
    return [[SparseRow(*fields) for fields in zip(*part, strict=True)] for part in parts]


def small_room(times: float) -> Room:
    """Return room for a multiple of the memory that a tile of the longest row needs."""
    one_tile = Room(needs(), 0).needed(kernel_rows([SparseRow(0, 0, 128, LONGEST - 128)]))
    return Room(needs(), int(one_tile * times))


class TestSlabs:
    @given(lengths=st.lists(LENGTHS, min_size=1, max_size=6), times=st.sampled_from([1.0, 1.1, 1.5, 4.0]))
    @settings(max_examples=60)
    def test_every_token_runs_once_and_every_slab_fits(self, lengths: list[tuple[int, int]], times: float) -> None:
        """The cut of a row does not depend on other rows: a row that fits alone is not cut in a batch that does not
        fit."""
        room, rows = small_room(times), in_turn(lengths)
        assert all(room.fits(row) for row in rows)
        slabs = dealt(room, rows)
        for slab in slabs:
            assert room.needed(kernel_rows(slab)) <= room.num_bytes
            assert len({row.number for row in slab}) == len(slab)
        for row in rows:
            chunks = [chunk for slab in slabs for chunk in slab if chunk.number == row.number]
            alone = dealt(room, [SparseRow(0, row.token, row.query_len, row.context_len)])
            assert [chunk.query_len for chunk in chunks] == [chunk.query_len for slab in alone for chunk in slab]
            assert chunks[0].token == row.token
            assert sum(chunk.query_len for chunk in chunks) == row.query_len
            for before, after in pairwise(chunks):
                assert before.query_len % 128 == 0
                assert after.token == before.token + before.query_len
            assert all(chunk.context_len - chunk.token == row.context_len - row.token for chunk in chunks)

    def test_heads_that_differ_need_room_for_the_one_that_keeps_most(self) -> None:
        slab = kernel_rows(in_turn([(5000, 500)]))
        plans = [layer_plan(list(map(VerticalSlash, sizes))) for sizes in ((40, 4000, 7), (4000, 4000, 4000))]
        of_different, of_most = (Room([LayerNeed.of(plan, 1, 64, 2, CPU)], 0).needed(slab) for plan in plans)
        assert of_different == of_most


class TestEveryStep:
    """Random steps of many workers."""

    def test_no_step_takes_more_than_the_arena(self) -> None:
        assert count_misses(200, seed=1) == 0

    @pytest.mark.full
    @pytest.mark.parametrize("method", ["sale", "vertical_slash", "anchor_attention", "flex_vertical_slash"])
    def test_nor_with_other_methods(self, method: str) -> None:
        assert count_misses(100, method, seed=2) == 0

    def test_a_step_that_does_is_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows run unchecked in a smaller arena."""
        worker = Worker((10, 2, 128), 8192, share=0.5)
        monkeypatch.setattr(Room, "slabs", lambda self, rows, table: (Slab(kernel_rows(rows, table)),))
        with without_launches():
            worker.run([SparseRow(0, 0, 8192, 100_000)])
        assert worker.num_misses > 0

    def test_no_row_is_cut_otherwise_than_alone(self) -> None:
        assert count_cut_differently(300, seed=1) == 0

    @pytest.mark.parametrize("heads", [(8, 1, 128), (5, 1, 128), (10, 2, 128)])
    def test_nor_where_a_shorter_row_once_took_more_than_the_longest(self, heads: tuple[int, int, int]) -> None:
        worker = Worker(heads, 8192)
        for query_len in range(128, 8193, 640):
            row, other = SparseRow(0, 0, query_len, 126_464 - query_len), SparseRow(1, query_len, 700, 20_000)
            assert worker.cuts([row, other])[0] == worker.cuts([row])[0]
            assert len(worker.room.chunks(row)) == 1  # the arena is large enough for any

    @pytest.mark.parametrize("method", [*METHODS])
    @settings(max_examples=40)
    @given(lengths=st.tuples(st.integers(1, 4096), st.integers(0, 65_536)), heads=st.sampled_from(WORKERS))
    def test_a_row_of_any_length_fits(self, method: str, lengths: tuple[int, int], heads: tuple[int, int, int]) -> None:
        """A row fits alone and uncut, because the arena is sized for the row that needs most."""
        params = {"cluster": 0} if method == "share_prefill" else {}
        shape = ModelShape("LlamaForCausalLM", 1, *heads)
        (layer,) = Plan.build(SparsePrefillConfig(method=method, params=params), shape).layers
        assert layer is not None
        need, limits = LayerNeed.of(layer, shape.num_kv_heads, shape.head_dim, 2, CPU), (4096, 1, 65_536)
        size = ArenaSize.of([need], *limits, Thresholds(0, 1))
        assert size is not None
        query_len, context_len = lengths[0], min(lengths[1], 65_536 - lengths[0])
        assert Room([need], size.num_bytes).chunks(SparseRow(0, 0, query_len, context_len)) == [
            SparseRow(0, 0, query_len, context_len)
        ]


class TestSize:
    def test_steps_of_rows_as_long_as_can_be(self) -> None:
        steps = list(largest_steps(8192, 256, 131_072, Thresholds(16_384, 1024)))
        assert [len(step) for step in steps] == [1, 2, 4, 8]
        assert all(row.context_len + row.query_len == 131_072 for step in steps for row in step)
        assert all(sum(row.query_len for row in step) == 8192 for step in steps)
        few = largest_steps(1000, 3, 131_072, Thresholds(0, 1))  # in whole tiles
        assert [[row.query_len for row in step] for step in few] == [[1000], [512] * 2, [384] * 3]
        for limits in ((16_384, Thresholds(16_384, 1)), (131_072, Thresholds(None, 1))):  # nothing ever runs sparse
            assert list(largest_steps(8192, 256, *limits)) == []
        ((row,), *_) = largest_steps(8192, 256, 17_000, Thresholds(16_384, 1024))
        assert row.query_len == 616  # no further positions are sparse

    def test_it_is_no_larger_than_its_share_of_the_device(
        self, configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compat, "device_memory_bytes", lambda: 1 << 20)
        config = configured(method="vertical_slash", params=LINES, min_tokens=MIN_TOKENS)
        (layer,) = make_layers(config, [0])
        assert len(layer.impl.shared_worker(config, CPU).reserve_memory().arena.buffer) == 1 << 16


class TestReservation:
    def test_vllms_profile_run_allocates_it_and_all_layers_share_it(self, configured: Callable[..., Any]) -> None:
        """There is no builder yet, and the run is in inference mode. Steps may also run outside of it."""
        config = configured(method="dense", min_tokens=MIN_TOKENS)
        layers = make_layers(config, [0, 1, 2])
        query = torch.zeros(5, 4, 32)
        with torch.inference_mode():
            for layer in layers:
                layer.impl.forward(layer, query, None, None, torch.empty(0), None, torch.empty(5, 4, 32))
        memory = layers[0].impl.shared_worker(config, CPU).memory
        assert memory is not None
        assert not memory.arena.buffer.is_inference()
        assert all(layer.impl.worker.memory is memory for layer in layers)
        assert make_builder(config, layers).room is memory.room

    @pytest.mark.parametrize(
        ("settings", "options"), [({"dense_layers": [9]}, {}), ({}, {"per_layer_sliding_window": 64})]
    )
    def test_who_reserves_nothing(self, configured: Callable[..., Any], settings: Any, options: Any) -> None:
        """Either a part knows only its own configuration, and the builder will know more; or a layer stays dense."""
        (layer,) = make_layers(configured(method="dense", **settings), [0], **options)
        layer.impl.forward(layer, torch.zeros(5, 4, 32), None, None, torch.empty(0), None, torch.empty(5, 4, 32))
        assert layer.impl.worker is None

    def test_a_part_whose_configuration_would_do_gives_the_arena_and_no_plan(
        self, configured: Callable[..., Any], tmp_path: Path
    ) -> None:
        """For example a draft model with fewer layers, if the profile run reaches it first."""
        config = configured(method="dense", min_tokens=MIN_TOKENS)
        layers = make_layers(config, [0, 1, 2, 3])
        part = make_config(make_model(tmp_path, num_hidden_layers=1), config.additional_config["sparse_prefill"])
        part.compilation_config.static_forward_context.update(config.compilation_config.static_forward_context)
        memory = layers[3].impl.shared_worker(part, CPU).reserve_memory()
        builders = [make_builder(config, layers[:2]), make_builder(config, layers[2:])]
        assert [builder.sparse_layers for builder in builders] == [(0, 1), (2, 3)]
        assert builders[0].room is builders[1].room is memory.room
        workers = [layer.impl.worker for layer in layers]
        assert all(worker is workers[0] and worker.memory is memory for worker in workers)


def use_room(builder: SparsePrefillMetadataBuilder, room: Room) -> None:
    """Make a builder's rows use another arena."""
    builder.room = room
    builder.row_classifier = replace(builder.row_classifier, room=room)


class TestForward:
    LENGTHS = ((333, 150), (40, 1), (1, 200), (100, 400), (701, 40))

    def test_a_row_that_is_cut_gives_what_its_chunks_give(self, built: Callable[..., Any]) -> None:
        """Tiles of an A-shape are independent, so chunks of whole tiles select the same keys as the row."""
        params = {"sink_tokens": 64, "local_tokens": 128}
        (layer,), builder = built(0, method="a_shape", params=params, check_index=True)
        step, room = make_step(layer, self.LENGTHS), builder.room
        num_bytes = room.needed(kernel_rows([SparseRow(0, 0, 128, 8000)]))
        outputs = []
        for memory in (
            layer.impl.worker.memory,
            Memory(Arena(CPU, torch.empty(num_bytes, dtype=torch.uint8)), Room(room.layers, num_bytes)),
        ):
            layer.impl.worker.memory = memory
            use_room(builder, memory.room)
            metadata = builder.build(0, step.common)
            outputs.append(step.forward(layer, metadata))
            assert memory.arena.overflows == memory.arena.used_bytes == 0
            assert memory.arena.peak_bytes <= len(memory.arena.buffer)
        assert len(metadata.sparse.slabs) > 1
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)

    def test_a_row_without_room_is_dense_and_counted(self, built: Callable[..., Any]) -> None:
        (layer,), builder = built(0)
        needed = builder.room.needed(kernel_rows([SparseRow(0, 0, 1, 2000)]))
        use_room(builder, Room(builder.room.layers, needed))
        common = make_common([(1000, 300), (5000, 300)])
        rows = builder.row_classifier.classify(common, 0, max_decode_tokens=1)
        assert [row.kind.reason for row in rows] == [None, Fallback.NO_ROOM]
        recorder = layer.impl.worker.recorder
        assert recorder._counts == {}
        builder.build(0, common)
        assert recorder._counts["rows", ("dense", "no_room", "on")] == 1


def test_what_does_not_fit_comes_from_torch_and_is_counted_and_said_once(lines: list[str]) -> None:
    arena = Arena(CPU, torch.empty(1024, dtype=torch.uint8))
    with arena.frame():
        inside = arena.empty(200, dtype=torch.int32)
        for _ in range(2):
            outside = arena.empty(300, dtype=torch.int32)
            outside.fill_(1)
        inside.fill_(2)
        assert bool((outside == 1).all())
        assert bool((inside == 2).all())
    assert (arena.overflows, arena.used_bytes) == (2, 0)
    assert len(lines) == 1
    assert "did not fit into the arena" in lines[0]
    assert arenas.DEVICE_SHARE < 0.1
