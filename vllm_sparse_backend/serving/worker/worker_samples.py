# SPDX-License-Identifier: Apache-2.0
"""The metric samples of one worker, for the server that collects them."""

from typing import Any

import torch

from vllm_sparse_backend.config.metrics import METRICS
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import compile_monitor
from vllm_sparse_backend.serving.worker.counters import Key, Sample
from vllm_sparse_backend.serving.worker.mla_prefill import mla_worker
from vllm_sparse_backend.serving.worker.model_layers import model_layers


def new_samples(worker: Any, sent: dict[Key, float], start: bool) -> dict[str, Any]:
    """Return what a worker counted since its last answer, and its gauges. Does not wait for the device.

    ``sent`` has the totals of counters in that answer, and is updated.
    """
    totals, is_behind = worker_totals(worker, start)
    samples = []
    for name, labels, total in totals:
        value, key = total, (name, tuple(labels))
        if METRICS[name].type == "counter":
            value -= sent.get(key, 0)
            sent[key] = total
        samples.append((name, labels, value))
    return {"rank": worker.rank, "behind": is_behind, "samples": samples}


def worker_totals(worker: Any, start: bool) -> tuple[list[Sample], bool]:
    """Return a worker's totals and gauges, and whether newer totals are being copied from the device."""
    impls = [impl for _, impl in model_layers(worker.vllm_config).values()]
    # A layer that stays dense may have a ``Worker`` that a profile run made from the configuration of a model part.
    adopted_first = sorted(impls, key=lambda impl: not impl.is_adopted)
    shared = next((impl.worker for impl in adopted_first if impl.worker), None)
    names = [impl.attention_name for impl in impls]
    mla = mla_worker(worker.vllm_config)
    if mla is not None:
        shared = mla.worker
        names += mla.attention_names(worker.vllm_config)
    totals: list[Sample] = [("compilations", [when], float(n)) for when, n in compile_monitor.counts().items()]
    if compat.tensor_parallel(worker.vllm_config)[0] == 0:
        totals += [("layers", [name], float(names.count(name))) for name in dict.fromkeys(names)]
    if shared is None:
        return totals, False
    counts, is_behind = shared.recorder.samples(start)
    totals += counts
    streaming = shared.streaming
    totals.append(
        ("streaming_heads", [streaming.fingerprint if streaming else ""], float(streaming.count if streaming else 0))
    )
    if shared.memory is not None:
        totals.append(("arena_overflows", [], float(shared.memory.arena.overflows)))
        if shared.device.type == "cuda":
            totals.append(("device_bytes", [], float(torch.cuda.memory_reserved(shared.device))))
    return totals, is_behind
