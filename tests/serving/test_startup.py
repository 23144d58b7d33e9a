# SPDX-License-Identifier: Apache-2.0
"""What is refused before a model loads, from a vLLM configuration made by hand and configs as transformers has them."""

import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

import transformers

from tests.helpers.vllm_configs import llama, served
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.serving import compat, startup

WINDOWED = llama(layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=1024)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "DEVICE_TYPE", "cuda")


@pytest.mark.parametrize(
    "config",
    [
        served(llama(), {"method": "anchor_attention", "min_tokens": 1, "dense_layers": [0, 1]}),
        served(llama(), {"method": "dense"}, parallel={"tensor_parallel_size": 4}),
        served(llama(), dtype=torch.float16, cache={"cache_dtype": "float16"}),
        served(llama(), cache={"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["3"]}),
        served(transformers.GPT2Config(architectures=["GPT2LMHeadModel"], n_embd=768, n_layer=12, n_head=12)),
        served(transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"], text_config=llama())),
        served(transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"])),
        served(transformers.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]), {"dense_layers": [3, 7, 11]}),
        served(transformers.NemotronHConfig(architectures=["NemotronHForCausalLM"])),  # says no number of layers
        served(WINDOWED, {"dense_layers": [1, 3]}),
    ],
)
def test_what_can_go_sparse_passes(config: Any) -> None:
    startup.check(config)


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 99, "head_dim": 100, "num_key_value_heads": 4}])
def test_settings_refer_to_the_text_part_of_a_nested_config(changes: dict[str, Any]) -> None:
    """vllm-project/recipes#621: numbers were looked up at the top of a config whose text part is nested."""
    settings = {"method": "a_shape", "dense_layers": [0, 5]}
    nested = transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"], text_config=llama(), **changes)
    plans = [compat.model_shape(served(config, settings)) for config in (nested, llama())]
    assert [(p.num_layers, p.num_heads, p.num_kv_heads, p.head_dim) for p in plans] == [(6, 4, 2, 64)] * 2
    startup.check(served(nested, settings))
    with pytest.raises(ConfigurationError, match=r"sparse_prefill\.dense_layers.* given 6.* at most 5"):
        startup.check(served(nested, {"dense_layers": [6]}))


NONE = r"^--attention-backend sparse-prefill: no layer .*"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (served(llama(), {"dense_layers": [6]}), r"sparse_prefill\.dense_layers.* given 6.* at most 5"),
        (served(llama(), {"crossover": "/nowhere.json"}), "crossover: given '/nowhere.json'.* expected a file"),
        (served(llama(), parallel={"tensor_parallel_size": 3}), "tensor parallelism.* of 3 for 4 query heads"),
        (served(transformers.MambaConfig(architectures=["MambaForCausalLM"])), "/a/model.*num_heads"),
        (served(WINDOWED, {"dense_layers": [1, 3, 5]}), "sliding_window: "),  # and all others by the configuration
        (served(llama(), dtype=torch.float32), NONE + Fallback.DTYPE),
        (served(llama(), cache={"cache_dtype": "fp8_e4m3"}), NONE + Fallback.QUANTISED_CACHE),  # on a CPU
        (served(llama(), parallel={"decode_context_parallel_size": 2}), NONE + Fallback.DECODE_CONTEXT_PARALLEL),
        (served(llama(), parallel={"prefill_context_parallel_size": 2}), NONE + Fallback.PREFILL_CONTEXT_PARALLEL),
        (served(llama(head_dim=100)), NONE + re.escape(f"({Fallback.HEAD_SIZE}: {Fallback.HEAD_SIZE.explain})")),
    ],
)
def test_what_does_not_fit_or_leaves_no_layer(config: Any, says: str) -> None:
    """What else is wrong in settings, the tests of what reads them have."""
    with pytest.raises(ConfigurationError, match=says):
        startup.check(config)


STORE = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config={})
ON = {"sparse_prefill": {"requests": {"default": "on"}}}
ADAPTIVE = SimpleNamespace(enable_adaptive_verification=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT is set"),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND is set"),
        ({"VLLM_BATCH_INVARIANT": "0", "VLLM_USE_RUST_FRONTEND": "0", "VLLM_OF_NO_RELEASE": "1"}, None),
        ({"speculative_config": ADAPTIVE}, '"enable_adaptive_verification": false into --speculative-config'),
        ({"model_config.rswa_window": 128}, "reference sliding window"),
        ({"model_config.is_mm_prefix_lm": True}, "from version 4 on, and vLLM takes version 3 here"),
        ({"model_config.is_mm_prefix_lm": True, "version": 4}, None),
        ({"model_config.is_mm_prefix_lm": True, "version": None}, None),  # on a CPU
        ({"model_config.runner_type": "pooling", "kv_transfer_config": STORE, "additional_config": ON}, "by which Off"),
    ],
)
def test_options_that_are_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str | None) -> None:
    version = changes.get("version", 3)
    monkeypatch.setattr(compat, "flash_attention_version", lambda config: version)
    monkeypatch.setattr(compat, "IS_CPU", version is None)
    config = served(llama())
    for field, value in changes.items():
        if field.startswith("VLLM_"):
            monkeypatch.setenv(field, value)
        *part, name = field.split(".")
        setattr(getattr(config, part[0]) if part else config, name, value)
    expected = f"^--attention-backend sparse-prefill: .*{re.escape(says)}" if says else ""
    with pytest.raises(ConfigurationError, match=expected) if says else nullcontext():
        startup.check(config)


def test_slow_paths() -> None:
    assert [startup.slow_path(*arguments) for arguments in ((128, (9, 0)), (256, (9, 0)), (16, None))] == [None] * 3
    assert "pages of 16 tokens" in str(startup.slow_path(16, (9, 0)))
    assert "a multiple of 128" in str(startup.slow_path(544, (9, 0)))
    assert "compute capability 8.0" in str(startup.slow_path(128, (8, 0)))


class TestSleepMode:
    def test_what_builders_make_is_made_on_a_thread_of_its_own(self) -> None:
        """vLLM's memory pools take the allocations of the thread that opened them."""
        config = served(llama())
        places = []
        for asleep in (False, True):
            config.model_config.enable_sleep_mode = asleep
            places.append(compat.outside_memory_pool(config, torch.device("cpu"), threading.get_ident))
        assert places[0] == threading.get_ident() != places[1]
