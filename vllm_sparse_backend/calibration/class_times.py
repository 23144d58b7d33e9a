# SPDX-License-Identifier: Apache-2.0
"""The gain of each class of heads from a profile. A class has the heads of one kind of method (``kind_of``).

``profile best`` chose the methods by the same times (``head_costs.py``): selection and attention of the first prompt,
in all layers that can run sparse.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.head_costs import Costs, head_ms, kind_of
from vllm_sparse_backend.config.profile import Level
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense


class HeadTime(NamedTuple):
    """One head of one layer."""

    method: Method
    density: float
    dense_ms: float
    ms: float


@dataclass(frozen=True)
class ClassTimes:
    """The heads of one class, over all layers."""

    kind: Method
    num_heads: int
    num_settings: int
    density: float
    """Mean share of causal pairs that the heads keep."""
    share_before: float
    """Time of these heads under dense attention, divided by the time of all heads under dense attention."""
    share_after: float
    """Time of these heads under the profile, with their selection, divided by the same time."""


def times_of_classes(job: Job, level: Level) -> list[ClassTimes]:
    """Return the times of each class of heads."""
    num_heads = job.shape.num_heads
    figures = level.provenance.figures
    densities = figures.rows("density", job.shape) if figures is not None else [None] * job.shape.num_layers
    heads: list[HeadTime] = []
    for layer in job.layers:
        is_dense = layer in level.dense_layers
        methods = [Dense()] * num_heads if is_dense else level.methods_of(layer, num_heads)
        heads += head_times(methods, densities[layer] or [1.0] * num_heads, job.costs)
    return _classes(heads)


def head_times(methods: Sequence[Method], densities: Sequence[float], costs: Costs) -> list[HeadTime]:
    """Divide a layer's time among its heads.

    Heads that are selected together divide the fixed time of their selection equally, and all heads divide the fixed
    time of attention.
    """
    num_heads = len(methods)
    dense_ms = costs.layer.dense_ms / num_heads
    if all(isinstance(method, Dense) for method in methods):
        return [HeadTime(method, 1.0, dense_ms, dense_ms) for method in methods]
    shared_ms = {
        kind: 0.0 if isinstance(kind, Dense) else costs.of(kind).group_ms / count
        for kind, count in Counter(map(kind_of, methods)).items()
    }
    base_ms = costs.layer.base_ms / num_heads
    return [
        HeadTime(method, density, dense_ms, base_ms + shared_ms[kind_of(method)] + head_ms(costs, method, density))
        for method, density in zip(methods, densities, strict=True)
    ]


def _classes(heads: Iterable[HeadTime]) -> list[ClassTimes]:
    members: dict[Method, list[HeadTime]] = defaultdict(list)
    for head in heads:
        members[kind_of(head.method)].append(head)
    whole_ms = sum(head.dense_ms for of_kind in members.values() for head in of_kind)
    classes = [
        ClassTimes(
            kind=kind,
            num_heads=len(of_kind),
            num_settings=len({head.method for head in of_kind}),
            density=fmean(head.density for head in of_kind),
            share_before=sum(head.dense_ms for head in of_kind) / whole_ms,
            share_after=sum(head.ms for head in of_kind) / whole_ms,
        )
        for kind, of_kind in members.items()
    ]
    return sorted(classes, key=lambda of_kind: -of_kind.num_heads)
