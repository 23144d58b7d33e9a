# SPDX-License-Identifier: Apache-2.0
"""Layers of a worker after the metadata builder has run, without vLLM's configuration."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.arena import UNLIMITED
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.serving.worker.arena import Arena, LayerMemory, Memory, StepLimits
from vllm_sparse_backend.serving.worker.counters import Recorder
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.owner import LayerLevel
from vllm_sparse_kernels.layer import Layer

HAS_CUDA, CPU = torch.cuda.is_available(), torch.device("cpu")

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64)

LONGEST, LARGEST_CHUNK = 24_000, 1500


def make_impls(
    method: str, params: dict[str, Any], device: torch.device, engine: str = "auto"
) -> list[SparsePrefillImpl]:
    """Return layers after the builder has run, without vLLM's configuration. Their arena has room for the longest
    row."""
    plan = Plan.by_level(SparsePrefillConfig(method=method, params=params), SHAPE)[ON]
    layers = [
        replace(Layer.of(layer, SHAPE.head_dim, device, engine), by_kernels=True) for layer in plan.layers if layer
    ]
    counted = LayerMemory(layers[:1], SHAPE.num_kv_heads, SHAPE.head_dim, torch.float16)
    num_bytes, room = counted.arena(StepLimits(LARGEST_CHUNK, 64, LONGEST, min_len=1), UNLIMITED)
    memory = Memory(Arena(device, torch.empty(num_bytes, dtype=torch.uint8, device=device)), room)
    worker: Any = SimpleNamespace(
        recorder=Recorder(device, SHAPE.num_layers, [ON]),
        memory=memory,
        resolved=SimpleNamespace(config=SparsePrefillConfig()),
    )
    impls = []
    for number, layer in enumerate(layers):
        impl = object.__new__(SparsePrefillImpl)
        impl.num_heads, impl.num_kv_heads, impl.head_size = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
        impl.scale, impl.fallback = SHAPE.head_dim**-0.5, None
        impl.sinks = None
        impl.adopt(number, {ON: LayerLevel(layer)}, worker)
        impls.append(impl)
    return impls
