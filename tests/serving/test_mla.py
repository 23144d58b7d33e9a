# SPDX-License-Identifier: Apache-2.0
"""The flag for multi-head latent attention: its registration, and what it refuses before a model loads."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
import transformers
from vllm import envs
from vllm.config import AttentionConfig
from vllm.v1.attention.backends.mla.prefill import registry

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.tiny_models import MLA_CONFIG
from tests.helpers.vllm_configs import llama, served
from tests.helpers.vllm_objects import make_config, make_model
from vllm_sparse_backend import plugin
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import KEY
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.mla import describe
from vllm_sparse_backend.identity import FLAG, MLA_BACKEND, MLA_FLAG
from vllm_sparse_backend.serving import compat, hooks, mla_startup
from vllm_sparse_backend.serving.registration import is_ours, is_selected, log_unread_settings, why_displaced
from vllm_sparse_kernels.mla import MlaMethod

CUSTOM = registry.MLAPrefillBackendEnum.CUSTOM


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MLA_PREFILL_OVERRIDES", dict(registry._MLA_PREFILL_OVERRIDES))
    plugin.register()


@pytest.mark.parametrize("flag", ["sparse-prefill", "SPARSE-PREFILL", "sparse_prefill"])
def test_the_flag_means_our_prefill_backend_in_every_process(flag: str) -> None:
    plugin.register()  # idempotent
    config = AttentionConfig(mla_prefill_backend=flag)
    assert config.mla_prefill_backend is CUSTOM
    assert is_selected(config)
    assert config.mla_prefill_backend.get_path() == MLA_BACKEND
    assert is_ours(pickle.loads(pickle.dumps(config)).mla_prefill_backend)


@pytest.mark.parametrize("other", [None, "FLASH_ATTN"])
def test_other_prefill_backends_are_not_ours(other: str | None) -> None:
    assert not is_selected(AttentionConfig(mla_prefill_backend=other))


def test_another_plugin_in_the_place_is_named(lines: list[str]) -> None:
    registry.register_mla_prefill_backend(CUSTOM, "other.plugin.Prefill")
    plugin.register()
    assert CUSTOM.get_path() == "other.plugin.Prefill"
    (line,) = [line for line in lines if "is not available" in line]
    assert line.startswith(f"{MLA_FLAG} is not available: another plugin has taken")
    assert "custom MLA prefill backend (other.plugin.Prefill)" in str(why_displaced(CUSTOM))
    config: Any = SimpleNamespace(
        attention_config=AttentionConfig(mla_prefill_backend="sparse-prefill"), additional_config={KEY: {}}
    )
    with pytest.raises(ConfigurationError, match=rf"^{re.escape(MLA_FLAG)} is not available: another plugin"):
        hooks.serves(config)
    assert AttentionConfig(backend="sparse-prefill").backend is not None  # the other flag still works


def mla_config(settings: Any = None, *, model: Any = None, attention: Any = None, **options: Any) -> Any:
    """Return a configuration of a server with the flag, as vLLM makes it for a DeepSeek-V3 on a CPU."""
    hf = transformers.DeepseekV3Config(**(MLA_CONFIG | (model or {})))
    config = served(hf, settings, **({"dtype": torch.float32} | options))
    config.model_config.use_mla = True
    fields = {"backend": None, "mla_prefill_backend": CUSTOM, "use_prefill_query_quantization": False}
    config.attention_config = SimpleNamespace(**(fields | (attention or {})))
    return config


@pytest.mark.parametrize(
    "config",
    [
        mla_config(),
        mla_config({"method": "top_p", "params": {"kept_mass": 0.8, "most_tokens": None}}),
        mla_config({"method": "a_shape", "params": {"sink_tokens": 64, "local_tokens": 512}, "dense_layers": [0]}),
        mla_config({"method": "streaming", "min_tokens": 1, "requests": {"default": "exact"}}),
        mla_config(dtype=torch.bfloat16, cache={"cache_dtype": "fp8"}, parallel={"tensor_parallel_size": 2}),
    ],
)
def test_what_can_run_sparse_passes(config: Any) -> None:
    mla_startup.check(config)
    assert "sparse_prefill_carried" in config.additional_config


PLACE = "--additional-config sparse_prefill"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            mla_config({"method": "vertical_slash"}),
            f"{PLACE}.method: given 'vertical_slash', expected one of a_shape, t",
        ),
        (
            mla_config({"method": "minference"}),
            "given 'minference', expected one of a_shape, top_p, default, streaming",
        ),
        (mla_config({"profile": "streaming"}), f"{PLACE}.profile: given 'streaming', which multi-head latent"),
        (
            mla_config({"params": {"peak_share": 0.5}}),
            f"{PLACE}.params.peak_share: given 0.5, but top_p has only the parameters kept_mass, most_tokens",
        ),
        (mla_config({"params": {"kept_mass": 2}}), r"params: kept_mass: .*2"),
        (mla_config({"engine": "flash"}), f"{PLACE}.engine: given 'flash', which multi-head"),
        (mla_config({"check_index": True}), f"{PLACE}.check_index: given true"),
        (mla_config({"crossover": "/a/table.json"}), f"{PLACE}.crossover: given '/a/table.json', which"),
        (mla_config({"streaming_heads": True}), f"{PLACE}.streaming_heads: given "),
        (mla_config({"min_token": 5}), r"sparse_prefill\.min_token: unknown field"),
        (mla_config({"dense_layers": [0, 1]}), "name all 2 layers"),
        (
            mla_config(model={"qk_nope_head_dim": 192, "v_head_dim": 256}),
            "qk_nope_head_dim 192, .* expected 128, 64, 128",
        ),
        (mla_config(model={"index_topk": 2048}), r"selects keys itself \(index_topk 2048"),
        (
            mla_config(parallel={"decode_context_parallel_size": 2}),
            "given --decode-context-parallel-size 2, expected 1",
        ),
        (
            mla_config(parallel={"prefill_context_parallel_size": 2}),
            "given --prefill-context-parallel-size 2, expected",
        ),
        (mla_config(parallel={"use_ubatching": True}), "splits steps into microbatches"),
        (mla_config(attention={"use_prefill_query_quantization": True}), "given use_prefill_query_quantization"),
        (mla_config(dtype=torch.float64), "given --dtype float64, expected float16 or bfloat16 or float32"),
    ],
)
def test_what_cannot_work_is_refused(config: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        mla_startup.check(config)
    assert "\n" not in str(caught.value)


def test_float32_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "IS_CPU", False)
    with pytest.raises(ConfigurationError, match="given --dtype float32, expected float16 or bfloat16; use"):
        mla_startup.check(mla_config())


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(ConfigurationError, match="^" + re.escape(MLA_FLAG) + ": VLLM_BATCH_INVARIANT is set"):
        mla_startup.check(mla_config())


def test_the_wrong_flag_for_the_model_names_the_other(tmp_path: Path) -> None:
    plain = served(llama())
    plain.attention_config = mla_config().attention_config
    with pytest.raises(ConfigurationError, match=f"does not use multi-head latent attention.*{FLAG} instead"):
        mla_startup.check(plain)
    with pytest.raises(ConfigurationError, match=f"pass {MLA_FLAG} in place of {FLAG}"):
        make_config(make_model(tmp_path / "mla", **MLA_CONFIG))
    ours = AttentionConfig(backend="sparse-prefill").backend
    with pytest.raises(ConfigurationError, match=f"given together with {FLAG}.*leave --attention-backend out"):
        mla_startup.check(mla_config(attention={"backend": ours}))


def test_settings_on_a_stock_server_of_such_a_model_name_its_flag(lines: list[str]) -> None:
    log_unread_settings(mla_config({"method": "a_shape"}))
    assert f"add {MLA_FLAG} to use these settings" in lines[-1]


def test_the_log_shows_the_parameters_that_exist() -> None:
    for name, described in (
        ("a_shape", "a_shape(sink_tokens=1024, local_tokens=4096)"),
        ("default", "top_p(kept_mass=0.9, most_tokens=2048)"),
    ):
        method = make_method(name, {})
        assert isinstance(method, MlaMethod)
        assert describe(method) == described
