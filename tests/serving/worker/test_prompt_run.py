# SPDX-License-Identifier: Apache-2.0
"""The run at start-up that measures heads: what it gives to models of all kinds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.vllm_objects import layer_name, make_layers
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.prompt_run import run_model
from vllm_sparse_backend.serving.worker.streaming import refuse_layers

TOKENS = list(range(3, 303))


class Recurrence(MambaBase):
    """A sum over the tokens. It has no ``kv_cache`` before vLLM allocates it, as vLLM's gated recurrences have none."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> tuple[tuple[int, ...]]:
        return ((2, 3),)

    def get_state_dtype(self) -> tuple[torch.dtype]:
        return (torch.float32,)

    def run(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Add the values to the state of the step's only request, as a prefill from an empty state."""
        metadata = get_forward_context().attn_metadata[name]
        assert (metadata.num_prefills, metadata.num_prefill_tokens, metadata.num_decodes) == (1, len(TOKENS), 0)
        assert metadata.query_start_loc.tolist() == [0, len(TOKENS)]
        states, number = self.kv_cache[0], int(metadata.state_indices_tensor[0])
        assert states.shape[1:] == (2, 3)
        assert number > 0  # block 0 belongs to nobody
        states[number] = values.sum()
        return states[number].clone()


class Model:
    """Keeps the arguments of its run."""

    requires_raw_input_tokens = False

    def __init__(self, recurrences: dict[str, Recurrence]) -> None:
        self.recurrences = recurrences
        self.sums: list[float] = []

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None].float()

    def __call__(self, **inputs: Any) -> None:
        self.inputs = inputs
        values = inputs["positions"].float()
        self.sums = [float(layer.run(name, values).mean()) for name, layer in self.recurrences.items()]


@pytest.fixture
def config(configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    return configured(method="top_p")


@pytest.mark.parametrize("mode", ["none", "align"])
def test_recurrent_layers_prefill_one_request_on_a_state_of_the_run(
    config: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    make_layers(config, [0])
    recurrences = {f"model.layers.{number}.mixer": Recurrence() for number in (1, 2)}
    config.compilation_config.static_forward_context.update(recurrences)
    monkeypatch.setattr(config.cache_config, "mamba_block_size", 64 if mode == "align" else 4096)
    monkeypatch.setattr(config.cache_config, "mamba_cache_mode", mode)
    refuse_layers(config)
    model: Any = Model(recurrences)
    run_model(config, model, TOKENS)
    assert model.sums == [sum(range(len(TOKENS)))] * 2
    assert all(layer.kv_cache == () for layer in recurrences.values())


def test_attention_layers_of_a_hybrid_get_no_metadata(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_layers(config, [0])
    config.compilation_config.static_forward_context["model.layers.1.mixer"] = Recurrence()
    monkeypatch.setattr(config.cache_config, "mamba_block_size", 4096)
    seen: list[Any] = []
    model: Any = lambda **inputs: seen.append(get_forward_context().attn_metadata[layer_name(0)])  # noqa: E731
    run_model(config, model, TOKENS)
    assert seen == [None]


@pytest.mark.parametrize("is_raw", [False, True])
def test_multimodal_models_get_embeddings_of_the_text(
    config: Any, monkeypatch: pytest.MonkeyPatch, is_raw: bool
) -> None:
    monkeypatch.setattr(compat, "embeds_tokens", lambda vllm_config: True)
    model: Any = Model({})
    model.requires_raw_input_tokens = is_raw
    run_model(config, model, TOKENS)
    assert model.inputs["inputs_embeds"].flatten().tolist() == TOKENS
    assert (model.inputs["input_ids"] is None) is not is_raw


def test_models_of_text_get_tokens(config: Any) -> None:
    model: Any = Model({})
    run_model(config, model, TOKENS)
    assert model.inputs["inputs_embeds"] is None
    assert model.inputs["input_ids"].tolist() == TOKENS
    assert model.inputs["positions"].tolist() == list(range(len(TOKENS)))


def test_all_dimensions_of_a_texts_positions_are_equal(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model({})
    monkeypatch.setattr(type(config.model_config), "uses_mrope", True)
    monkeypatch.setattr(type(config.model_config), "mrope_num_dims", 3)
    run_model(config, model, TOKENS)
    assert model.inputs["positions"].tolist() == [list(range(len(TOKENS)))] * 3
