# SPDX-License-Identifier: Apache-2.0
"""Profiles from JSON files that other tools saved: MInference's patterns and SharePrefill's clusters."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr

from vllm_sparse_backend.calibration.external import readable
from vllm_sparse_backend.config.errors import ConfigurationError, Section, not_one_of, refusal, unexpected
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import Profile
from vllm_sparse_kernels.methods.base import Method

PATTERNS: dict[str, Callable[[int, int], Method]] = {
    "vertical_and_slash": lambda a, b: make_method("vertical_slash", {"vertical_tokens": a, "slash_tokens": b}),
    "stream_llm": lambda a, b: make_method("a_shape", {"sink_tokens": a, "local_tokens": b}),
    "block_sparse": lambda a, b: make_method("block_sparse", {"top_blocks": 100}),
}

Count = Annotated[StrictInt, Field(ge=0)]


class ClusterFile(Section):
    """Contents of SharePrefill's cluster file."""

    clusters: dict[Annotated[StrictStr, Field(pattern="^(0|[1-9][0-9]{0,5})$")], list[tuple[Count, Count]]]
    """Layer and head of each member, by cluster."""
    shared_clusters: list[StrictStr]


def import_profile(path: Path, model: Path) -> Profile:
    """Convert a file of MInference or SharePrefill to a profile."""
    shape = ModelShape.from_folder(model)
    with readable(path, "JSON of MInference or SharePrefill"):
        content = json.loads(read_text(path))
    if isinstance(content, list):
        tool, read = "MInference's", _minference
    elif isinstance(content, dict) and ClusterFile.model_fields.keys() & content.keys():
        tool, read = "SharePrefill's", _share_prefill
    else:
        expected = (
            "MInference's patterns, a list of one object for each layer; or SharePrefill's clusters, an object with "
            "clusters and shared_clusters"
        )
        raise refusal(str(path), content, expected)
    try:
        methods = read(content, shape)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    provenance = {"source": f"imported from {tool} {path.name}"}
    profile = Profile.of_heads(methods, provenance, format=1, model=shape)
    profile.check_model(shape, str(path))
    return profile


def _minference(content: Any, shape: ModelShape) -> list[list[Method]]:
    """Convert a file of MInference's offline search (minference/configs/*.json in its repository in August 2025).

    The file is a list with one object for each layer, ``{"HEAD": [pattern, a, b, score]}``, with heads of the whole
    model:

    * ``vertical_and_slash``: keep the ``a`` heaviest columns (tokens) and the ``b`` heaviest diagonals;
    * ``stream_llm``: keep the first ``a`` tokens (sink) and a window of ``b`` tokens (local);
    * ``block_sparse``: the authors' code keeps 100 blocks of 64 keys for each block of queries and ignores ``a`` and
      ``b`` (in their search ``a`` was a ratio, not a count). The profile does the same;
    * ``score`` is the search's own measure, which changed between its versions: recall in some files, a count of
      differing outputs in others. The profile does not contain it.
    """
    if len(content) != shape.num_layers:
        raise ValueError(f"given {len(content)} layers, expected {shape.num_layers}, as in {shape}")
    names = [str(head) for head in range(shape.num_heads)]
    methods = []
    for layer, heads in enumerate(content):
        if not isinstance(heads, dict) or heads.keys() != set(names):
            shown = ", ".join(heads) if isinstance(heads, dict) else heads
            expected = f"an object with a key for each head, 0 to {names[-1]}, as in {shape}"
            raise ValueError(f"layer {layer}: {unexpected(shown, expected)}")
        methods.append([_method(heads[name], f"layer {layer}: head {name}") for name in names])
    return methods


def _method(entry: object, place: str) -> Method:
    problem = unexpected(entry, f"[{' or '.join(PATTERNS)}, integer, integer, score]")
    match entry:
        case [str(pattern), int(a), int(b), int() | float()] if pattern in PATTERNS:
            try:
                return PATTERNS[pattern](a, b)
            except ValueError as error:
                problem = str(error)
    raise ValueError(f"{place}: {problem}")


def _share_prefill(content: Any, shape: ModelShape) -> list[list[Method]]:
    """Convert a cluster file of SharePrefill (shareprefill/clusters/sharing_lookup/*.json in its repository).

    The file is ``{"clusters": {"ID": [[layer, head], ...]}, "shared_clusters": ["ID", ...]}``. In the authors' code,
    heads share only within the clusters of ``shared_clusters``. Heads of other clusters, or of no cluster, become noise
    (−1) here. Clusters keep their numbers.

    The file has no thresholds. The profile gets the paper's thresholds (δ = 0.3, τ = 0.2, γ = 0.9). The thresholds of
    the authors' code (similarity_threshold 0.5 and so on) belong to another comparison; see
    ``methods/share_prefill/method.py``.
    """
    file = ClusterFile.read(content, "")
    for (layer, head), count in Counter(chain.from_iterable(file.clusters.values())).items():
        if count > 1 or layer >= shape.num_layers or head >= shape.num_heads:
            place = f"layer {layer}, head {head} in {count} places"
            raise ValueError(f"clusters: given {place}, expected heads of {shape}, each in at most one place")
    if unknown := set(file.shared_clusters) - set(file.clusters):
        raise ValueError(f"shared_clusters: {not_one_of(min(unknown), file.clusters)}")
    methods = [[make_method("share_prefill", {})] * shape.num_heads for _ in range(shape.num_layers)]
    for name in file.shared_clusters:
        for layer, head in file.clusters[name]:
            methods[layer][head] = make_method("share_prefill", {"cluster": int(name)})
    return methods
