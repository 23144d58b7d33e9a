# SPDX-License-Identifier: Apache-2.0
"""The online guard: it detects errors of sparse attention, acts on them after a delay, reverts, and never waits.

A-shape with tiny windows loses much on a long row, and nothing on a row that ends in its second block.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.platforms import current_platform

from tests.helpers.folders import profile_file
from tests.helpers.vllm_objects import make_builder, make_common, make_layers, make_step, recorder_of
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.config.profile import SHARE
from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.config.settings import GuardConfig, load_config
from vllm_sparse_backend.serving.worker.arena import SparseRow, kernel_rows
from vllm_sparse_backend.serving.worker.counters import HostCopy, Recorder
from vllm_sparse_backend.serving.worker.guard import MOST_DOUBLINGS, RECOVERY_SHARE, Guard, PendingCheck, pick_queries
from vllm_sparse_backend.serving.worker.step import Slab

needs_cpu_build = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU build")

MIN_TOKENS = 120
LONG, ALL_WITHIN_REACH = ((320, 200),), ((0, 190),)
MIXED = ((333, 150), (40, 1), (0, 63), (1, 200), (100, 131), (0, 1), (701, 40), (64, 1), (31, 64))
TINY = {"method": "a_shape", "params": {"sink_tokens": 16, "local_tokens": 64}}
COMMON = {"min_tokens": MIN_TOKENS, "min_query_tokens": 1}
PLACE, LABELS = (4, "fast"), ["4", "fast"]
ONES = torch.ones(3, 2, 8)
ONE_NAN = torch.where(torch.arange(48).view(3, 2, 8) == 32, float("nan"), 1.0)


def make_guard(**settings: Any) -> Guard:
    return Guard(GuardConfig(**settings), Recorder(torch.device("cpu")))


def told(guard: Guard) -> dict[str, float]:
    """Return the guard's samples for its place, by the metric's name."""
    return {name: value for name, labels, value in guard.recorder.samples()[0] if labels == LABELS}


def judge(guard: Guard, sparse: torch.Tensor, dense: torch.Tensor) -> None:
    guard.compare(PLACE, sparse, dense)
    guard.judge_arrived()


def see(guard: Guard, *errors: float) -> None:
    """Run checks of two heads with each of these errors."""
    for error in errors:
        dense = torch.ones(3, 2, 8)
        judge(guard, dense * (1 + error), dense)


class TestWhatIsChecked:
    def test_chunks_of_prompts_cannot_fall_in_step_with_it(self) -> None:
        """Layers do not synchronise either: each layer is checked at each place of a period, and no two layers always
        together."""
        guard = make_guard()
        due = [guard.layers_due(range(32), step) for step in range(2000)]
        steps = {layer: [step for step, layers in enumerate(due) if layer in layers] for layer in range(32)}
        for layer, checked in steps.items():
            places = Counter(step % 10 for step in checked)
            assert len(places) == 10, layer
            assert max(places.values()) < 45, layer
        assert sum(map(len, due)) == 32 * 200
        assert max(map(len, due)) <= 12
        assert len({tuple(checked) for checked in steps.values()}) == 32

    def test_any_queries_of_any_row(self) -> None:
        rows = [SparseRow(0, 7, 300, 50), SparseRow(1, 307, 20, 400), SparseRow(2, 400, 128, 0)]
        slabs = [Slab(kernel_rows(rows[:2])), Slab(kernel_rows(rows[2:]))]
        picked = Counter((tokens.start, tokens.stop) for tokens in (pick_queries(s, slabs) for s in range(500)))
        # If a row ends within a tile, queries of the previous tile complete it.
        assert set(picked) == {(7, 135), (135, 263), (179, 307), (307, 327), (400, 528)}
        assert min(picked.values()) > 70


class TestJudgement:
    def test_patience(self, lines: list[str]) -> None:
        guard = make_guard(bound=0.2, patience=3)
        see(guard, 0.3, 0.3, 0.1, 0.21, 0.3, 0.19, 0.3, 0.3)
        (started,) = lines
        assert "checks each layer once in 10 steps with sparse rows of a level" in started
        assert guard.held == frozenset()
        see(guard, 0.4)
        assert guard.held == {PLACE}
        _, line = lines
        assert "layer 4 runs dense from now on at level fast" in line
        assert Fallback.GUARD.explain in line
        assert "3 checks in a row, bound 0.2, errors 0.300, 0.300, 0.400" in line
        see(guard, 0.4, 0.4, 0.4, 0.4)
        assert len(lines) == 2
        lately = pytest.approx((0.21 + 0.3 + 0.19 + 0.3 + 0.3 + 5 * 0.4) / 10)
        expected = {"guard_checks": 13, "guard_trips": 1, "guard_error": lately, "guard_dense": 1}
        assert told(guard) == {**expected, "guard_peak_error": pytest.approx(0.4)}

    def test_back_with_hysteresis(self, lines: list[str]) -> None:
        guard = make_guard(bound=0.2, patience=1, recover=3)
        good, between = 0.2 * RECOVERY_SHARE * 0.99, 0.2 * 0.95
        see(guard, 0.3, good, good, between, good, good)
        assert guard.held == {PLACE}
        see(guard, good)
        assert guard.held == frozenset()
        assert "layer 4 runs sparse again at level fast" in lines[-1]
        assert told(guard)["guard_dense"] == 0
        see(guard, between, between, between)
        assert guard.held == frozenset()
        for trip in range(1, 10):  # the duration doubles each time
            see(guard, 0.3)
            needed = 3 * 2 ** min(trip, MOST_DOUBLINGS)
            see(guard, *[good] * (needed - 1))
            assert guard.held == {PLACE}
            see(guard, good)
            assert guard.held == frozenset()
        assert len(lines) == 21

    def test_errors_are_of_all_heads_together(self, lines: list[str]) -> None:
        """Heads with small outputs count for little, as in the following projection; the log names the head with the
        largest error."""
        guard = make_guard(bound=0.05, patience=1)
        dense = torch.randn(128, 3, 8) * torch.tensor([1.0, 2.0, 0.01])[:, None]
        sparse = dense + torch.randn_like(dense) * torch.tensor([0.1, 0.1, 0.01])[:, None]
        judge(guard, sparse, dense)
        expected = float((sparse - dense).norm() / dense.norm())
        assert told(guard)["guard_error"] == pytest.approx(expected, rel=1e-5)
        worst = float((sparse - dense)[:, 2].norm() / dense[:, 2].norm())
        assert f"in the last check, the error of head 2 was {worst:.2f}" in lines[1]

    @pytest.mark.parametrize("number", ["nan", "inf"])
    def test_a_peak_that_is_no_number_is_above_any_bound(self, number: str) -> None:
        guard = make_guard(patience=1, peak_bound=1e9)
        sparse = torch.ones(3, 2, 8)
        sparse[2, 0, 3] = float(number)
        judge(guard, sparse, ONES)
        assert (guard.held, told(guard)["guard_peak_error"]) == ({PLACE}, 1)

    @pytest.mark.parametrize("number", ["nan", "inf"])
    def test_what_is_no_number_is_too_much_at_once(self, number: str, lines: list[str]) -> None:
        guard = make_guard(patience=3, recover=2)
        sparse, dense = torch.ones(2, 3, 2, 8)
        sparse[1, 1, 5] = float(number)
        judge(guard, sparse, dense)
        assert (guard.held, told(guard)["guard_error"]) == ({PLACE}, 1)
        assert f"errors {number}" in lines[-1]
        assert f"the error of head 1 was {number}" in lines[-1]
        see(guard, 0, 0)
        assert guard.held == frozenset()

    @pytest.mark.parametrize(
        ("sparse", "dense", "error"),
        [
            # Values that were NaN before the layer do not count against it.
            *((sparse, ONE_NAN, None) for sparse in (ONE_NAN, ONE_NAN * float("nan"), ONES)),
            (ONES * 0, ONES * 0, 0),
            (ONES * 1e-3, ONES * 0, 1),
        ],
    )
    def test_outputs_of_zero_and_of_no_number(
        self, sparse: torch.Tensor, dense: torch.Tensor, error: float | None
    ) -> None:
        guard = make_guard(patience=1)
        judge(guard, sparse, dense)
        assert guard.held == ({PLACE} if error == 1 else frozenset())
        assert told(guard).get("guard_error") == told(guard).get("guard_peak_error") == error
        assert told(guard)["guard_checks"] == 1


class TestPeakErrors:
    """The loss of a single lookup: one query of one head gets another value than in dense attention."""

    HEADS, QUERY, HEAD = 32, 77, 5

    @classmethod
    def outputs(cls, lost: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs of heads that look up single values, except for the last half, which average over many keys.

        Args:
            lost: Number of queries that lose their lookup.
        """
        generator = torch.Generator().manual_seed(2)
        dense = torch.randn(128, cls.HEADS, 64, generator=generator)
        dense[:, cls.HEADS // 2 :] *= 0.05
        # Averages over a part of the keys differ about as much as the averages themselves.
        noise = 0.05 * torch.randn(128, cls.HEADS, 64, generator=generator)
        sparse = dense + noise
        sparse[cls.QUERY : cls.QUERY + lost, cls.HEAD] = torch.randn(lost, 64, generator=generator)
        return sparse, dense

    def test_a_lost_lookup_is_seen_in_the_peak_alone(self) -> None:
        whole, lost = make_guard(), make_guard()
        judge(whole, *self.outputs(lost=0))
        judge(lost, *self.outputs(lost=1))
        errors, peaks = ([told(guard)[name] for guard in (whole, lost)] for name in ("guard_error", "guard_peak_error"))
        assert errors[1] < 1.25 * errors[0]
        assert peaks[0] < 0.2
        assert peaks[1] > 1

    def test_the_peak_is_relative_to_the_query_or_to_all_queries(self) -> None:
        sparse, dense = self.outputs()
        guard = make_guard()
        judge(guard, sparse, dense)
        distances, norms = (sparse - dense).norm(dim=2), dense.norm(dim=2)
        expected = (distances / norms.clamp(min=float(norms.square().mean().sqrt()))).max()
        assert told(guard)["guard_peak_error"] == pytest.approx(float(expected), rel=1e-5)

    def test_a_bound_of_its_own(self, lines: list[str]) -> None:
        guard = make_guard(bound=0.3, peak_bound=0.8, patience=2, recover=2)
        lost, good = self.outputs(), self.outputs(lost=0)
        between = (ONES * 1.7, ONES)
        assert "with an error above 0.3 or a peak error above 0.8 in 2 consecutive" in lines[0]
        for outputs in (lost, good, lost):
            judge(guard, *outputs)
            assert guard.held == frozenset()
        judge(guard, *lost)
        assert guard.held == {PLACE}
        peak = told(guard)["guard_peak_error"]
        assert f"peak bound 0.8, peak errors {peak:.3f}, {peak:.3f}" in lines[1]
        assert f"and that of a query of head {self.HEAD} was {peak:.2f}" in lines[1]
        guard.settings = guard.settings.model_copy(update={"bound": 100.0})
        for outputs in (between, good, between, good):  # a peak error of 0.7 is above 0.8 × 0.8
            judge(guard, *outputs)
            assert guard.held == {PLACE}
        judge(guard, *good)
        assert guard.held == frozenset()

    def test_without_a_bound_peaks_trip_nothing(self) -> None:
        guard = make_guard(patience=1)
        for _ in range(20):
            judge(guard, *self.outputs())
        assert guard.held == frozenset()
        assert told(guard)["guard_peak_error"] > 1

    def test_the_largest_peak_of_the_last_checks_is_exported(self) -> None:
        guard = make_guard(bound=10.0)
        see(guard, 0.1, 2.0, *[0.2] * 9)
        assert told(guard)["guard_peak_error"] == pytest.approx(2.0)
        see(guard, 0.1)
        assert told(guard)["guard_peak_error"] == pytest.approx(0.2)

    @pytest.mark.parametrize("value", [0, -1.0, "high", float("inf"), float("nan")])
    def test_bounds_that_are_refused(self, value: object) -> None:
        with pytest.raises(ConfigurationError, match="peak_bound"):
            load_config({"sparse_prefill": {"guard": {"peak_bound": value}}})


class TestNothingWaits:
    def test_what_has_not_arrived_is_left_alone(self) -> None:
        guard = make_guard()
        guard._checks += [PendingCheck(PLACE, HostCopy(torch.ones(3, 4))) for _ in range(3)]
        guard._checks[1].sums.arrived = lambda: False  # type: ignore[method-assign]
        guard.judge_arrived()
        assert told(guard)["guard_checks"] == 1
        guard._checks[0].sums.arrived = lambda: True  # type: ignore[method-assign]
        guard.judge_arrived()
        assert told(guard)["guard_checks"] == 3

    @needs_cpu_build
    def test_queries_are_cut_out_of_a_batch_by_lengths_of_the_host(self, built: Callable[..., Any]) -> None:
        _, builder = built(0, **TINY, **COMMON, guard={})
        common = make_common(MIXED)
        on_device = {
            name: getattr(common, name).to("meta")
            for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        }
        start = 150 + 1 + 63
        part = builder._part_of_batch(make_common(MIXED, **on_device), slice(3, 4), slice(start + 30, start + 158))
        assert part.query_start_loc_cpu.tolist() == [0, 128]
        assert (part.num_actual_tokens, part.max_query_len, part.max_seq_len) == (128, 128, 159)
        assert part.seq_lens_cpu_upper_bound.tolist() == [159]

    @pytest.mark.gpu
    def test_on_a_gpu_torch_sees_no_wait(self) -> None:
        guard = make_guard()
        sparse, dense = torch.randn(2, 128, 32, 128, dtype=torch.bfloat16, device="cuda")
        judge(guard, sparse, dense)  # the first allocation may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for layer in range(50):
                guard.compare((layer, "fast"), sparse, dense)
                guard.judge_arrived()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        guard.judge_arrived()
        expected = float((sparse.double() - dense.double()).norm() / dense.double().norm())
        errors = [value for name, _, value in guard.recorder.samples()[0] if name == "guard_error"]
        assert errors == [pytest.approx(expected, rel=1e-3)] * 50


@needs_cpu_build
class TestForward:
    def test_off_unless_given(self, configured: Callable[..., Any]) -> None:
        assert load_config({}).guard is None
        config = configured(**TINY, **COMMON)
        layers = make_layers(config, [0])
        step = make_builder(config, layers).build(0, make_step(layers[0], LONG).common).sparse
        assert (step.probes, step.held, layers[0].impl.worker.guard) == ((), frozenset(), None)

    @pytest.mark.parametrize(
        "settings", [TINY, {"method": "share_prefill", "params": {"gamma": 0.5, "cluster": 0, "max_distance": 2.0}}]
    )
    def test_outputs_are_what_they_are_without_it(self, built: Callable[..., Any], settings: dict[str, Any]) -> None:
        """Outputs are equal to the bit while nothing trips."""
        outputs = []
        for guard in ({}, {"guard": {"rate": 1.0, "bound": 100.0}}):
            layers, builder = built(0, 1, **settings, **COMMON, **guard)
            step = make_step(layers[0], MIXED)
            metadata = builder.build(0, step.common)
            assert bool(metadata.sparse.probes) == bool(guard)
            outputs.append([step.forward(layer, metadata) for layer in layers])
        assert all(torch.equal(without, guarded) for without, guarded in zip(*outputs))

    def test_it_trips_on_rows_that_lose_and_comes_back_with_rows_that_do_not(self, built: Callable[..., Any]) -> None:
        """While a layer is dense, its sparse output is still computed, only for the check: outputs equal vLLM's."""
        (layer,), builder = built(0, **TINY, **COMMON, guard={"rate": 1.0, "patience": 2, "recover": 4})
        held = []
        for lengths in [LONG] * 3 + [ALL_WITHIN_REACH] * 6:
            step = make_step(layer, lengths)
            metadata = builder.build(0, step.common)
            held.append((0, DEFAULT) in metadata.sparse.held)
            assert torch.equal(step.forward(layer, metadata), step.by_dense_backend(layer, builder)) == held[-1]
        assert held == [False] * 2 + [True] * 5 + [False] * 2

    def test_steps_without_sparse_rows_are_not_counted(self, built: Callable[..., Any]) -> None:
        _, builder = built(0, **TINY, **COMMON, guard={"rate": 0.5})
        for lengths in ([(300, 1)], [(0, 100)], [(0, 400)], [(5, 1)], [(0, 400)]):
            builder.build(0, make_common(lengths))
        assert builder.guard_schedule.sparse_steps == {DEFAULT: 2}

    def test_groups_of_layers_share_one(self, configured: Callable[..., Any]) -> None:
        config = configured(**TINY, **COMMON, guard={})
        layers = make_layers(config, [0, 1])
        builders = [make_builder(config, [layer]) for layer in layers]
        guards = [builder.guard_schedule.guard for builder in builders] + [layer.impl.worker.guard for layer in layers]
        assert all(guard is guards[0] for guard in guards)


@needs_cpu_build
class TestRequestsWithTheirOwnP:
    """All such requests share a level, and a single client must not make its layers dense for the others."""

    SERVER_P, STARVED, HONEST = 0.9, RequestLevel(SHARE, 1e-09), RequestLevel(SHARE, 0.95)
    BOUND = 0.25
    """More than the loss of honest rows here, and less than that of starved rows."""

    @pytest.fixture
    def served(self, configured: Callable[..., Any], tmp_path: Path, request: Any) -> Any:
        top_p = {
            "method": "top_p",
            "kept_mass": self.SERVER_P,
            "sink_tokens": 0,
            "local_tokens": 128,
            "peak_share": 1.0,
        }
        profile = profile_file(tmp_path, default=top_p)
        guard = {"rate": 1.0, "patience": 1, "bound": getattr(request, "param", self.BOUND)}
        config = configured(profile=profile, **COMMON, guard=guard)
        layers = make_layers(config, [0])
        return layers[0], make_builder(config, layers), make_step(layers[0], [(100, 700), (100, 700)])

    def run(self, served: Any, at_step: Any, levels: list[RequestLevel]) -> tuple[Any, torch.Tensor]:
        layer, builder, step = served
        at_step(levels)
        metadata = builder.build(0, step.common)
        return metadata.sparse, step.forward(layer, metadata)

    def test_a_client_that_starves_its_requests_leaves_others_sparse(self, served: Any, at_step: Any) -> None:
        layer, builder, step = served
        guard, dense = layer.impl.worker.guard, step.by_dense_backend(layer, builder)
        first, alone = self.run(served, at_step, [self.HONEST, self.HONEST])
        assert [probe.level for probe in first.probes] == ["p"]
        for levels in ([self.STARVED, self.STARVED], [self.STARVED, self.HONEST]) * 3:
            sparse, out = self.run(served, at_step, levels)
            starved = step.tokens(0)
            assert float((out - dense)[starved].norm() / dense[starved].norm()) > self.BOUND
            assert {probe.run.rows.start for probe in sparse.probes} == ({1} if self.HONEST in levels else set())
        _, out = self.run(served, at_step, [self.HONEST, self.HONEST])
        assert guard.held == frozenset()
        assert torch.equal(out, alone)
        assert not torch.equal(out, dense)

    @pytest.mark.parametrize("served", [1e-4], indirect=True)
    def test_what_honest_requests_lose_turns_a_layer_dense_for_all_of_them(self, served: Any, at_step: Any) -> None:
        layer, builder, step = served
        self.run(served, at_step, [self.HONEST, self.STARVED])
        sparse, out = self.run(served, at_step, [self.STARVED, self.HONEST])
        assert sparse.held == {(0, "p")}
        assert torch.equal(out, step.by_dense_backend(layer, builder))

    def test_the_largest_p_of_any_head_decides(self, configured: Callable[..., Any], tmp_path: Path) -> None:
        by_mass = {"method": "top_p", "local_tokens": 128}
        heads = {0: by_mass | {"kept_mass": 0.8}, 1: by_mass | {"kept_mass": 0.95}}
        profile = profile_file(tmp_path, default={"method": "a_shape"}, layers={0: {"heads": heads}})
        config = configured(profile=profile, **COMMON, guard={})
        assert make_builder(config, make_layers(config, [0])).guard_schedule.judged_share == 0.95


@needs_cpu_build
class TestLevels:
    """Two levels that each keep too little: each is checked and judged separately."""

    @pytest.fixture
    def served(self, configured: Callable[..., Any], tmp_path: Path) -> Any:
        high, fast = ({"method": "a_shape", "sink_tokens": 16, "local_tokens": local} for local in (64, 32))
        levels = {"fast": {"default": fast, "dense_layers": [1]}}
        profile = profile_file(tmp_path, level="high", default=high, levels=levels)
        config = configured(profile=profile, **COMMON, guard={"rate": 1.0, "patience": 2, "recover": 2})
        layers = make_layers(config, [0, 1])
        return layers, make_builder(config, layers), make_step(layers[0], [(0, 400), (0, 300), (50, 1), (0, 350)])

    def test_each_level_is_sampled_in_layers_that_are_sparse_at_it(self, served: Any, at_step: Any) -> None:
        _, builder, step = served
        at_step(["fast", DEFAULT, DEFAULT, "exact"])
        probes = builder.build(0, step.common).sparse.probes
        assert {probe.level: probe.layers for probe in probes} == {"fast": {0}, DEFAULT: {0, 1}}
        assert {probe.level: probe.run.rows.start for probe in probes} == {"fast": 0, DEFAULT: 1}

    def test_what_trips_at_one_level_stays_sparse_at_the_other(
        self, served: Any, at_step: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its rows equal vLLM's to the bit, the others' are unchanged, and both are still compared with vLLM's."""
        (layer, _), builder, step = served
        guard = layer.impl.worker.guard
        at_step(["fast", DEFAULT, DEFAULT, "exact"])
        sparse, dense = step.forward(layer, builder.build(0, step.common)), step.by_dense_backend(layer, builder)
        seen: list[Any] = []
        monkeypatch.setattr(guard, "compare", lambda *check: seen.append(check))
        for held in ({"fast"}, {DEFAULT}, {"fast", DEFAULT}):
            guard.held = frozenset((0, level) for level in held)
            seen.clear()
            metadata = builder.build(0, step.common)
            out = step.forward(layer, metadata)
            for row, level in enumerate(("fast", DEFAULT)):
                tokens = step.tokens(row)
                assert torch.equal(out[tokens], (dense if level in held else sparse)[tokens])
            for probe in metadata.sparse.probes:
                ((checked, exact),) = (outputs for place, *outputs in seen if place == (0, probe.level))
                assert torch.equal(checked, sparse[probe.run.tokens])
                torch.testing.assert_close(exact, dense[probe.run.tokens], rtol=0, atol=2e-6)

    def test_rows_and_pairs_of_what_is_held_count_as_dense(self, served: Any, at_step: Any) -> None:
        layers, builder, step = served
        at_step(["fast", DEFAULT, DEFAULT, "exact"])

        def counts(held: set[Any]) -> dict[Any, float]:
            def now() -> dict[Any, float]:
                samples, _ = recorder_of(builder).samples()
                return {(name, *labels): n for name, labels, n in samples if name in ("rows", "tiles", "causal_pairs")}

            before, layers[0].impl.worker.guard.held = now(), frozenset(held)
            metadata = builder.build(0, step.common)
            for layer in layers:
                step.forward(layer, metadata)
            return {key: n - before.get(key, 0) for key, n in now().items() if n > before.get(key, 0)}

        free = counts(set())
        assert free["rows", "sparse", "", "fast"] == free["rows", "sparse", "", DEFAULT] == 1
        assert free["rows", "dense", "requested", "exact"] == 1
        held = counts({(0, "fast"), (0, DEFAULT)})  # a single layer of the default level is left
        assert held["rows", "dense", "guard", "fast"] == held["rows", "sparse", "", DEFAULT] == 1
        assert {key[1:] for key in held if key[0] != "rows"} == {("1", "fast"), ("1", DEFAULT)}
        assert all(held[key] == free[key] for key in held if key[0] != "rows")
