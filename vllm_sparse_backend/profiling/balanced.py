# SPDX-License-Identifier: Apache-2.0
"""Settings for all heads of a model at the least cost under a bound of their mean error (``best.py`` says how).

A bound of its own lets every head come as near to it as it can, and none has anything of what another leaves. With a
bound of the mean beside it, error goes to the heads where it saves most: those that lose little give more, those whose
error grows fast give less. What heads look up stays guarded by the bounds of their worst queries.

One price holds for the whole model, so every layer is judged before the first is chosen for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from statistics import fmean

from vllm_sparse_backend.profiling import best
from vllm_sparse_backend.profiling.costs import Costs
from vllm_sparse_backend.profiling.job import Job, Search
from vllm_sparse_backend.profiling.measure import Bound, Figures, LayerJudge
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense


def search_of(job: Job, among: Sequence[Method], bounds: Mapping[str, Bound], costs: Costs | None = None) -> Search:
    """``best.search`` among these, at the price that each bound's mean asks for; ``costs``: the job's unless given."""
    if all(math.isinf(bound.mean) for bound in bounds.values()):
        return partial(best.search, among=among, costs=costs)
    layers = judged_everywhere(job, among)

    @cache
    def price(bound: Bound) -> float:
        # Layers that never go sparse have no error, and are part of the mean.
        most_mean = bound.mean * job.shape.num_layers / len(layers)
        by = costs or job.costs
        found = best.price_of([best.holding(figures, bound) for figures in layers], by, most_mean)
        # What does not hold in company is chosen anew, and may lose more than it did when the price was found.
        while _mean_together(job, partial(best.search, bound=bound, among=among, costs=by, price=found)) > most_mean:
            found = best.dearer(found, by.layer.dense_ms / job.shape.num_heads)
        return found

    def search(judge: LayerJudge, bound: Bound) -> list[Method]:
        return best.search(judge, bound, among, costs, price(bound))

    return search


def _mean_together(job: Job, search: Callable[[LayerJudge], list[Method]]) -> float:
    """Of all heads of the layers that can go sparse, each layer judged as the search chooses for it."""
    errors = []
    for layer in job.layers:
        judge = job.judge(layer)
        methods = search(judge)
        is_dense = all(isinstance(method, Dense) for method in methods)
        errors += [0.0] * len(methods) if is_dense else [of.error for of in judge.judge(methods)]
        judge.save()
    return fmean(errors)


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
