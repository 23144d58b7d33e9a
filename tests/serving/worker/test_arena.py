# SPDX-License-Identifier: Apache-2.0
"""An arena for all layers of a worker: its size, when it is allocated and by which part, and rows that do not all
fit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from benchmarks.arena import UNLIMITED, layer_memory
from benchmarks.attention_prompts import Heads
from tests.helpers.arena_workers import MAX_LEN, WORKERS, ArenaSize, slabs_of
from tests.helpers.vllm_objects import CPU, make_builder, make_layers, make_step
from vllm_sparse_backend.config.crossover_table import NEVER, Lengths
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import arena as arenas
from vllm_sparse_backend.serving.worker.arena import (
    Arena,
    Extent,
    LayerMemory,
    Room,
    SparseRow,
    StepLimits,
    consecutive_rows,
)
from vllm_sparse_backend.serving.worker.layers import reserve_memory
from vllm_sparse_backend.serving.worker.owner import worker_of
from vllm_sparse_kernels.layer import Layer, layer_plan
from vllm_sparse_kernels.memory import META
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

MIN_TOKENS = 100
LINES = {"vertical_tokens": 40, "slash_tokens": 104}
LONGEST = 40_000
LENGTHS = st.tuples(st.integers(0, LONGEST - 3000), st.integers(1, 3000))
CONTEXTS = st.integers(0, MAX_LEN - 4096)


class TestSlabs:
    """Every token runs once, and a row is cut the same way in every batch."""

    @given(lengths=st.lists(LENGTHS, min_size=1, max_size=6), max_tokens=st.sampled_from([128, 512, 1280, 3072]))
    @settings(max_examples=60)
    def test_rows_are_cut_alike_in_any_batch(self, lengths: list[tuple[int, int]], max_tokens: int) -> None:
        room, rows = Room(max_tokens, (Extent(num_tiles=30, num_keys=LONGEST),)), consecutive_rows(lengths)
        slabs = slabs_of(room, rows)
        for slab in slabs:
            assert sum(row.query_len for row in slab) <= max_tokens
            assert len({row.number for row in slab}) == len(slab)
            assert len(slab) == 1 or sum(row.query_len + row.context_len for row in slab) <= LONGEST
        for row in rows:
            chunks = [chunk for slab in slabs for chunk in slab if chunk.number == row.number]
            alone = slabs_of(room, [replace(row, number=0)])
            assert [chunk.query_len for chunk in chunks] == [chunk.query_len for slab in alone for chunk in slab]
            assert chunks[0].token == row.token
            assert sum(chunk.query_len for chunk in chunks) == row.query_len
            for before, after in pairwise(chunks):
                assert before.query_len % 128 == 0
                assert after.token == before.token + before.query_len
            assert all(chunk.context_len - chunk.token == row.context_len - row.token for chunk in chunks)


class TestSize:
    @pytest.mark.parametrize("method", [*METHODS])
    @settings(max_examples=20)
    @given(
        lengths=st.one_of(
            st.lists(st.tuples(CONTEXTS, st.integers(1, 4096)), min_size=1, max_size=1),
            st.lists(st.tuples(CONTEXTS, st.integers(1, 1024)), min_size=2, max_size=4),
        ),
        heads=st.sampled_from(WORKERS),
    )
    def test_steps_of_any_rows_fit(
        self, method: str, lengths: list[tuple[int, int]], heads: tuple[int, int, int]
    ) -> None:
        params = {"cluster": 0} if method == "share_prefill" else {}
        memory = layer_memory(method, Heads(*heads), params)
        num_bytes, room = memory.arena(StepLimits(4096, max_rows=4, max_len=MAX_LEN, min_len=1), UNLIMITED)
        for slab in slabs_of(room, consecutive_rows(lengths)):
            assert memory.needed(slab) <= num_bytes

    @pytest.mark.parametrize("method", ["top_p", "vertical_slash", "sale"])
    def test_the_largest_slabs_of_several_rows_fit(self, method: str) -> None:
        memory, limits = layer_memory(method, Heads(*WORKERS[0]), {}), StepLimits(4096, 4, MAX_LEN, 1)
        num_bytes, room = memory.arena(limits, UNLIMITED)
        assert room.limits
        assert all(memory.most(limits, slab) <= num_bytes for slab in room.limits)

    def test_heads_that_differ_need_memory_for_the_one_that_keeps_most(self) -> None:
        needed = []
        for sizes in ((40, 40, 40), (40, 4000, 7), (4000, 4000, 4000)):
            layer = Layer.of(layer_plan(list(map(VerticalSlash, sizes))), 64, META)
            needed.append(LayerMemory([layer], 1, 64, torch.float16).needed([SparseRow(0, 0, 500, 5000)]))
        assert needed[0] < needed[1] <= needed[2]

    def test_rows_whose_keys_exceed_32_bits_run_in_several_slabs(self) -> None:
        memory = LayerMemory([Layer.of(layer_plan([SpargeAttn()]), 64, META)], 1, 64, torch.float16)
        _, room = memory.arena(StepLimits(1 << 15, 256, 10 << 20, 1), 1 << 40)
        assert all(limit.num_keys < 2**31 for limit in room.limits)

    @pytest.mark.parametrize("method", ["default", "a_shape"])
    def test_a_small_device_cuts_rows(self, method: str) -> None:
        whole = ArenaSize.of((32, 8, 128), 8192, method)
        small = ArenaSize.of((32, 8, 128), 8192, method, max_bytes=int(whole.num_bytes * 0.8))
        assert small.num_bytes <= 0.8 * whole.num_bytes
        assert small.room.max_tokens < whole.room.max_tokens == 8192
        assert small.count_misses([SparseRow(0, 0, 8192, 100_000)]) == 0
        one_tile = ArenaSize.of((32, 8, 128), 8192, method, max_bytes=1)
        assert one_tile.room.max_tokens == 128
        assert one_tile.count_misses([SparseRow(0, 0, 8192, 100_000)]) == 0

    def test_no_row_runs_sparse(self) -> None:
        for max_len, lengths in ((16_384, Lengths(16_384, 1)), (131_072, NEVER)):
            assert StepLimits.of(8192, 256, max_len, lengths) is None

    def test_it_is_no_larger_than_its_share_of_the_device(
        self, configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = []
        for device_bytes in (1 << 40, 1 << 18):
            monkeypatch.setattr(compat, "device_memory_bytes", lambda: device_bytes)  # noqa: B023
            config = configured(method="vertical_slash", params=LINES, min_tokens=MIN_TOKENS)
            sizes.append(len(worker_of(config).reserve_memory().arena.buffer))
        assert sizes[1] <= 1 << 14 < sizes[0]


class TestReservation:
    def test_vllms_profile_run_allocates_it_and_all_layers_share_it(
        self, configured: Callable[..., Any], lines: list[str]
    ) -> None:
        """There is no builder yet, and the run is in inference mode. Steps may also run outside of it."""
        config = configured(method="dense", min_tokens=MIN_TOKENS)
        worker, layers = worker_of(config), make_layers(config, [0, 1, 2])
        with torch.inference_mode():
            reserve_memory(worker)
        memory = worker.memory
        assert memory is not None
        assert not memory.arena.buffer.is_inference()
        assert lines[-1] == (
            f"sparse-prefill: reserved an arena of {len(memory.arena.buffer) >> 20} MiB for temporary tensors of "
            f"selection and attention, of {memory.room.max_tokens} new tokens at a time"
        )
        make_builder(config, layers)
        assert worker.memory is memory
        assert all(layer.impl.worker is worker for layer in layers)

    def test_workers_without_a_sparse_layer_reserve_nothing(self, configured: Callable[..., Any]) -> None:
        config = configured(method="dense")
        make_layers(config, [0], per_layer_sliding_window=64)
        reserve_memory(worker_of(config))
        assert worker_of(config).memory is None


class TestForward:
    LENGTHS = ((333, 150), (40, 1), (1, 200), (100, 400), (701, 40))

    def test_a_row_that_is_cut_gives_what_its_chunks_give(self, built: Callable[..., Any]) -> None:
        """Tiles of an A-shape are independent, so chunks of whole tiles select the same keys as the row."""
        params = {"sink_tokens": 64, "local_tokens": 128}
        (layer,), builder = built(0, method="a_shape", params=params, check_index=True)
        step, memory = make_step(layer, self.LENGTHS), builder.worker.memory
        outputs = []
        for room in (memory.room, Room(128, ())):
            builder.worker.memory = replace(memory, room=room)
            metadata = builder.build(0, step.common)
            outputs.append(step.forward(layer, metadata))
            assert memory.arena.overflows == memory.arena.used_bytes == 0
        assert len(metadata.sparse.slabs) > 1
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


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
