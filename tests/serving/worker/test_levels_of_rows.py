# SPDX-License-Identifier: Apache-2.0
"""Levels in a worker: which request each row of a step belongs to, and each row at its request's level."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")
import numpy
import torch
from vllm.config import AttentionConfig
from vllm.sampling_params import SamplingParams

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.crossover_cases import entry, written
from tests.helpers.folders import profile_file
from tests.helpers.mixed_batches import CLOSE, MIN_TOKENS, MIXED, SPARSE_ROWS, dense_tokens, reference
from tests.helpers.vllm_objects import make_builder, make_common, make_layers, make_step, recorder_of
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel, with_level
from vllm_sparse_backend.plugin import register
from vllm_sparse_backend.serving import compat, hooks
from vllm_sparse_backend.serving.worker import step_context
from vllm_sparse_backend.serving.worker.layer_adoption import LayerAdoption
from vllm_sparse_backend.serving.worker.layer_level import LayerLevel
from vllm_sparse_kernels.attention import PORTABLE

EXACT, FAST = RequestLevel("exact"), RequestLevel("fast")
LEVELS: dict[str, Any] = {
    "level": "high",
    "dense_layers": [0, 1],
    "default": {"method": "a_shape", "sink_tokens": 16, "local_tokens": 16},
    "levels": {"fast": {"dense_layers": [0, 3], "default": {"method": "block_sparse", "top_blocks": 1}}},
}


def requests_of(runner: Any) -> step_context.RunnerRequests:
    requests = step_context.requests_of(runner)
    assert requests is not None
    return requests


def scheduled(new: dict[str, RequestLevel | None], finished: Sequence[str] = ()) -> Any:
    """Return the part of a scheduler's output that describes requests that are new to the worker."""
    params = {req_id: SamplingParams(extra_args=level and with_level(None, level)) for req_id, level in new.items()}
    news = [
        SimpleNamespace(req_id=req_id, sampling_params=sampling_params, prompt_token_ids=[7] * (100 + ord(req_id)))
        for req_id, sampling_params in params.items()
    ]
    return SimpleNamespace(scheduled_new_reqs=news, finished_req_ids={*finished})


PLACES = "dbca"
"""Requests in the order of their places in a runner's table."""


class TestRunners:
    """Rows are identified by the runner's batch, by the arguments of ``prepare_attn``, or by numbers in the
    metadata."""

    @staticmethod
    def of(kind: str) -> Any:
        class Runner:
            def __init__(self) -> None:
                register()
                self.vllm_config = SimpleNamespace(attention_config=AttentionConfig(backend="sparse-prefill"))
                vars(self)[step_context.REQUESTS] = step_context.RunnerRequests()
                if kind == "older":
                    self.input_batch = SimpleNamespace(req_ids=[])
                else:
                    self.req_states = SimpleNamespace(index_to_req_id=dict(enumerate(PLACES)))

            def execute_model(
                self, scheduler_output: Any, order: Sequence[str], num_rows: int, dummy_run: bool = False
            ) -> list[str] | None:
                common = SimpleNamespace(num_reqs=num_rows, req_idx=None)
                if kind == "numbered":
                    common.req_idx = numpy.array(range(num_rows) if dummy_run else [*map(PLACES.index, order)])
                elif kind == "older":
                    self.input_batch.req_ids = [*order]
                elif not dummy_run:
                    self.prepare_attn(SimpleNamespace(req_ids=[*order]))
                levels = requests_of(self).levels_of_rows(common)
                self.prompt_lens = requests_of(self).prompt_lens_of_rows(common)
                return None if levels is None else [level.name for level in levels]

            def prepare_attn(self, input_batch: Any) -> None:
                pass

        hooks.put_around(Runner, "execute_model", hooks._known, ("scheduler_output",))
        if kind == "newer":
            hooks.put_around(Runner, "prepare_attn", hooks._batch_told, ("input_batch",))
        runner = Runner()
        execute_model = runner.execute_model

        def step(output: Any, order: Sequence[str], num_rows: int, dummy_run: bool = False) -> Any:
            output.num_scheduled_tokens = {"dummy": 1} if dummy_run else dict.fromkeys(order, 1)
            return execute_model(output, order, num_rows, dummy_run)

        runner.execute_model = step  # type: ignore[method-assign]
        return runner

    @pytest.fixture(params=["older", "newer", "numbered"])
    def runner(self, request: pytest.FixtureRequest) -> Any:
        return self.of(request.param)

    def test_rows_are_known_by_their_requests_whatever_their_order(self, runner: Any) -> None:
        levels = {"a": EXACT, "b": None, "c": FAST}
        assert runner.execute_model(scheduled(levels), "bca", 4) == [ON, "fast", "exact", ON]
        assert runner.execute_model(scheduled({}), "ac", 2) == ["exact", "fast"]
        assert runner.execute_model(scheduled({"d": EXACT}, finished="a"), "dcb", 3) == ["exact", "fast", ON]

    def test_a_name_that_comes_again_is_another_request(self, runner: Any) -> None:
        """After an abort, in the same step that reports it, or when a preempted request is sent to the worker again."""
        assert runner.execute_model(scheduled({"a": EXACT}), "a", 1) == ["exact"]
        assert runner.execute_model(scheduled({"a": FAST}, finished="a"), "a", 1) == ["fast"]
        assert runner.execute_model(scheduled({"a": FAST}), "a", 1) == ["fast"]
        assert runner.execute_model(scheduled({"a": None}), "a", 1) == [ON]
        assert runner.execute_model(scheduled({"a": SERVER_LEVEL}), "ab", 1) == [ON]

    def test_each_row_knows_the_length_of_its_prompt(self, runner: Any) -> None:
        """Prompts of ``scheduled`` have 100 tokens plus the code of the request's name."""
        lengths = {name: 100 + ord(name) for name in "abcd"}
        runner.execute_model(scheduled(dict.fromkeys("abc")), "bca", 4)
        assert runner.prompt_lens == [lengths["b"], lengths["c"], lengths["a"], 0]
        runner.execute_model(scheduled({"d": EXACT}, finished="a"), "db", 2)
        assert runner.prompt_lens == [lengths["d"], lengths["b"]]
        assert requests_of(runner)._prompt_lens == {name: lengths[name] for name in "bcd"}
        runner.execute_model(scheduled({}), "db", 1)
        assert runner.prompt_lens is None  # not all rows of the step
        assert requests_of(runner).prompt_lens_of_rows(SimpleNamespace(num_reqs=3)) == [0] * 3

    def test_a_prompt_of_embeddings_has_a_length(self) -> None:
        request = SimpleNamespace(prompt_token_ids=None, prompt_embeds=torch.zeros(7, 4))
        assert compat.prompt_length(request) == 7
        assert compat.prompt_length(SimpleNamespace(prompt_token_ids=[1, 2])) == 2

    def test_between_steps_nothing_is_known(self, runner: Any) -> None:
        runner.execute_model(scheduled({"a": EXACT}), "a", 1)
        assert requests_of(runner).levels_of_rows(SimpleNamespace(num_reqs=3)) == [SERVER_LEVEL] * 3
        other = self.of("older")
        assert other.execute_model(scheduled({}), "a", 1) == [ON]  # nor in other runners of the process

    def test_of_a_batch_that_has_not_all_rows_of_its_step_nothing_is_known(self, runner: Any) -> None:
        assert runner.execute_model(scheduled({}), "ab", 1) == [ON]
        assert runner.execute_model(scheduled({"a": EXACT}), "ab", 1) is None
        assert requests_of(runner).step is None

    def test_nor_of_rows_that_are_not_told(self) -> None:
        """As in Model Runner V2 without the hook, with a model whose metadata does not number rows."""
        runner = self.of("newer")
        runner.prepare_attn = lambda batch: None
        assert runner.execute_model(scheduled({}), "a", 1) == [ON]
        assert runner.execute_model(scheduled({"a": EXACT}), "a", 1) is None

    def test_an_engine_of_another_backend_in_the_same_process_is_let_pass(self) -> None:
        """Its clients may put any value under our key."""
        register()
        other = SimpleNamespace(vllm_config=SimpleNamespace(attention_config=AttentionConfig()))
        execute_model = hooks._known(lambda runner, output: output)
        assert (
            execute_model(other, "an output without the fields of a step") == "an output without the fields of a step"
        )
        assert step_context.REQUESTS not in vars(other)

    def test_a_step_does_not_ask_for_the_backend_again(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every token that is generated takes such a step."""
        monkeypatch.setattr(hooks, "is_selected", None)
        assert runner.execute_model(scheduled({"a": EXACT}), "ab", 2) == ["exact", ON]

    @pytest.mark.parametrize("kind", ["newer", "numbered"])
    def test_a_dummy_batch_has_nobodys_rows(self, kind: str) -> None:
        """Its rows have the same numbers as those of requests."""
        runner = self.of(kind)
        runner.execute_model(scheduled({"a": EXACT}), "a", 1)
        assert runner.execute_model(scheduled({}), "", 4, dummy_run=True) == [ON] * 4

    @pytest.mark.parametrize("other", [None, "is_hybrid", "is_encoder_decoder"])
    def test_which_workers_tell_whose_rows_they_have(self, other: str | None) -> None:
        """vLLM's states of hybrid models and encoder-decoders leave the field empty."""
        model = {"is_hybrid": False, "is_encoder_decoder": False, **({other: True} if other else {})}
        config = SimpleNamespace(model_config=SimpleNamespace(**model))
        assert hooks.numbers_rows(config) == (other is None)


TAIL: dict[str, Any] = {
    "method": "anchor_attention", "params": {"theta": 0.0, "step_tiles": 1, "dense_tail": True},
    "min_tokens": MIN_TOKENS,
}  # fmt: skip


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
        assert [slab.level for slab in metadata.sparse.slabs] == ["fast", ON]
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
        assert made[0].impl.worker.memory.arena.overflows == 0  # it has room for every level

    def test_rows_that_are_not_told_run_dense_and_are_counted(
        self, layers: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        """If a release builds metadata without naming rows, all rows are exact, and no engine ends."""
        made, builder = layers
        unnamed = step_context.Step({"0": EXACT}, {str(i): 1 for i in range(len(MIXED))})
        monkeypatch.setattr(step_context.RunnerRequests, "step", unnamed)
        step = make_step(made[0], MIXED)
        for _ in range(2):
            metadata = builder.build(0, step.common)
            assert getattr(metadata, "sparse", None) is None
            for layer in made:
                assert torch.equal(step.forward(layer, metadata), step.by_dense_backend(layer, builder))
        samples, _ = recorder_of(builder).samples()
        counted = {tuple(labels[:2]): n for name, labels, n in samples if name == "rows"}
        assert counted["dense", Fallback.UNNAMED] >= 2 * len(SPARSE_ROWS)
        assert ("sparse", "") not in counted
        assert len([line for line in lines if Fallback.UNNAMED.explain in line]) == 1

    def test_the_end_of_a_prompt_is_dense_whatever_the_chunk(self, built: Callable[..., Any], at_step: Any) -> None:
        """Two requests at the same position: the prompt of the first ends there, and that of the second continues."""
        (layer,), builder = built(0, **TAIL)
        lengths = [(333, 300), (333, 300), (600, 40), (900, 100)]
        ends = {"0": 633, "1": 5000, "2": 640, "3": 800}  # whole groups; the last prefills its output again
        at_step([ON] * 4)
        builder.row_classifier.requests._prompt_lens.update(ends)
        step = make_step(layer, lengths)
        metadata = builder.build(0, step.common)
        (slab,) = metadata.sparse.slabs
        assert slab.rows.prompt_lens == tuple(ends.values())
        out, dense = step.forward(layer, metadata), step.by_dense_backend(layer, builder)
        same = [(out[step.tokens(row)] - dense[step.tokens(row)]).abs().amax((1, 2)) < 1e-5 for row in range(4)]
        # Tiles begin at 333, 461 and 589: the last two reach into the tail, from 512 on.
        assert bool(same[0][128:].all())
        assert not bool(same[0][:128].all())
        assert not bool(same[1][128:].all())
        assert not bool(same[2].all())
        assert bool(same[3].all())

    def test_rows_of_prompts_that_are_not_known_run_dense(
        self, built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, builder = built(0, **TAIL)
        unnamed = step_context.Step({}, {str(i): 1 for i in range(len(MIXED))})
        monkeypatch.setattr(step_context.RunnerRequests, "step", unnamed)
        rows = builder.row_classifier.classify(make_common(MIXED), 0, 1)
        assert {rows[row].kind.reason for row in SPARSE_ROWS} == {Fallback.UNNAMED}
        _, builder = built(0, min_tokens=MIN_TOKENS, method="anchor_attention")
        rows = builder.row_classifier.classify(make_common(MIXED), 0, 1)
        assert {rows[row].kind.reason for row in SPARSE_ROWS} == {None}

    def test_each_row_keeps_the_share_that_its_request_gives(
        self, built: Callable[..., Any], at_step: Any, tmp_path: Any
    ) -> None:
        """Rows equal those of a server with that p, to the bit, in the same arena; heads of other methods do not
        change."""

        def made(share: float) -> Any:
            by_mass = {"method": "top_p", "kept_mass": share, "most_share": 1.0, "sink_tokens": 0, "local_tokens": 128}
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

        def make_ready(self: Any, impls: Any, worker: Any) -> None:
            for impl in impls:
                impl.levels = {name: on_engine(level) for name, level in impl.levels.items()}

        monkeypatch.setattr(LayerAdoption, "_make_ready", make_ready)
        thresholds = make_builder(config, make_layers(config, [1, 2, 3])[1:2]).row_classifier.thresholds
        numbers = {level: (lengths.min_tokens, lengths.min_query_tokens) for level, lengths in thresholds.items()}
        assert numbers == {ON: (100, 10), "fast": (300, 30)}
