# SPDX-License-Identifier: Apache-2.0
"""Cluster files of SharePrefill: shareprefill/clusters/sharing_lookup/*.json in its authors' repository.

``{"clusters": {"ID": [[layer, head], ...]}, "shared_clusters": ["ID", ...]}``. Their code lets heads share within the
clusters that ``shared_clusters`` names and within no other, and treats a head of no cluster like those: all of these
become noise (−1) here. Clusters keep their numbers.

The thresholds stand in no file. The profile has the paper's (δ = 0.3, τ = 0.2, γ = 0.9): those of the authors' code
(similarity_threshold 0.5 and so on) are of another comparison, see ``methods/share_prefill/method.py``.
"""

from collections import Counter
from itertools import chain
from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr

from vllm_sparse_backend.settings.errors import Section, not_one_of
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_kernels.methods.base import Method

TOOL = "SharePrefill's"
FORM = "SharePrefill's clusters, an object with clusters and shared_clusters"

Number = Annotated[StrictStr, Field(pattern="^(0|[1-9][0-9]{0,5})$")]
Count = Annotated[StrictInt, Field(ge=0)]


class File(Section):
    """What such a file holds."""

    clusters: dict[Number, list[tuple[Count, Count]]]
    """Each one's layers and heads."""
    shared_clusters: list[StrictStr]


def fits(content: Any) -> bool:
    return isinstance(content, dict) and bool(File.model_fields.keys() & content.keys())


def read(content: dict[str, Any], shape: ModelShape) -> tuple[list[list[Method]], str]:
    file = File.read(content, "")
    for (layer, head), count in Counter(chain.from_iterable(file.clusters.values())).items():
        if count > 1 or layer >= shape.num_layers or head >= shape.num_heads:
            given = f"layer {layer}, head {head}, {count} times"
            raise ValueError(f"clusters: given {given}, expected those of {shape}, once each")
    if unknown := set(file.shared_clusters) - set(file.clusters):
        raise ValueError(f"shared_clusters: {not_one_of(min(unknown), file.clusters)}")
    methods = [[make_method("share_prefill", {})] * shape.num_heads for _ in range(shape.num_layers)]
    for name in file.shared_clusters:
        for layer, head in file.clusters[name]:
            methods[layer][head] = make_method("share_prefill", {"cluster": int(name)})
    return methods, f": {len(set(file.shared_clusters))} of its {len(file.clusters)} clusters share"
