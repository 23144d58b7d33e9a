# SPDX-License-Identifier: Apache-2.0
"""Settings for all heads of a model at the least cost under a bound of their mean error (``best.py`` says how).

A bound of its own lets every head come as near to it as it can, and none has anything of what another leaves. With a
bound of the mean beside it, error goes to the heads where it saves most: those that lose little give more, those whose
error grows fast give less. What heads look up stays guarded by the bounds of their worst queries.

One price holds for the whole model, so every layer is judged before the first is chosen for.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial

from vllm_sparse_backend.calibrate import best
from vllm_sparse_backend.calibrate.costs import Costs
from vllm_sparse_backend.calibrate.job import Job, Search
from vllm_sparse_backend.calibrate.measure import Bound, Figures, LayerJudge
from vllm_sparse_kernels.select.base import Method


def search_of(job: Job, among: Sequence[Method], bounds: Mapping[str, Bound], costs: Costs | None = None) -> Search:
    """``best.search`` among these, at the price that each bound's mean asks for; ``costs``: the job's unless given."""
    if all(math.isinf(bound.mean) for bound in bounds.values()):
        return partial(best.search, among=among, costs=costs)
    layers = judged_everywhere(job, among)

    @cache
    def price(bound: Bound) -> float:
        # Layers that never go sparse have no error, and are part of the mean.
        most_mean = bound.mean * job.shape.num_layers / len(layers)
        return best.price_of([best.holding(figures, bound) for figures in layers], costs or job.costs, most_mean)

    def search(judge: LayerJudge, bound: Bound) -> list[Method]:
        return best.search(judge, bound, among, costs, price(bound))

    return search


def judged_everywhere(job: Job, among: Sequence[Method]) -> list[dict[Method, list[Figures]]]:
    """Of every layer that can go sparse all heads' figures under each method."""
    job.enter()
    job.tell.begin("layers", len(job.layers))
    found = []
    for layer in job.layers:
        judge = job.judge(layer)
        found.append(best.judged(judge, among))
        judge.save()
        job.tell.step()
    return found
