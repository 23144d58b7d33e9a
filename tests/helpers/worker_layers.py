# SPDX-License-Identifier: Apache-2.0
"""Layers of a worker after the metadata builder has run, without vLLM's configuration."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.serving.worker.arena import Arena, LayerNeed, Memory, Room, SparseRow, kernel_rows
from vllm_sparse_backend.serving.worker.counters import Recorder
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.layer_level import LayerLevel
from vllm_sparse_kernels.layer import Layer

HAS_CUDA, CPU = torch.cuda.is_available(), torch.device("cpu")

SHAPE = ModelShape("LlamaForCausalLM", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64)

LONGEST, LARGEST_CHUNK = 24_000, 1500


def make_impls(
    method: str, params: dict[str, Any], device: torch.device, engine: str = "auto"
) -> list[SparsePrefillImpl]:
    """Return layers after the builder has run, without vLLM's configuration. Their arena has room for the longest
    row."""
    heads = SHAPE.num_kv_heads, SHAPE.head_dim
    plan = Plan.build(SparsePrefillConfig(method=method, params=params), SHAPE)
    needs = [LayerNeed.of(layer, *heads, 2, device, engine) for layer in plan.layers if layer is not None]
    longest = kernel_rows([SparseRow(0, 0, LARGEST_CHUNK, LONGEST - LARGEST_CHUNK)])
    num_bytes = Room(needs, 1 << 60).needed(longest)
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = Memory(Arena(device, buffer), Room(needs, num_bytes))
    worker: Any = SimpleNamespace(
        recorder=Recorder(device), memory=memory, resolved=SimpleNamespace(config=SparsePrefillConfig())
    )
    impls = []
    for number, layer in enumerate(plan.layers):
        assert layer is not None
        impl = object.__new__(SparsePrefillImpl)
        impl.num_heads, impl.num_kv_heads, impl.head_size = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
        impl.scale, impl.fallback = SHAPE.head_dim**-0.5, None
        impl.sinks = None
        served = replace(Layer.of(layer, impl.head_size, device, engine), by_kernels=True)
        impl.adopt(number, {ON: LayerLevel(served)}, worker)
        impls.append(impl)
    return impls
