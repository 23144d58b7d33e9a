# SPDX-License-Identifier: Apache-2.0
"""The metric samples of one worker, for the server that collects them."""

import time
from typing import Any

import torch

from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import compile_monitor
from vllm_sparse_backend.serving.worker.arena import Memory
from vllm_sparse_backend.serving.worker.counters import Sample
from vllm_sparse_backend.serving.worker.mla_prefill import mla_worker
from vllm_sparse_backend.serving.worker.model_layers import model_layers


def _memory_samples(memory: Memory) -> list[Sample]:
    arena = memory.arena
    samples: list[Sample] = [
        ("arena_bytes", [], memory.room.num_bytes),
        ("arena_peak_bytes", [], arena.peak_bytes),
        ("arena_overflows", [], arena.overflows),
    ]
    if arena.device.type == "cuda":
        samples.append(("device_bytes", [], torch.cuda.memory_reserved(arena.device)))
    return samples


def worker_samples(worker: Any, start: bool = True) -> dict[str, Any]:
    """Return the samples of a worker. Does not wait for the device."""
    impls = [impl for _, impl in model_layers(worker.vllm_config).values()]
    # A layer that stays dense may have a ``Worker`` that a profile run made from the configuration of a model part.
    adopted_first = sorted(impls, key=lambda impl: not impl.is_adopted)
    shared = next((impl.worker for impl in adopted_first if impl.worker), None)
    names = [impl.attention_name for impl in impls]
    mla = mla_worker(worker.vllm_config)
    if mla is not None:
        shared = mla.worker
        names += mla.attention_names(worker.vllm_config)
    samples: list[Sample] = []
    behind = False
    if shared is not None:
        counts, behind = shared.recorder.samples(start)
        samples += counts
        if shared.memory is not None:
            samples += _memory_samples(shared.memory)
        streaming = shared.streaming
        samples.append(
            ("streaming_heads", [streaming.fingerprint if streaming else ""], streaming.count if streaming else 0)
        )
    if compat.tensor_parallel(worker.vllm_config)[0] == 0:
        samples += [("layers", [name], names.count(name)) for name in dict.fromkeys(names)]
    samples += [("compilations", [when], count) for when, count in compile_monitor.counts().items()]
    return {
        "rank": worker.rank,
        "moment": time.monotonic_ns(),
        "behind": behind,
        "samples": [(name, labels, float(value)) for name, labels, value in samples],
    }
