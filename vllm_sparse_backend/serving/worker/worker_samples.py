# SPDX-License-Identifier: Apache-2.0
"""What one worker counted, as it hands it to the server that asks."""

from typing import Any

import torch

from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import compile_monitor
from vllm_sparse_backend.serving.worker.model_layers import model_layers


def worker_samples(worker: Any, start: bool = True) -> dict[str, Any]:
    """What this worker counted, for ``MetricsPage``: samples, and whether newer ones are on their way.

    Of things that msgpack knows, as it passes between processes. start: see ``Recorder.samples``.
    """
    impls = [impl for _, impl in model_layers(worker.vllm_config).values()]
    # Layers that never went sparse may hold what a profile run made of a part's configuration.
    shared = next((impl.worker for impl in sorted(impls, key=lambda impl: not impl.is_adopted) if impl.worker), None)
    found, behind = ([], False) if shared is None else shared.recorder.samples(start)
    samples = list(found)
    if shared is not None and (memory := shared.memory) is not None:
        samples += [
            ("arena_bytes", [], memory.room.num_bytes),
            ("arena_peak_bytes", [], memory.arena.peak_bytes),
            ("arena_overflows", [], memory.arena.overflows),
        ]
        if memory.arena.device.type == "cuda":
            samples.append(("device_bytes", [], torch.cuda.memory_reserved(memory.arena.device)))
    if compat.tensor_parallel(worker.vllm_config)[0] == 0:
        names = [impl.attention_name for impl in impls]
        samples += [("layers", [name], names.count(name)) for name in dict.fromkeys(names)]
    samples += [("compilations", [when], count) for when, count in compile_monitor.counts().items()]
    return {
        "rank": worker.rank,
        "behind": behind,
        "samples": [(name, labels, float(value)) for name, labels, value in samples],
    }
