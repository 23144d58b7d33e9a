# SPDX-License-Identifier: Apache-2.0
"""Levels in a worker: which request each row of a step belongs to, and each row at its request's level."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")
import torch
from vllm.sampling_params import SamplingParams

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.crossover_cases import entry, written
from tests.helpers.folders import profile_file
from tests.helpers.mixed_batches import CLOSE, MIN_TOKENS, MIXED, SPARSE_ROWS, dense_tokens, reference
from tests.helpers.vllm_objects import make_builder, make_layers, make_step, recorder_of
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel, with_level
from vllm_sparse_backend.serving import compat, hooks
from vllm_sparse_backend.serving.worker import layers as worker_layers
from vllm_sparse_backend.serving.worker.owner import LayerLevel
from vllm_sparse_backend.serving.worker.rows import Requests, Step
from vllm_sparse_kernels.attention import PORTABLE

EXACT, FAST = RequestLevel("exact"), RequestLevel("fast")
LEVELS: dict[str, Any] = {
    "level": "high",
    "dense_layers": [0, 1],
    "default": {"method": "a_shape", "sink_tokens": 16, "local_tokens": 16},
    "levels": {"fast": {"dense_layers": [0, 3], "default": {"method": "block_sparse", "top_blocks": 1}}},
}


def scheduled(order: str, new: Mapping[str, RequestLevel] | None = None, finished: Sequence[str] = ()) -> Any:
    """Return a scheduler's output for a step of requests, some of which are new to the worker."""
    levels = new or {}
    params = {req_id: SamplingParams(extra_args=with_level(None, level)) for req_id, level in levels.items()}
    news = [
        SimpleNamespace(req_id=req_id, sampling_params=sampling_params) for req_id, sampling_params in params.items()
    ]
    tokens = dict.fromkeys(order, 1)
    return SimpleNamespace(scheduled_new_reqs=news, finished_req_ids={*finished}, num_scheduled_tokens=tokens)


class Runner:
    """What the hooks use of vLLM's runner. A step returns the level of each row."""

    def __init__(self, is_newer: bool) -> None:
        if not is_newer:
            self.input_batch = SimpleNamespace(req_ids=[])

    def execute_model(self, scheduler_output: Any, num_rows: int, dummy_run: bool = False) -> list[str] | None:
        order = list(scheduler_output.num_scheduled_tokens)
        if hasattr(self, "input_batch"):
            self.input_batch.req_ids = order
        elif not dummy_run:
            self.prepare_attn(SimpleNamespace(req_ids=order))
        levels = self.requests.levels_of_rows(num_rows)
        return None if levels is None else [level.name for level in levels]

    def prepare_attn(self, input_batch: Any) -> None:
        pass


def tracked(is_newer: bool) -> Any:
    """Return a runner with the hooks of our engine."""
    runner, worker = Runner(is_newer), SimpleNamespace(requests=Requests())
    runner.requests = worker.requests
    hooks.wrap_method(runner, "execute_model", hooks.track_requests, runner, worker)
    if is_newer:
        hooks.wrap_method(runner, "prepare_attn", hooks.name_rows, worker)
    return runner


class TestRunners:
    """Rows are identified by the runner's batch, or by the arguments of ``prepare_attn``."""

    @pytest.fixture(params=[False, True], ids=["older", "newer"])
    def runner(self, request: pytest.FixtureRequest) -> Any:
        return tracked(request.param)

    def test_rows_are_known_by_their_requests_whatever_their_order(self, runner: Any) -> None:
        levels = {"a": EXACT, "b": SERVER_LEVEL, "c": FAST}
        assert runner.execute_model(scheduled("bca", levels), 4) == [ON, "fast", "exact", ON]
        assert runner.execute_model(scheduled("ac"), 2) == ["exact", "fast"]
        assert runner.execute_model(scheduled("dcb", {"d": EXACT}, finished="a"), 3) == ["exact", "fast", ON]

    def test_a_name_that_comes_again_is_another_request(self, runner: Any) -> None:
        """After an abort, in the same step that reports it, or when a preempted request is sent to the worker again."""
        assert runner.execute_model(scheduled("a", {"a": EXACT}), 1) == ["exact"]
        assert runner.execute_model(scheduled("a", {"a": FAST}, finished="a"), 1) == ["fast"]
        assert runner.execute_model(scheduled("a", {"a": FAST}), 1) == ["fast"]
        assert runner.execute_model(scheduled("a", {"a": SERVER_LEVEL}), 1) == [ON]

    def test_of_a_batch_that_has_not_all_rows_of_its_step_nothing_is_known(self, runner: Any) -> None:
        assert runner.execute_model(scheduled("ab"), 1) == [ON]
        assert runner.execute_model(scheduled("ab", {"a": EXACT}), 1) is None

    def test_a_dummy_batch_has_nobodys_rows(self, runner: Any) -> None:
        runner.execute_model(scheduled("a", {"a": EXACT}), 1)
        assert runner.requests.levels_of_rows(4) == [SERVER_LEVEL] * 4  # between steps
        if not hasattr(runner, "input_batch"):
            assert runner.execute_model(scheduled("a"), 4, dummy_run=True) == [ON] * 4


class TestRows:
    @pytest.fixture
    def layers(self, configured: Callable[..., Any], tmp_path: Any) -> Any:
        """Return layers that are dense at neither, one or both of two levels, and their builder."""
        profile = profile_file(tmp_path, **LEVELS)
        levels = configured(profile=profile, min_tokens=MIN_TOKENS, min_query_tokens=1, check_index=True)
        made = make_layers(levels, range(4))
        return made, make_builder(levels, made)

    def test_each_row_of_a_step_runs_at_its_own_level(self, layers: Any, at_step: Any) -> None:
        """Exact rows equal vLLM's to the bit; other rows equal the references of their level, including dense
        layers."""
        made, builder = layers
        rows = {0: "fast", 3: "exact", 4: "fast", 6: ON}
        assert set(rows) == set(SPARSE_ROWS)
        at_step([rows.get(i, "exact") for i in range(len(MIXED))])
        sparse_at = {ON: (2, 3), "fast": (1, 2)}
        step = make_step(made[0], MIXED)
        metadata = builder.build(0, step.common)
        assert {slab.level.name for slab in metadata.sparse.slabs} == {"fast", ON}
        for number, layer in enumerate(made):
            dense, out = step.by_dense_backend(layer, builder), step.forward(layer, metadata)
            for row in range(len(MIXED)):
                tokens, level = step.tokens(row), rows.get(row, "exact")
                if level == "exact" or (number == 0):
                    assert torch.equal(out[tokens], dense[tokens]), (number, row)
                    continue
                methods = layer.impl.levels[level].layer.plan.methods
                expected, _ = reference(step, row, methods, layer.impl.scale)
                cut = dense_tokens(step, row)
                torch.testing.assert_close(out[tokens][cut:], expected, **CLOSE)
                is_dense = torch.allclose(expected, dense[tokens][cut:], atol=1e-5)
                assert is_dense == (number not in sparse_at[level]), (number, row)
        assert builder.worker.memory.arena.overflows == 0  # it has room for every level

    def test_rows_that_are_not_told_run_dense_and_are_counted(
        self, layers: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        """If a release builds metadata without naming rows, all rows are exact, and no engine ends."""
        made, builder = layers
        monkeypatch.setattr(Requests, "step", Step({"0": EXACT}, {"0": 1}))
        step = make_step(made[0], MIXED)
        for _ in range(2):
            metadata = builder.build(0, step.common)
            assert getattr(metadata, "sparse", None) is None
            for layer in made:
                assert torch.equal(step.forward(layer, metadata), step.by_dense_backend(layer, builder))
        samples = recorder_of(builder).samples().items()
        counted = {labels[:2]: n for (name, labels), n in samples if name == "rows"}
        assert counted["dense", Fallback.UNNAMED] >= 2 * len(SPARSE_ROWS)
        assert ("sparse", "") not in counted
        assert len([line for line in lines if Fallback.UNNAMED.explain in line]) == 1

    def test_each_row_keeps_the_share_that_its_request_gives(
        self, built: Callable[..., Any], at_step: Any, tmp_path: Any
    ) -> None:
        """Rows equal those of a server with that p, to the bit, in the same arena; heads of other methods do not
        change."""

        def made(share: float) -> Any:
            by_mass = {
                "method": "top_p",
                "kept_mass": share,
                "ramp_tokens": 1,
                "most_tokens": None,
                "sink_tokens": 0,
                "local_tokens": 128,
                "peak_share": 0.2,
            }
            heads = {0: by_mass, 1: by_mass | {"kept_mass": share if share < 0.9 else 1.0}}
            path = profile_file(tmp_path, default={"method": "a_shape"}, layers={0: {"heads": heads}})
            (layer,), builder = built(0, profile=path, min_tokens=MIN_TOKENS)
            return layer, builder

        step, alone = make_step(made(0.9)[0], MIXED), {}
        for share in (0.1, 0.5, 0.9):
            layer, builder = made(share)
            alone[share] = step.forward(layer, builder.build(0, step.common))
        share_of_row = {0: 0.1, 4: 0.5, 6: 0.5}
        at_step([RequestLevel("p", share_of_row[row]) if row in share_of_row else ON for row in range(len(MIXED))])
        together = step.forward(layer, builder.build(0, step.common))
        for row in SPARSE_ROWS:
            tokens = step.tokens(row)
            assert torch.equal(together[tokens], alone[share_of_row.get(row, 0.9)][tokens])
            if row in (0, 6):  # the others are too short to leave much out
                assert not torch.equal(together[tokens], alone[0.9][tokens])
        assert layer.impl.worker.memory.arena.overflows == 0

    def test_each_level_is_sparse_from_where_its_own_engine_pays(
        self, configured: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a server with only this level: another level's engine and its measurements have no effect."""
        shape = {"device": compat.device_name(), "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        measured = {"portable": {"a_shape": 100, "block_sparse": 700}, "flash": {"a_shape": 900, "block_sparse": 300}}
        entries = [
            entry(tokens, tokens // 10, engine=engine, method=method, **shape)
            for engine, methods in measured.items()
            for method, tokens in methods.items()
        ]
        (table := tmp_path / "crossover.json").write_text(written(*entries))
        config = configured(profile=profile_file(tmp_path, **LEVELS), crossover=str(table))

        def on_engine(level: LayerLevel) -> LayerLevel:
            is_block_sparse = type(level.layer.plan.groups[0].method).__name__ == "BlockSparse"
            engine = replace(PORTABLE, name="flash" if is_block_sparse else "portable")
            return replace(level, layer=replace(level.layer, engine=engine))

        def make_ready(worker: Any, impls: Any, *others: Any) -> None:
            for impl in impls:
                impl.levels = {name: on_engine(level) for name, level in impl.levels.items()}

        monkeypatch.setattr(worker_layers, "_make_ready", make_ready)
        by_level = make_builder(config, make_layers(config, [1, 2, 3])[1:2]).sparse_group.row_classifier.lengths
        numbers = {level: (lengths.min_tokens, lengths.min_query_tokens) for level, lengths in by_level.items()}
        assert numbers == {ON: (100, 10), "fast": (300, 30)}
