# SPDX-License-Identifier: Apache-2.0
"""Cluster files of SharePrefill: shareprefill/clusters/sharing_lookup/*.json in its authors' repository.

``{"clusters": {"ID": [[layer, head], ...]}, "shared_clusters": ["ID", ...]}``. Their code lets heads share within the
clusters that ``shared_clusters`` names and within no other, and treats a head of no cluster like those: all of these
become noise (−1) here. Clusters keep their numbers.

The thresholds stand in no file. The profile has the paper's (δ = 0.3, τ = 0.2, γ = 0.9): those of the authors' code
(similarity_threshold 0.5 and so on) are of another comparison, see ``methods/share_prefill/method.py``.
"""

from pathlib import Path
from typing import Any

from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Provenance

FORM = "SharePrefill's clusters, an object with clusters and shared_clusters"
FIELDS = {"clusters", "shared_clusters"}
MAX_DIGITS = 6


def fits(content: Any) -> bool:
    return isinstance(content, dict) and bool(FIELDS & set(content))


def level(content: dict[str, Any], shape: ModelShape, source: str) -> Level:
    if set(content) != FIELDS:
        raise ConfigurationError(f"{source}: {unexpected(sorted(content), f'the fields {sorted(FIELDS)}')}")
    clusters = _members(content["clusters"], shape, source)
    shared = _shared(content["shared_clusters"], clusters, source)
    own = {place: name for name in shared for place in clusters[name]}
    methods = [
        [_method(own.get((layer, head))) for head in range(shape.num_heads)] for layer in range(shape.num_layers)
    ]
    sharing = f"{len(shared)} of its {len(clusters)} clusters share"
    return Level.of_heads(methods, Provenance(source=f"imported from SharePrefill's {Path(source).name}: {sharing}"))


def _method(cluster: str | None) -> Any:
    return make_method("share_prefill", {} if cluster is None else {"cluster": int(cluster)})


def _members(given: object, shape: ModelShape, source: str) -> dict[str, list[tuple[int, int]]]:
    if not isinstance(given, dict):
        raise ConfigurationError(f"{source}: clusters: {unexpected(given, 'an object of lists of [layer, head]')}")
    owners: dict[tuple[int, int], str] = {}
    members: dict[str, list[tuple[int, int]]] = {}
    numbers: dict[int, str] = {}
    for name, places in given.items():
        where = f"{source}: clusters.{name:.20}"
        if not (name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS):
            raise ConfigurationError(f"{where}: {unexpected(name, f'a number of at most {MAX_DIGITS} digits')}")
        if (other := numbers.setdefault(int(name), name)) != name:
            raise ConfigurationError(f"{where}: given cluster {other!r} too, expected each number once")
        if not isinstance(places, list):
            raise ConfigurationError(f"{where}: {unexpected(places, 'a list of [layer, head]')}")
        members[name] = [_place(one, shape, f"{where}.{i}") for i, one in enumerate(places)]
        for place in members[name]:
            if place in owners:
                layer, head = place
                raise ConfigurationError(
                    f"{where}: given layer {layer}, head {head}, as cluster {owners[place]} is, expected it once"
                )
            owners[place] = name
    return members


def _place(given: object, shape: ModelShape, where: str) -> tuple[int, int]:
    match given:
        case [int(layer), int(head)] if 0 <= layer < shape.num_layers and 0 <= head < shape.num_heads:
            return int(layer), int(head)
    raise ConfigurationError(f"{where}: {unexpected(given, f'[layer, head] of {shape}')}")


def _shared(given: object, clusters: dict[str, list[tuple[int, int]]], source: str) -> list[str]:
    if not isinstance(given, list):
        raise ConfigurationError(f"{source}: shared_clusters: {unexpected(given, 'a list of clusters')}")
    for i, name in enumerate(given):
        if not isinstance(name, str) or name not in clusters:
            raise ConfigurationError(f"{source}: shared_clusters.{i}: {unexpected(name, 'the name of a cluster')}")
    return list(dict.fromkeys(given))
