# SPDX-License-Identifier: Apache-2.0
"""SharePrefill's clusters from a captured prompt, and the plan that a server would make with them."""

import json
import time
from pathlib import Path
from typing import Any

from vllm_sparse_backend.measure.report import write_json
from vllm_sparse_backend.profiling.capture import Capture
from vllm_sparse_backend.profiling.share_prefill import Clusters, attention_maps, cluster_heads, profile_of
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

MAP_SIDE, MAP_DISTANCE = 64, 10.0


def head_clusters(captured: Capture, device: str, side: int | None = None, distance: float | None = None) -> Clusters:
    """SharePrefill's clusters from a captured prompt; heads of layers that were not captured are noise.

    ``side``: of the maps, ``MAP_SIDE`` unless given; ``distance``: up to which heads are joined, ``MAP_DISTANCE``.
    """
    side, distance = MAP_SIDE if side is None else side, MAP_DISTANCE if distance is None else distance
    how = "" if (side, distance) == (MAP_SIDE, MAP_DISTANCE) else f"-{side}-{distance:g}"
    kept = captured.folder / f"clusters-{captured.model}-{captured.prompt_sha256[:16]}{how}.json"
    if kept.is_file():
        return tuple(tuple(heads) for heads in json.loads(kept.read_text()))
    layers = sorted(captured.scales)
    maps = []
    for layer in layers:
        q, k, _ = captured.read(layer, device)
        maps.append(attention_maps(q, k, captured.scales[layer], side))
    found = cluster_heads(maps, distance, device=device)
    by_layer = dict(zip(layers, found, strict=True))
    noise = (NOISE,) * captured.shape.num_heads
    clusters = tuple(by_layer.get(layer, noise) for layer in range(captured.shape.num_layers))
    write_json(kept, clusters)
    return clusters


def plan_of(method: str, params: dict[str, Any], shape: ModelShape, clusters: Clusters | None, folder: Path) -> Plan:
    """What a server would run with this method on all heads or, where it takes clusters, with their profile.

    ``folder`` is where that profile is written.
    """
    config = SparsePrefillConfig(method=method, params=params)
    if method == "share_prefill" and clusters is not None:
        path = folder / f"{time.monotonic_ns()}.yaml"
        path.write_text(profile_of(clusters, shape, SharePrefill(**params)).to_yaml())
        config = SparsePrefillConfig(profile=str(path))
    return Plan.build(config, shape)
