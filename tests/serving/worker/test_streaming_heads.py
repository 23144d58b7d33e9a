# SPDX-License-Identifier: Apache-2.0
"""Streaming heads of a worker: how they are found, kept for the next start, and run."""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.masks import mask_of
from tests.helpers.mixed_batches import CLOSE
from tests.helpers.streaming_model import MIN_CONTEXT, PROMPT, SETTINGS, Model
from tests.helpers.vllm_objects import make_builder, make_common, make_layers, make_step
from vllm_sparse_backend.calibration.streaming_heads import SINK_TOKENS, STREAMING, WINDOW_TOKENS, FarAttention
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import KEY, STREAMING as CARRIED
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.config.profile import SHARE
from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.serving import compat, hooks
from vllm_sparse_backend.serving.worker import streaming_heads
from vllm_sparse_backend.serving.worker.arena import LayerNeed, SparseRow, kernel_rows
from vllm_sparse_backend.serving.worker.model_layers import model_layers
from vllm_sparse_backend.serving.worker.worker_samples import worker_samples
from vllm_sparse_kernels import Rows, SparseIndex
from vllm_sparse_kernels.attention.reference import attend
from vllm_sparse_kernels.layer import Layer, layer_plan, methods_by_head
from vllm_sparse_kernels.methods import METHODS, name_of

make_prompt = streaming_heads._prompt
"""``single_process`` replaces it."""


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(compat, "gather_over_stages", lambda value: [value])
    monkeypatch.setattr(streaming_heads, "_prompt", lambda vllm_config: PROMPT)


def without_streaming_settings(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an operator who did not set streaming heads, on a server that finds them."""
    settings = {name: value for name, value in additional_config[KEY].items() if name != "streaming_heads"}
    return {**additional_config, KEY: settings, CARRIED: True}


class Tokenizer:
    """A tokenizer whose tokens are bytes.

    Args:
        first: Number of the first token.
        step: Bytes of a token.
    """

    bos_token_id = None

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self.first, self.step = first, step

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self.first + byte for byte in text.encode()[:: self.step]]


class OtherTokenizer:
    """A tokenizer with another interface."""

    bos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture
def by_default(config: Any) -> Any:
    """Return the configuration of a server that finds streaming heads by default."""
    config.additional_config = without_streaming_settings(config.additional_config)
    return config


@pytest.fixture
def config(configured: Callable[..., Any]) -> Any:
    return configured(**SETTINGS)


def results(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.json"))


class TestFinding:
    def test_heads_near_their_queries_are_found_and_kept_for_the_next_start(
        self, config: Any, tmp_path: Path, lines: list[str]
    ) -> None:
        near = {0: {1, 2}, 2: {0, 1, 2, 3}}
        model = Model(layers := make_layers(config, range(3)), near)
        streaming_heads.find_streaming_heads(config, model)
        expected = {0: {1, 2}, 1: set(), 2: {0, 1, 2, 3}}
        assert layers[0].impl.worker.streaming_heads == expected
        assert layers[0].impl.attend_without_cache is None
        (path,) = results(tmp_path)
        assert json.loads(path.read_text()) == {"layers": {"0": [1, 2], "1": [], "2": [0, 1, 2, 3]}}
        samples = worker_samples(SimpleNamespace(vllm_config=config, rank=0))["samples"]
        assert ("streaming_heads", [], 6.0) in samples
        assert re.search(r"6 of 12 heads .* \(measured in .* s\): in steps after at least 2500 tokens", lines[-1])

        config.compilation_config.static_forward_context.clear()
        again = Model(layers := make_layers(config, range(3)), near)
        streaming_heads.find_streaming_heads(config, again)
        assert layers[0].impl.worker.streaming_heads == expected
        assert (model.runs, again.runs) == (1, 0)
        assert "(from an earlier start)" in lines[-1]

    def test_a_second_call_changes_nothing(self, config: Any) -> None:
        """vLLM may profile a model again, for example to measure the memory of its CUDA graphs."""
        model = Model(make_layers(config, [0]), {})
        for _ in range(2):
            streaming_heads.find_streaming_heads(config, model)
        assert model.runs == 1

    def test_attention_of_the_run_is_causal_attention(self, config: Any) -> None:
        model = Model(make_layers(config, [0]), {0: {3}})
        streaming_heads.find_streaming_heads(config, model)
        (out,) = model.outputs
        assert bool(out.isfinite().all())
        # A query whose scores leave one key has that key's value; the value of kv head 1 is that of query head 3.
        spread = out.std(0).mean(-1)
        assert spread[3] > 2 * spread[2]

    def test_ranks_run_the_model_if_one_of_them_has_no_result(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        streaming_heads.find_streaming_heads(config, Model(make_layers(config, [0]), {}))
        monkeypatch.setattr(compat, "gather_over_stages", lambda value: [value, False])
        config.compilation_config.static_forward_context.clear()
        model = Model(make_layers(config, [0]), {})
        streaming_heads.find_streaming_heads(config, model)
        assert model.runs == 1

    def test_an_error_in_the_run_leaves_layers_as_they_were(self, config: Any) -> None:
        layers = make_layers(config, [0])
        with pytest.raises(TypeError):
            streaming_heads.measure(config, torch.nn.Linear(1, 1), {0: layers[0].impl}, PROMPT)
        assert layers[0].impl.attend_without_cache is None

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, "has ALiBi"),
            ({"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}, "reads the cache of another layer"),
        ],
    )
    def test_layers_that_cannot_be_measured_are_named(self, config: Any, options: Any, problem: str) -> None:
        layers = make_layers(config, [0])
        make_layers(config, [1], **options)
        with pytest.raises(
            ConfigurationError, match=rf"streaming_heads: layer model.layers.1.self_attn.attn {problem}"
        ):
            streaming_heads.find_streaming_heads(config, Model(layers, {}))

    def test_a_layer_without_plain_attention_is_named(self, config: Any) -> None:
        layers = make_layers(config, [0])
        config.compilation_config.static_forward_context["model.layers.1.mixer"] = torch.nn.Identity()
        with pytest.raises(ConfigurationError, match=r"layer model.layers.1.mixer is Identity, not plain attention"):
            streaming_heads.find_streaming_heads(config, Model(layers, {}))

    def test_by_default_such_layers_leave_all_heads_to_the_method(self, config: Any, lines: list[str]) -> None:
        config.additional_config = without_streaming_settings(config.additional_config)
        layers = make_layers(config, [0])
        config.compilation_config.static_forward_context["model.layers.1.mixer"] = torch.nn.Identity()
        model = Model(layers, {0: {1}})
        streaming_heads.find_streaming_heads(config, model)
        assert layers[0].impl.worker.streaming_heads == {}
        assert model.runs == 0
        assert "all heads score keys in long prompts: layer model.layers.1.mixer is Identity" in lines[-1]

    @pytest.mark.parametrize(
        ("tokenizer", "says"),
        [
            (Tokenizer(step=100), "ConfigurationError: .* expected at least 16,384"),
            (Tokenizer(first=70_000), "ConfigurationError: .* makes token 70"),
            (OtherTokenizer(), "TypeError: .*add_special_tokens"),
        ],
        ids=["few tokens", "tokens of another model", "another interface"],
    )
    def test_by_default_a_tokenizer_that_makes_no_prompt_is_a_warning(
        self, by_default: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str], tokenizer: Any, says: str
    ) -> None:
        monkeypatch.setattr(streaming_heads, "_prompt", make_prompt)
        monkeypatch.setattr(compat, "tokenizer", lambda vllm_config: tokenizer)
        model = Model(layers := make_layers(by_default, [0]), {})
        streaming_heads.find_streaming_heads(by_default, model)
        assert layers[0].impl.worker.streaming_heads == {}
        assert model.runs == 0
        assert re.search(f"all heads score keys in long prompts: the prompt .* failed on rank 0: {says}", lines[-1])
        assert make_builder(by_default, layers).streaming_context_tokens is None

    def test_a_required_prompt_that_cannot_be_made_is_an_error(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(streaming_heads, "_prompt", make_prompt)
        monkeypatch.setattr(compat, "tokenizer", lambda vllm_config: Tokenizer(step=100))
        with pytest.raises(ConfigurationError, match="expected at least 16,384"):
            streaming_heads.find_streaming_heads(config, Model(make_layers(config, [0]), {}))

    def test_by_default_a_model_that_cannot_run_is_a_warning(
        self, by_default: Any, tmp_path: Path, lines: list[str]
    ) -> None:
        layers = make_layers(by_default, [0])
        streaming_heads.find_streaming_heads(by_default, torch.nn.Linear(1, 1))
        assert layers[0].impl.worker.streaming_heads == {}
        assert layers[0].impl.attend_without_cache is None
        assert results(tmp_path) == []
        assert "the run of the model failed on rank 0: TypeError" in lines[-1]

    @pytest.mark.parametrize("failed_step", [0, 1, 2], ids=["layers", "prompt", "run"])
    def test_no_rank_has_streaming_heads_if_one_of_them_cannot_find_its_own(
        self, by_default: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str], failed_step: int
    ) -> None:
        problems = iter(["made up" if step == failed_step else None for step in range(3)])

        def gather(value: Any) -> list[Any]:
            return [value, value if isinstance(value, bool | str) else next(problems)]

        monkeypatch.setattr(compat, "gather_over_stages", gather)
        layers = make_layers(by_default, [0])
        streaming_heads.find_streaming_heads(by_default, Model(layers, {0: {1}}))
        assert layers[0].impl.worker.streaming_heads == {}
        assert lines[-1].endswith("all heads score keys in long prompts: made up")
        assert results(tmp_path) == []

    def test_required_heads_that_another_rank_cannot_find_are_an_error(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The executor reads the answers of ranks in their order, so a rank that waited would hide another's error."""
        monkeypatch.setattr(compat, "gather_over_stages", lambda value: [value, "made up"])
        with pytest.raises(ConfigurationError, match="streaming_heads: made up"):
            streaming_heads.find_streaming_heads(config, Model(make_layers(config, [0]), {}))

    def test_an_engine_that_finds_no_heads_is_left_alone_in_a_process_with_the_hook(self, by_default: Any) -> None:
        """The hook wraps a class of vLLM, which other engines of the process use too."""
        by_default.additional_config[CARRIED] = False
        model = Model(layers := make_layers(by_default, [0]), {})
        hooks._find_streaming_heads(by_default, SimpleNamespace(get_model=lambda: model))
        assert model.runs == 0
        assert layers[0].impl.worker is None

    def test_a_worker_without_layers_is_left_to_its_builders(self, by_default: Any) -> None:
        streaming_heads.find_streaming_heads(by_default, Model([], {}))

    def test_by_default_a_release_without_a_place_for_the_measurement_is_a_warning(
        self, configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        monkeypatch.setattr("vllm.v1.worker.cpu_worker.CPUWorker.determine_available_memory", None)
        config = configured(**SETTINGS)
        config.additional_config[CARRIED] = True
        with pytest.raises(ConfigurationError, match="determine_available_memory is missing"):
            hooks._worker_begins(config)
        config.additional_config = without_streaming_settings(config.additional_config)
        hooks._worker_begins(config)
        assert re.search("determine_available_memory is missing.*all heads score keys in long prompts", lines[-1])

    def test_experts_are_no_obstacle(self, config: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import register_layer_for_moe_forward_op

        make_layers(config, [0])
        runner: Any = SimpleNamespace(layer_name="model.layers.0.mlp.experts")
        register_layer_for_moe_forward_op(config, runner)
        assert streaming_heads.layer_problem(config) is None

    def test_a_cache_before_the_run_is_an_error(self, config: Any) -> None:
        with pytest.raises(ConfigurationError, match="got its KV cache before it ran the model"):
            make_builder(config, make_layers(config, [0]))

    def test_by_default_a_cache_before_the_run_is_a_warning(self, config: Any, lines: list[str]) -> None:
        config.additional_config = without_streaming_settings(config.additional_config)
        make_builder(config, make_layers(config, [0]))
        assert any("got its KV cache before it ran the model" in line for line in lines)


class TestResult:
    HEADS: ClassVar = {0: frozenset({1, 3}), 1: frozenset[int]()}

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b.json"
        assert streaming_heads.read_result(path, {0: 4, 1: 4}) is None
        streaming_heads.write_result(path, self.HEADS)
        assert streaming_heads.read_result(path, {0: 4, 1: 4}) == self.HEADS
        assert [file.name for file in path.parent.iterdir()] == ["b.json"]

    @pytest.mark.parametrize(
        "text",
        ["", "{", '{"layers": {"0": [1]}}', '{"layers": {"0": [4], "1": []}}', '{"layers": {"0": [-1], "1": []}}',
         '{"layers": {"0": ["1"], "1": []}}', '{"layers": {"0": [1], "1": []}, "more": 1}'],
    )  # fmt: skip
    def test_a_damaged_or_foreign_file_is_measured_again(self, tmp_path: Path, text: str, lines: list[str]) -> None:
        path = tmp_path / "b.json"
        path.write_text(text)
        assert streaming_heads.read_result(path, {0: 4, 1: 4}) is None
        assert "is replaced" in lines[-1]

    def test_a_folder_that_cannot_be_written_is_a_warning(self, tmp_path: Path, lines: list[str]) -> None:
        (tmp_path / "file").write_text("")
        streaming_heads.write_result(tmp_path / "file" / "b.json", self.HEADS)
        assert "cannot be written" in lines[-1]

    def test_other_users_of_the_folder_can_read_a_result(self, tmp_path: Path) -> None:
        """Replicas may share a volume and run as different users."""
        umask = os.umask(0o022)
        try:
            streaming_heads.write_result(tmp_path / "b.json", self.HEADS)
        finally:
            os.umask(umask)
        assert (tmp_path / "b.json").stat().st_mode & 0o777 == 0o644

    def test_a_result_that_cannot_be_renamed_leaves_no_file(self, tmp_path: Path, lines: list[str]) -> None:
        (tmp_path / "b.json").mkdir()
        streaming_heads.write_result(tmp_path / "b.json", self.HEADS)
        assert [file.name for file in tmp_path.iterdir()] == ["b.json"]
        assert "cannot be written" in lines[-1]

    def test_the_key_depends_on_weights_prompt_configuration_and_rule(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = Model([], {})
        keys = [streaming_heads.result_key(config, model, PROMPT)]
        assert streaming_heads.result_key(config, Model([], {}), PROMPT) == keys[0]
        keys.append(streaming_heads.result_key(config, model, PROMPT[:-1]))
        with torch.no_grad():
            model.weight[0] += 1
        keys.append(streaming_heads.result_key(config, model, PROMPT))
        changed = compat.hf_config(config) | {"rope_theta": 7.0}
        monkeypatch.setattr(compat, "hf_config", lambda vllm_config: changed)
        keys.append(streaming_heads.result_key(config, model, PROMPT))
        monkeypatch.setattr(config.cache_config, "cache_dtype", "fp8")
        keys.append(streaming_heads.result_key(config, model, PROMPT))
        monkeypatch.setattr(streaming_heads.calibration, "MAX_FAR_SHARE", 0.2)
        keys.append(streaming_heads.result_key(config, model, PROMPT))
        monkeypatch.setattr(compat, "tensor_parallel", lambda vllm_config: (1, 2))
        keys.append(streaming_heads.result_key(config, model, PROMPT))
        assert len(set(keys)) == len(keys)

    def test_checksums_see_order_dtype_and_the_last_byte(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming_heads, "CHECKSUM_BYTES", 64)  # several chunks

        def checksum(weight: torch.Tensor) -> Any:
            model = torch.nn.Module()
            model.register_buffer("weight", weight, persistent=False)
            ((name, *properties),) = streaming_heads.weight_checksums(model)
            assert name == "weight"
            return tuple(properties)

        numbers = torch.arange(100.0)
        swapped, last = numbers.clone(), numbers.clone()
        swapped[[16, 32]] = numbers[[32, 16]]  # the same place in two chunks
        last.view(torch.uint8)[-1] += 1
        weights = [numbers, swapped, last, numbers.view(10, 10), numbers.view(10, 10).T, numbers.view(torch.int32)]
        assert len({checksum(weight) for weight in weights}) == len(weights)
        assert checksum(numbers) == checksum(numbers.clone())


class TestRunning:
    @pytest.fixture
    def adopted(self, config: Any) -> tuple[list[Any], Any]:
        layers = make_layers(config, range(2))
        streaming_heads.find_streaming_heads(config, Model(layers, {0: {0, 3}}))
        return layers, make_builder(config, layers)

    def test_a_layer_with_streaming_heads_has_a_second_plan_of_equal_width(self, adopted: Any) -> None:
        (with_heads, without), _ = adopted
        level = with_heads.impl.levels[DEFAULT]
        assert [name_of(method) for method in methods_by_head(level.layer.groups)] == ["top_p"] * 4
        streaming = methods_by_head(level.streaming_layer.groups)
        assert [name_of(method) for method in streaming] == ["a_shape", "top_p", "top_p", "a_shape"]
        assert streaming[0] == STREAMING
        assert level.streaming_layer.block_tokens == level.layer.block_tokens == 32
        assert without.impl.levels[DEFAULT].streaming_layer is None

    def test_only_rows_with_a_long_context_are_long(self, adopted: Any, at_step: Callable[..., None]) -> None:
        _, builder = adopted
        rows = [(MIN_CONTEXT - 1, 90), (MIN_CONTEXT, 90), (MIN_CONTEXT + 500, 60), (0, 200)]
        metadata = builder.build(0, make_common(rows))
        slabs = {slab.is_long: slab.rows.context_lens for slab in metadata.sparse.slabs}
        assert slabs == {False: (MIN_CONTEXT - 1, 100), True: (MIN_CONTEXT, MIN_CONTEXT + 500)}
        at_step([RequestLevel(SHARE, 0.8), DEFAULT, RequestLevel(SHARE, 0.8), DEFAULT])
        metadata = builder.build(0, make_common(rows))
        kinds = {(slab.request.kept_mass, slab.is_long): slab.rows.context_lens for slab in metadata.sparse.slabs}
        assert kinds == {
            (0.8, False): (MIN_CONTEXT - 1, MIN_CONTEXT + 500), (None, True): (MIN_CONTEXT,), (None, False): (100,),
        }  # fmt: skip

    def test_rows_run_the_plan_for_their_length(self, adopted: Any) -> None:
        """Streaming heads of long rows attend to the first and the nearest keys; everything else is as without them."""
        (layer, _), builder = adopted
        step = make_step(layer, [(MIN_CONTEXT - 1, 90), (MIN_CONTEXT + 200, 90)])
        out = step.forward(layer, builder.build(0, step.common))
        level = layer.impl.levels[DEFAULT]
        for row, plan in enumerate((level.layer, level.streaming_layer)):
            expected, index = reference(step, row, plan, layer.impl.scale)
            torch.testing.assert_close(out[step.tokens(row)], expected, **CLOSE)
            kept = mask_of(index, 0)
            far = kept[:, -1, SINK_TOKENS : -WINDOW_TOKENS - 128]
            assert far.any(-1).tolist() == ([True] * 4 if row == 0 else [False, True, True, False])

    @pytest.mark.parametrize("params", [{}, {"queries": "all"}], ids=str)
    def test_the_plan_of_long_rows_needs_no_more_memory(self, params: dict[str, Any]) -> None:
        """The arena is sized before heads are known."""
        scored = METHODS["top_p"].parameters(**params)
        plain = LayerNeed.of(layer_plan([scored] * 8), 2, 128, 2, torch.device("cpu"))
        for query_len, context_len in ((1, 50_000), (100, 60_001), (2048, 131_072), (8192, 49_152), (8192, 122_880)):
            rows = kernel_rows([SparseRow(0, 0, query_len, context_len)])
            for number in range(1, 9):
                groups = layer_plan([STREAMING] * number + [scored] * (8 - number))
                assert replace(plain, groups=groups).num_bytes(rows) <= plain.num_bytes(rows)

    def test_layers_that_are_found_are_those_of_the_model(self, adopted: Any) -> None:
        layers, builder = adopted
        assert {layer.number for layer in model_layers(builder.vllm_config).values()} == {0, 1}
        assert layers[0].impl.worker.streaming_heads.keys() == {0, 1}


def reference(step: Any, row: int, plan: Layer, scale: float) -> tuple[torch.Tensor, SparseIndex]:
    """Run a row alone through the references of the methods of a plan, over blocks of the plan's width."""
    query, cache = step.alone(row)
    context_len, query_len = step.lengths[row]
    rows = Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32))
    layouts = {head: method.stripe_layout(rows) for head, method in enumerate(methods_by_head(plan.groups))}
    index = SparseIndex.allocate(rows, query.shape[1], plan.block_tokens, layouts)
    for group in plan.groups:
        heads = torch.tensor(group.heads, dtype=torch.int32)
        METHODS[name_of(group.method)].reference(group.method, query, cache, index, heads, scale)
    out = torch.full_like(query, float("nan"))
    attend(query, cache, index, out, scale)
    return out, index


def test_no_head_streams_if_either_number_is_large() -> None:
    shares, heavy = torch.tensor([0.0, 0.2, 0.0, 0.0999]), torch.tensor([0.0, 0.0, 0.001, 0.0004])
    assert FarAttention(shares, heavy).streaming_heads() == {0, 3}
    assert layer_plan([STREAMING] * 2)[0].heads == (0, 1)
