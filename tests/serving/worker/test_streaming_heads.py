# SPDX-License-Identifier: Apache-2.0
"""Streaming heads of a worker: how they are found, and run."""

import logging
import pwd
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.masks import mask_of
from tests.helpers.mixed_batches import CLOSE, reference
from tests.helpers.streaming_model import PROMPT, SETTINGS, Model
from tests.helpers.vllm_objects import make_builder, make_layers, make_step
from vllm_sparse_backend.config.carried import finds_streaming_heads
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import KEY
from vllm_sparse_backend.config.profile import ON, SHARE
from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import carry_settings, carry_streaming
from vllm_sparse_backend.serving.worker import streaming
from vllm_sparse_backend.serving.worker.arena import LayerMemory, SparseRow
from vllm_sparse_backend.serving.worker.owner import Worker, worker_of
from vllm_sparse_backend.streaming_heads import (
    PROMPT_TOKENS,
    SINK_TOKENS,
    WINDOWS_TOKENS,
    FarAttention,
    streaming_method,
)
from vllm_sparse_kernels.layer import Layer, layer_plan
from vllm_sparse_kernels.memory import META
from vllm_sparse_kernels.methods import METHODS

make_prompt = streaming._prompt
"""``single_process`` replaces it."""


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "gather_over_stages", lambda value: [value])
    monkeypatch.setattr(streaming, "_prompt", lambda vllm_config: PROMPT)


def without_streaming_settings(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an operator who did not set streaming heads, on a server that finds them."""
    settings = {name: value for name, value in additional_config[KEY].items() if name != "streaming_heads"}
    return {**additional_config, KEY: settings}


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


@pytest.fixture
def by_default(config: Any) -> Iterator[Any]:
    """Return the configuration of a server that finds streaming heads by default."""
    config.additional_config = without_streaming_settings(config.additional_config)
    worker = Worker(config)
    yield config
    del worker


@pytest.fixture
def config(configured: Callable[..., Any]) -> Iterator[Any]:
    config = configured(**SETTINGS)
    carry_settings(config)
    carry_streaming(config, True)
    worker = Worker(config)
    yield config
    del worker


def find(config: Any, model: torch.nn.Module) -> None:
    streaming.find_streaming_heads(worker_of(config), lambda: model)


def is_without(config: Any, layers: Sequence[Any]) -> bool:
    """Return whether the worker goes on without streaming heads, and its layers as they were."""
    as_they_were = all("forward" not in vars(layer.impl) for layer in layers)
    return (
        as_they_were
        and not worker_of(config).streaming.by_layer
        and not finds_streaming_heads(config.additional_config)
    )


class TestFinding:
    def test_heads_near_their_queries_are_found(self, config: Any, lines: list[str]) -> None:
        layers = make_layers(config, range(3))
        find(config, Model(layers, {0: {1, 2}, 2: {0, 1, 2, 3}}))
        found = worker_of(config).streaming
        assert found.by_layer == {0: {1: 256, 2: 256}, 1: {}, 2: {0: 256, 1: 256, 2: 256, 3: 256}}
        assert "forward" not in vars(layers[0].impl)
        assert ("streaming_heads", [found.fingerprint], 6.0) in worker_of(config).new_samples()["samples"]
        assert re.search(
            rf"6 of 12 heads .* \(fingerprint {found.fingerprint}, measured in .* s\): .*"
            r"128 first and their nearest keys \(6 keep 256\)$",
            lines[-1],
        )

    def test_a_user_without_home_and_passwd_entry_finds_them_too(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in some containers: nothing of the search is kept in a folder of the user."""
        for name in ("HOME", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
        find(config, Model(make_layers(config, [0]), {0: {1, 2}}))
        assert worker_of(config).streaming.by_layer == {0: {1: 256, 2: 256}}

    def test_heads_are_numbered_as_in_the_whole_model_whatever_the_number_of_ranks(self) -> None:
        """Servers with other numbers of ranks then have the same fingerprint."""
        layers: Any = {number: SimpleNamespace(num_heads=2) for number in range(2)}
        by_rank: list[dict[int, dict[int, int]]] = [{0: {1: 256}, 1: {}}, {0: {0: 512}, 1: {1: 256}}]
        heads = [head for rank, heads in enumerate(by_rank) for head in streaming.model_heads(rank, layers, heads)]
        assert sorted(heads) == [(0, 1, 256), (0, 2, 512), (1, 3, 256)]

    def test_a_second_call_changes_nothing(self, config: Any) -> None:
        """vLLM may profile a model again, for example to measure the memory of its CUDA graphs."""
        model = Model(make_layers(config, [0]), {})
        for _ in range(2):
            find(config, model)
        assert model.runs == 1

    def test_attention_of_the_run_is_causal_attention(self, config: Any) -> None:
        model = Model(make_layers(config, [0]), {0: {3}})
        find(config, model)
        (out,) = model.outputs
        assert bool(out.isfinite().all())
        # A query whose scores leave one key has that key's value; the value of kv head 1 is that of query head 3.
        spread = out.std(0).mean(-1)
        assert spread[3] > 2 * spread[2]

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
            ConfigurationError, match=rf"streaming_heads: .* layer model.layers.1.self_attn.attn {problem}"
        ):
            find(config, Model(layers, {}))

    def test_by_default_such_layers_leave_all_heads_to_the_method(self, by_default: Any, lines: list[str]) -> None:
        layers = make_layers(by_default, [0])
        by_default.compilation_config.static_forward_context["model.layers.1.mixer"] = torch.nn.Identity()
        model = Model(layers, {0: {1}})
        find(by_default, model)
        assert is_without(by_default, layers)
        assert model.runs == 0
        assert "rank 0: ConfigurationError: layer model.layers.1.mixer is Identity" in lines[-1]

    @pytest.mark.parametrize(
        ("tokenizer", "says"),
        [
            (Tokenizer(step=100), "ConfigurationError: .* expected at least 16,384"),
            (Tokenizer(first=70_000), "ConfigurationError: .* makes token 70"),
        ],
        ids=["few tokens", "tokens of another model"],
    )
    def test_by_default_a_tokenizer_that_makes_no_prompt_is_a_warning(
        self, by_default: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str], tokenizer: Any, says: str
    ) -> None:
        monkeypatch.setattr(streaming, "_prompt", make_prompt)
        monkeypatch.setattr(compat, "tokenizer", lambda vllm_config: tokenizer)
        model = Model(layers := make_layers(by_default, [0]), {})
        find(by_default, model)
        assert is_without(by_default, layers)
        assert model.runs == 0
        assert re.search(f"all heads score keys: rank 0: {says}", lines[-1])
        make_builder(by_default, layers)
        assert sum("all heads score keys" in line for line in lines) == 1

    def test_a_long_text_makes_the_tokenizer_print_nothing(
        self, config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
        tokenizer.model_max_length = 1000
        monkeypatch.setattr(compat, "tokenizer", lambda vllm_config: tokenizer)
        monkeypatch.setattr(type(config.model_config), "get_vocab_size", lambda model: 1 << 20)
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        assert len(make_prompt(config)) == PROMPT_TOKENS
        assert "longer than" not in caplog.text

    @pytest.mark.parametrize(
        "get_model", [lambda: SimpleNamespace().model, lambda: torch.nn.Linear(1, 1)], ids=["no model", "another model"]
    )
    def test_by_default_a_model_that_cannot_run_is_a_warning(
        self, by_default: Any, lines: list[str], get_model: Callable[[], torch.nn.Module]
    ) -> None:
        layers = make_layers(by_default, [0])
        streaming.find_streaming_heads(worker_of(by_default), get_model)
        assert is_without(by_default, layers)
        assert re.search("all heads score keys: rank 0: (AttributeError|TypeError)", lines[-1])

    def test_an_error_in_a_layer_does_not_end_the_run_for_which_other_ranks_wait(
        self, by_default: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        real, calls = streaming.streaming_heads.attend_and_measure, []

        def attend_and_measure(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("made up")
            return real(*arguments)

        monkeypatch.setattr(streaming.streaming_heads, "attend_and_measure", attend_and_measure)
        layers = make_layers(by_default, [0, 1])
        find(by_default, Model(layers, {}))
        assert len(calls) == 2
        assert is_without(by_default, layers)
        assert lines[-1].endswith("rank 0: OutOfMemoryError: made up")

    def test_required_heads_that_another_rank_cannot_find_are_an_error(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The executor reads the answers of ranks in their order, so a rank that waited would hide another's error."""
        monkeypatch.setattr(compat, "gather_over_stages", lambda value: [value, "made up"])
        with pytest.raises(ConfigurationError, match="streaming_heads: made up; leave streaming_heads out"):
            find(config, Model(make_layers(config, [0]), {}))

    def test_a_server_that_finds_no_heads_does_not_run_its_model(self, by_default: Any) -> None:
        carry_streaming(by_default, False)
        model = Model(make_layers(by_default, [0]), {})
        find(by_default, model)
        assert model.runs == 0

    def test_a_worker_without_layers_is_left_to_its_builders(self, by_default: Any) -> None:
        find(by_default, Model([], {}))

    def test_experts_are_no_obstacle(self, config: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import register_layer_for_moe_forward_op

        make_layers(config, [0])
        runner: Any = SimpleNamespace(layer_name="model.layers.0.mlp.experts")
        register_layer_for_moe_forward_op(config, runner)
        streaming.refuse_layers(config)

    def test_a_cache_before_the_run_is_an_error(self, config: Any) -> None:
        with pytest.raises(ConfigurationError, match="got its KV cache before it ran the model"):
            make_builder(config, make_layers(config, [0]))

    def test_by_default_a_cache_before_the_run_is_a_warning(self, config: Any, lines: list[str]) -> None:
        config.additional_config = without_streaming_settings(config.additional_config)
        make_builder(config, make_layers(config, [0]))
        assert any("got its KV cache before it ran the model" in line for line in lines)


class TestRunning:
    @pytest.fixture
    def adopted(self, config: Any) -> tuple[list[Any], Any]:
        layers = make_layers(config, range(2))
        find(config, Model(layers, {0: {0, 3}}))
        return layers, make_builder(config, layers)

    def test_rows_run_the_layer_of_their_level(self, adopted: Any, at_step: Callable[..., None]) -> None:
        """Streaming heads attend to the first and the nearest keys; everything else is as without them."""
        (layer, _), builder = adopted
        p = SETTINGS["params"]["kept_mass"]
        at_step([RequestLevel(SHARE, p), ON])
        step = make_step(layer, [(2400, 90), (2700, 90)])
        out = step.forward(layer, builder.build(0, step.common))
        for row, level in enumerate((SHARE, ON)):
            methods = layer.impl.levels[level].layer.plan.methods
            expected, index = reference(step, row, methods, layer.impl.scale)
            torch.testing.assert_close(out[step.tokens(row)], expected, **CLOSE)
            kept = mask_of(index, 0)
            far = kept[:, -1, SINK_TOKENS : -256 - 128]
            assert far.any(-1).tolist() == ([True] * 4 if row == 0 else [False, True, True, False])

    def test_streaming_heads_need_no_more_memory(self) -> None:
        """The arena is sized before heads are known."""
        scored, widest = METHODS["top_p"].parameters(), streaming_method(WINDOWS_TOKENS[-1])
        for query_len, context_len in ((1, 50_000), (100, 60_001), (2048, 131_072), (8192, 49_152), (8192, 122_880)):
            needed = [
                LayerMemory([Layer.of(layer_plan(methods), 128, META)], 2, 128, torch.float16).needed(
                    [SparseRow(0, 0, query_len, context_len)]
                )
                for methods in ([widest] * number + [scored] * (8 - number) for number in range(9))
            ]
            assert max(needed) == needed[0]


def test_no_head_streams_if_either_number_is_large_or_within_noise_of_its_threshold() -> None:
    query = 1 / (PROMPT_TOKENS - SINK_TOKENS - WINDOWS_TOKENS[-1])
    shares, heavy = torch.tensor([0.0, 0.2, 0.0, 0.0979, 0.0985, 0.0]), torch.tensor([0, 0, 6, 2, 0, 3]) * query
    shares, heavy = (x.expand(len(WINDOWS_TOKENS), -1) for x in (shares, heavy))
    assert FarAttention(shares, heavy).windows() == {0: 256, 3: 256}


def test_a_head_keeps_its_smallest_window_that_suffices() -> None:
    shares = torch.tensor(
        [[0.05, 0.2, 0.3, 0.4], [0.05, 0.09, 0.2, 0.3], [0.05, 0.08, 0.1, 0.2], [0.0, 0.0, 0.01, 0.1]]
    )
    assert FarAttention(shares, torch.zeros_like(shares)).windows() == {0: 256, 1: 512, 2: 2048}
    methods = [streaming_method(window) for window in WINDOWS_TOKENS]
    assert layer_plan(methods).groups[0].heads == (0, 1, 2, 3)  # one launch selects for all windows
