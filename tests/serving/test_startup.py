# SPDX-License-Identifier: Apache-2.0
"""Configurations that are refused before a model loads, from a handmade vLLM configuration and transformers'
configs."""

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

import transformers
from vllm.config import CUDAGraphMode

from tests.helpers.vllm_configs import llama, served
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.serving import compat, hooks, startup
from vllm_sparse_backend.serving.resolution import resolve
from vllm_sparse_backend.serving.worker.agreement import agree

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
        served(transformers.NemotronHConfig(architectures=["NemotronHForCausalLM"])),  # has no number of layers
        served(WINDOWED, {"dense_layers": [1, 3]}),
    ],
)
def test_what_can_go_sparse_passes(config: Any) -> None:
    startup.check(config)


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 99, "head_dim": 100, "num_key_value_heads": 4}])
def test_settings_refer_to_the_text_part_of_a_nested_config(changes: dict[str, Any]) -> None:
    """Numbers come from the text part of a nested config (vllm-project/recipes#621)."""
    settings = {"method": "a_shape", "dense_layers": [0, 5]}
    nested = transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"], text_config=llama(), **changes)
    plans = [resolve(served(config, settings)).plan.shape for config in (nested, llama())]
    assert [(p.num_layers, p.num_heads, p.num_kv_heads, p.head_dim) for p in plans] == [(6, 4, 2, 64)] * 2
    startup.check(served(nested, settings))
    with pytest.raises(ConfigurationError, match=r"sparse_prefill\.dense_layers.* given 6.* at most 5"):
        startup.check(served(nested, {"dense_layers": [6]}))


NONE = r"^--attention-backend sparse-prefill: no layer .*"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (served(llama(), {"dense_layers": [6]}), r"sparse_prefill\.dense_layers.* given 6.* at most 5"),
        (
            served(llama(), {"crossover": "/nowhere.json"}),
            r"--additional-config sparse_prefill\.crossover: given '/nowhere.json'.* expected a file",
        ),
        (served(transformers.MambaConfig(architectures=["MambaForCausalLM"])), "/a/model.*num_heads"),
        (served(WINDOWED, {"dense_layers": [1, 3, 5]}), "sliding_window: "),  # the others are configured
        (served(llama(), dtype=torch.float32), NONE + Fallback.DTYPE),
        (served(llama(), cache={"cache_dtype": "fp8_e4m3"}), NONE + Fallback.QUANTISED_CACHE),  # on a CPU
        (served(llama(), parallel={"decode_context_parallel_size": 2}), NONE + Fallback.DECODE_CONTEXT_PARALLEL),
        (served(llama(), parallel={"prefill_context_parallel_size": 2}), NONE + Fallback.PREFILL_CONTEXT_PARALLEL),
        (served(llama(head_dim=100)), NONE + re.escape(f"({Fallback.HEAD_SIZE}: {Fallback.HEAD_SIZE.explain})")),
    ],
)
def test_what_does_not_fit_or_leaves_no_layer(config: Any, says: str) -> None:
    """Other wrong settings are covered by the tests of the modules that read them."""
    with pytest.raises(ConfigurationError, match=says):
        startup.check(config)


ADAPTIVE = SimpleNamespace(enable_adaptive_verification=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT is set"),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND is set, but no part of this package runs in"),
        ({"VLLM_BATCH_INVARIANT": "0", "VLLM_USE_RUST_FRONTEND": "0"}, None),
        ({"speculative_config": ADAPTIVE}, '"enable_adaptive_verification": false into --speculative-config'),
        ({"model_config.rswa_window": 128}, "reference sliding window"),
        ({"model_config.is_mm_prefix_lm": True}, "attend in both directions, which sparse prefill does not support"),
        ({"model_config.runner_type": "pooling"}, "the model is for pooling"),
    ],
)
def test_options_that_are_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str | None) -> None:
    config = served(llama())
    for field, value in changes.items():
        if field.startswith("VLLM_"):
            monkeypatch.setenv(field, value)
        *part, name = field.split(".")
        setattr(getattr(config, part[0]) if part else config, name, value)
    expected = f"^--attention-backend sparse-prefill: .*{re.escape(says)}" if says else ""
    with pytest.raises(ConfigurationError, match=expected) if says else nullcontext():
        startup.check(config)


def streaming(settings: Mapping[str, Any], **changes: Any) -> Any:
    """Return a configuration that can find streaming heads, with some fields changed."""
    config = served(llama(), settings)
    for field, value in changes.items():
        *part, name = field.split(".")
        setattr(getattr(config, part[0]) if part else config, name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"parallel_config.data_parallel_size": 2}, None),
        ({"model_config.is_multimodal_model": True}, None),
        ({"model_config.is_encoder_decoder": True}, "given with an encoder-decoder model"),
        ({"model_config.skip_tokenizer_init": True}, "given with --skip-tokenizer-init"),
        ({"lora_config": object()}, "given with --enable-lora"),
        (
            {"parallel_config.data_parallel_size": 2, "parallel_config.is_moe_model": True},
            "given with --data-parallel-size 2 and experts",
        ),
        ({"parallel_config.pipeline_parallel_size": 2}, None),
        (
            {
                "parallel_config.pipeline_parallel_size": 2,
                "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True)),
            },
            "given with --pipeline-parallel-size 2 and sequence parallelism",
        ),
        ({"cache_config.calculate_kv_scales": True}, "given with --calculate-kv-scales"),
        ({"parallel_config.enable_elastic_ep": True}, "given with --enable-elastic-ep"),
        ({"scheduler_config": SimpleNamespace(max_num_batched_tokens=8191)}, "--max-num-batched-tokens 8191, expected"),
        ({"weight_transfer_config": object()}, "given with --weight-transfer-config"),
        ({"model_config.max_model_len": 8191}, "--max-model-len 8191, expected at least 8192"),
    ],
)
def test_servers_that_cannot_find_streaming_heads(changes: dict[str, Any], says: str | None) -> None:
    expected = f"^--additional-config sparse_prefill.streaming_heads: .*{re.escape(says)}.*leave" if says else ""
    with pytest.raises(ConfigurationError, match=expected) if says else nullcontext():
        startup.check(streaming({"streaming_heads": True}, **changes))


@pytest.mark.parametrize(
    "settings", [{}, {"method": "top_p"}, {"streaming_heads": True}, {"params": {"kept_mass": 0.8}}]
)
def test_servers_find_streaming_heads_by_default(settings: dict[str, Any]) -> None:
    config = streaming(settings)
    startup.check(config)
    assert resolve(config).carried.finds_streaming_heads


@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        ({"streaming_heads": False}, {}, None),
        ({"method": "sale"}, {}, None),
        ({"profile": "streaming"}, {}, None),
        ({"params": {"kept_mass": 1}}, {}, None),
        ({}, {"model_config.max_model_len": 8191}, None),
        ({"min_tokens": 32_768}, {"model_config.max_model_len": 32_768}, None),
        ({}, {"lora_config": object()}, "--enable-lora: adapters can change"),
        ({}, {"model_config.is_multimodal_model": True}, "a multimodal model: finding heads was not tried"),
        ({}, {"scheduler_config": SimpleNamespace(max_num_batched_tokens=2048)}, "--max-num-batched-tokens 2048"),
    ],
)
def test_without_a_setting_servers_that_cannot_find_them_do_without(
    settings: dict[str, Any], changes: dict[str, Any], says: str | None, lines: list[str]
) -> None:
    config = streaming(settings, **changes)
    startup.check(config)
    assert not resolve(config).carried.finds_streaming_heads
    logged = [line for line in lines if "all heads score keys" in line]
    assert len(logged) == (says is not None)
    assert says is None or says in logged[0]


def test_an_unreadable_configuration_leaves_a_server_without_streaming_heads(lines: list[str]) -> None:
    """A later release may name its fields differently."""
    config = streaming({}, **{"parallel_config.data_parallel_size": "a number"})
    startup.check(config)
    assert not resolve(config).carried.finds_streaming_heads
    assert "all heads score keys: TypeError" in lines[-1]


class TestHeadsInKeysOfBlocks:
    """Servers that share a store of blocks read only blocks of servers with the same streaming heads."""

    @pytest.mark.parametrize(
        ("store", "fingerprint", "salt", "expected"),
        [
            ("OffloadingConnector", "abc", "sparse_prefill:default:1", "sparse_prefill:default:1:abc"),
            ("OffloadingConnector", "", "sparse_prefill:default:1", "sparse_prefill:default:1"),
            ("OffloadingConnector", "abc", "a client's", "a client's"),
            ("OffloadingConnector", "abc", None, None),
            (None, "abc", "sparse_prefill:p=0.5", "sparse_prefill:p=0.5"),
        ],
        ids=["sparse", "none found", "client", "exact", "no store"],
    )
    def test_salts(
        self, monkeypatch: pytest.MonkeyPatch, store: str | None, fingerprint: str, salt: str | None,
        expected: str | None,
    ) -> None:  # fmt: skip
        connector = None if store is None else SimpleNamespace(kv_connector=store, kv_connector_extra_config={})
        config = streaming({}, kv_transfer_config=connector)
        startup.check(config)
        executor = SimpleNamespace(collective_rpc=lambda method: [fingerprint] * 2)
        core = SimpleNamespace(model_executor=executor, preprocess_add_request=lambda request: request)
        monkeypatch.setattr(hooks, "serves", lambda vllm_config: True)
        hooks.begin_core(lambda self, vllm_config: None, core, config)
        request = SimpleNamespace(cache_salt=salt, sampling_params=None)
        assert core.preprocess_add_request(request).cache_salt == expected


def test_weights_that_can_be_replaced_are_a_warning_if_heads_were_measured(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setattr(compat, "gather_over_world", lambda answer, timeout_s: [answer])
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 0)
    for config in (streaming({}), streaming({"method": "a_shape"})):
        startup.check(config)
        agree(config)
    assert len([line for line in lines if "(reload_weights) can replace the model's weights" in line]) == 1


def test_the_first_process_decides_for_all() -> None:
    config = streaming({})
    startup.check(config)
    config.model_config.max_model_len = 8191  # as if another process saw another value
    startup.check(config)
    assert resolve(config).carried.finds_streaming_heads


def test_prefills_run_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills of models of experts on one data-parallel rank run in graphs. The operator's sizes stay."""

    def captured(
        most: int, is_hopper: bool = True, sizes: Sequence[int] = (256, 512), experts: int = 128, ranks: int = 1
    ) -> list[int]:
        graphs = SimpleNamespace(
            cudagraph_capture_sizes=list(sizes),
            max_cudagraph_capture_size=sizes[-1],
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        )
        scheduler = SimpleNamespace(max_num_batched_tokens=most)
        config: Any = SimpleNamespace(
            compilation_config=graphs, scheduler_config=scheduler, speculative_config=None, lora_config=None,
            model_config=SimpleNamespace(get_num_experts=lambda: experts),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
        )  # fmt: skip
        monkeypatch.setattr(compat, "is_hopper", lambda: is_hopper)
        for _ in range(2):  # engine cores check again
            compat.capture_prefills(config)
        assert graphs.max_cudagraph_capture_size == graphs.cudagraph_capture_sizes[-1]
        return graphs.cudagraph_capture_sizes

    assert captured(most=8192, experts=0) == captured(most=8192, ranks=2) == [256, 512]
    assert captured(most=512) == captured(most=8192, is_hopper=False) == [256, 512]
    assert captured(most=1000) == [256, 512, 640, 768, 896, 1000]
    assert captured(most=8192)[-2:] == [7936, 8192]
    assert captured(most=16384)[-1] == 8192
    assert captured(most=8192, sizes=(256, 1024)) == [256, 1024]


@pytest.mark.parametrize(
    ("experts", "speculator", "largest"), [(128, None, 600), (128, object(), 8192), (0, None, 8192)]
)
def test_only_graphs_for_prefills_leave_keys_unsplit(experts: int, speculator: object, largest: int) -> None:
    """Graphs of whole steps, such as a speculator's, need room for split keys. No step of 600 decodes is larger."""
    graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    config: Any = SimpleNamespace(
        compilation_config=graphs, scheduler_config=SimpleNamespace(max_num_seqs=600),
        parallel_config=SimpleNamespace(data_parallel_size=1), speculative_config=speculator, lora_config=None,
        model_config=SimpleNamespace(get_num_experts=lambda: experts),
    )  # fmt: skip
    builder = SimpleNamespace(max_cudagraph_size=8192)
    compat.limit_split_keys(builder, config)
    assert builder.max_cudagraph_size == largest


def cuda_platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's module for NVIDIA devices. The CPU build lacks the operations that it registers."""
    name = "vllm._C_stable_libtorch"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return importlib.import_module("vllm.platforms.cuda")


class TestDecode:
    """The backend that stock vLLM would decode with, if it differs from ours."""

    @staticmethod
    def on(monkeypatch: pytest.MonkeyPatch, *capability: int, refused: tuple[str, ...] = ()) -> list[Any]:
        """Simulate a device with vLLM's order of backends. Record each query with vLLM's current configuration."""
        from vllm.config import get_current_vllm_config_or_none
        from vllm.platforms.interface import DeviceCapability

        cuda, questions = cuda_platform(monkeypatch), []

        def get_valid_backends(capability: Any, config: Any, num_heads: int | None = None) -> Any:
            questions.append((config, get_current_vllm_config_or_none()))
            order = cuda._get_backend_priorities(config.use_mla, capability)
            valid = [(name, number) for number, name in enumerate(order) if name.name not in refused]
            # ``priority`` gives the order, not the place.
            return [SimpleNamespace(backend=name, priority=number) for name, number in reversed(valid)], {}

        device = SimpleNamespace(
            get_device_capability=lambda: DeviceCapability(*capability), get_valid_backends=get_valid_backends
        )
        monkeypatch.setattr(compat, "current_platform", device)
        monkeypatch.setattr(compat, "IS_CPU", False)
        monkeypatch.setattr(compat.DenseBackend, "get_name", staticmethod(lambda: "FLASH_ATTN"))
        return questions

    @pytest.mark.parametrize(
        ("capability", "refused", "stock"),
        [
            ((10, 0), (), "FLASHINFER"),
            ((10, 0), ("FLASHINFER",), "FLASH_ATTN"),  # FlashInfer is not installed, or does not support the model
            ((12, 0), (), "FLASH_ATTN"),
        ],
    )
    def test_blackwell(self, monkeypatch: pytest.MonkeyPatch, capability: Any, refused: Any, stock: str) -> None:
        questions = self.on(monkeypatch, *capability, refused=refused)
        assert compat.stock_backend(None, 128, torch.bfloat16, "fp8", has_sink=True) == stock
        ((config, _),) = questions
        assert (config.head_size, config.dtype, config.kv_cache_dtype, config.has_sink) == (
            128, torch.bfloat16, "fp8", True,
        )  # fmt: skip

    def test_a_worker_logs_it_once(self, monkeypatch: pytest.MonkeyPatch, configured: Any, lines: list[str]) -> None:
        """On a card, it logs when it prepares the layers of each cache group."""
        from vllm_sparse_backend.serving.worker import layers
        from vllm_sparse_backend.serving.worker.owner import Worker

        config = configured(method="a_shape")
        worker = Worker(config)
        questions = self.on(monkeypatch, 10, 0)
        warmed: list[Any] = []
        monkeypatch.setattr(layers, "warm_up", lambda *arguments: warmed.append(arguments))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        monkeypatch.setattr(compat, "page_order", lambda config: ())
        spec: Any = SimpleNamespace(block_size=128, head_size=64)
        levels = {"on": SimpleNamespace(layer=SimpleNamespace(block_tokens=32))}
        impls: Any = [SimpleNamespace(kv_cache_dtype="fp8", sinks=torch.zeros(4), levels=levels)]
        for _ in range(2):
            layers._make_ready(worker, impls, spec, "")
        assert len(warmed) == 2
        assert {(c.head_size, c.kv_cache_dtype, c.has_sink) for c, _ in questions} == {(64, "fp8", True)}
        assert all(current is config for _, current in questions)
        (line,) = [line for line in lines if "decodes and dense rows run on" in line]
        assert "run on FLASH_ATTN, but stock vLLM would decode on FLASHINFER here" in line
