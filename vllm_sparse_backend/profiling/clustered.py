# SPDX-License-Identifier: Apache-2.0
"""SharePrefill by one command: clusters of the first prompt's heads, and for each head the γ that holds a bound.

The paper (arXiv:2505.19578) has one γ for all heads, and its clusters hold wherever heads are alike. What follows is
ours; its δ and τ stay. Which pattern a head takes over depends on heads of its own and of earlier layers, so the model
is judged as a whole, layers in order, each with what those before have left (``flow.py``). Two things make that short:
who shares depends on clusters, never on γ (``methods/share_prefill/method.py``), and nothing depends on later layers.

1. *Survey*, with all clusters as they were found. Each head is asked for the least γ of its own vertical-slash that
   holds the bound, then, as a member of its cluster, for the least γ of whatever it does there; both by bisection, all
   heads of a layer at a time. Members that are dense whatever their γ are pivots. Under a bound of the mean of all
   heads every head is asked for all of ``priced_settings`` instead, means in place of dropped blocks among them, and
   takes what costs least in pairs and error, at one price for the whole model (``best.py``); what it saves is counted
   so too.
2. *Choice.* A head leaves its cluster if it does not hold the bound there or keeps no less than by itself. A cluster is
   dissolved if its pivots cost more than its other heads save. Pivots have the γ of their own lines, which they take in
   prompts where they are none. By itself a head is dense where no γ holds or less than a tenth is left out.
3. *Settling.* The whole model is judged as chosen. In each layer, before the next one, heads that do not hold the bound
   leave their cluster, and those that still do not become dense, until all hold; a cluster that is left with one member
   is dissolved and all judged again. The last pass of each layer is over the very profile that is written.

Passes over a layer: 15 in the survey, 7 where no head has a cluster (65 and 32 under a bound of the mean); at most two
for each head to settle, though hardly ever more than two in all, and as many again for each cluster that is dissolved
there; one of the held-out prompts.

**Memory** is that of clustering (``share_prefill.py``), and after it that of one layer (``judge.py``) and of what is
handed on (``flow.py``).

The clusters that are found, and all outcomes, lie in the job's folder: a run that was broken off goes on from them, and
ends with the same bytes. (A server on several tensor-parallel ranks shares within each rank only; what is judged here
is one rank's.)
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any, TypeVar

from vllm_sparse_backend.measure.report import write_json
from vllm_sparse_backend.profiling.best import dearer, least_price
from vllm_sparse_backend.profiling.clusters import head_clusters
from vllm_sparse_backend.profiling.flex_vertical_slash import GAMMAS
from vllm_sparse_backend.profiling.flow import Flow
from vllm_sparse_backend.profiling.job import Found, Job, mean_error, profile_of
from vllm_sparse_backend.profiling.measure import Bound, Figures, LayerJudge
from vllm_sparse_backend.profiling.share_prefill import BASES, SHRINK, Clusters, map_side, require_scipy
from vllm_sparse_backend.profiling.sparsest import LEAST_SPARSITY, Judged, cheapest, for_all, sparse_enough, sparsest
from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected
from vllm_sparse_backend.settings.profile import Level, Profile
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

COMMAND = "sparse-prefill profile cluster"

PRICED_GAMMAS = (
    0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.875, 0.9, 0.925, 0.95, 0.965, 0.98, 0.985, 0.99, 0.995, 0.998
)  # fmt: skip
"""What heads choose γ from under a bound of the mean."""

Written = TypeVar("Written", bound=Level)


@dataclass(frozen=True)
class Choice:
    """What one head may do; of each the share of pairs that it keeps, with what its error costs, and that error."""

    own: Method
    """By itself."""
    own_cost: float
    cluster: int = NOISE
    shared: Method | None = None
    """In its cluster, if it holds the bound there and costs no more than by itself; always where it is a pivot."""
    shared_cost: float = 1.0
    is_pivot: bool = False
    own_error: float = 0.0
    shared_error: float = 0.0

    @property
    def saved(self) -> float:
        """A pivot's is a cost."""
        return self.own_cost - self.shared_cost if self.shared else 0.0

    def within(self, clusters: Set[int]) -> Method:
        """What it does if these clusters are left."""
        return self.shared if self.shared and self.cluster in clusters else self.own

    def error_within(self, clusters: Set[int]) -> float:
        return self.shared_error if self.shared and self.cluster in clusters else self.own_error


def priced_settings(base: SharePrefill) -> list[SharePrefill]:
    """What heads choose from under a bound of the mean, but for clusters: as for other methods without means, and with
    (``ladders.settings_of``). A pivot drops nothing, and means are nothing to what is handed on. What means take counts
    nothing here, where it does for others (``PairCosts``): what a head keeps is all that is priced."""
    plain = [replace(base, gamma=gamma, cluster=NOISE) for gamma in PRICED_GAMMAS]
    return plain + [replace(one, block_means=True) for one in plain]


class InClusters:
    """A judge of heads as members of their clusters, whatever cluster is asked about."""

    def __init__(self, judge: LayerJudge, clusters: Sequence[int]) -> None:
        self.judged, self.clusters = judge, clusters
        self.layer, self.num_heads, self.costs = judge.layer, judge.num_heads, judge.costs

    def judge(self, methods: Sequence[Method]) -> list[Figures]:
        return self.judged.judge([_member(one, of) for one, of in zip(methods, self.clusters, strict=True)])


class Recalled:
    """What a judge has said, kept by methods: asked again, nothing is read or reckoned."""

    def __init__(self, judge: LayerJudge) -> None:
        self.layer, self.num_heads, self.costs = judge.layer, judge.num_heads, judge.costs
        self.ask: Callable[[Sequence[Method]], list[Figures]] | None = judge.judge
        """None where all has been asked."""
        self.known: dict[tuple[Method, ...], list[Figures]] = {}

    def judge(self, methods: Sequence[Method]) -> list[Figures]:
        if (key := tuple(methods)) not in self.known:
            assert self.ask is not None
            self.known[key] = self.ask(methods)
        return self.known[key]


def cluster(
    job: Job,
    bounds: Mapping[str, Bound],
    distance: float,
    side: int | None = None,
    method: str = "share_prefill",
    margin: float = 0.0,
    unseen: bool = False,
) -> Profile:
    """The profile, with a level for each bound; ``margin`` is the share of them that is left to unseen prompts, and
    ``unseen`` whether they are left what the prompts tell of that too (``Bound.unseen``).

    ``distance``: where the hierarchy of heads is cut. ``side``: of the maps; the paper's, or what a prompt allows.
    ``method``: a name of ``BASES``. Raises ConfigurationError where no two heads gain by sharing, or no head of any
    layer holds a bound.
    """
    side = _checked(job, distance, side)
    job.enter()
    job.tell.say("clusters")
    clusters = _remembered(
        job, f"clusters-{side}-{distance:g}",
        lambda: head_clusters(job.captures("prompts")[0], job.device, side, distance),
    )  # fmt: skip
    job.tell.begin("layers", (len(job.layers) + job.shape.num_layers + 2) * len(bounds))
    found = {
        name: _search(job, BASES[method], clusters, bound, bound.less(margin, unseen)) for name, bound in bounds.items()
    }
    profile = profile_of(job, found, COMMAND if method == "share_prefill" else f"{COMMAND} --method {method}")
    levels = {name: _with_cut(level, distance, side) for name, level in profile.levels.items()}
    profile = _with_cut(profile.model_copy(update={"levels": levels}), distance, side)
    profile.check_model(job.shape, COMMAND)
    return profile


def _checked(job: Job, distance: float, side: int | None) -> int:
    """The side of maps. Raises ConfigurationError before anything is captured."""
    require_scipy()
    shortest = min(map(len, job.prompts.prompts))
    if not distance > 0:
        raise ConfigurationError(f"--distance: {unexpected(distance, 'a number above 0')}")
    if side is not None and (side % SHRINK or not SHRINK <= side <= shortest):
        expected = f"a multiple of {SHRINK}, from {SHRINK} to the {shortest} tokens of the shortest prompt"
        raise ConfigurationError(f"--side: {unexpected(side, expected)}")
    return map_side(shortest) if side is None else side


def _with_cut(level: Written, distance: float, side: int) -> Written:
    bounds = (level.provenance.bounds or {}) | {"distance": distance, "side": float(side)}
    return level.model_copy(update={"provenance": level.provenance.model_copy(update={"bounds": bounds})})


def _search(job: Job, base: SharePrefill, clusters: Clusters, bound: Bound, within: Bound) -> Found:
    company = company_of(base, clusters)
    known: dict[int, Recalled] = {}

    def survey(price: float | None) -> list[list[Choice]]:
        return _survey(job, Flow(job, "prompts", company), base, clusters, within, price, known)

    def holds(price: float) -> bool:
        surveyed = survey(price)
        left = worth(surveyed)
        return fmean(one.error_within(left) for one in chain.from_iterable(surveyed)) <= within.mean

    price = least_price(holds, 1.0) if math.isfinite(within.mean) else None
    while True:
        methods = _settled(job, company, survey(price), within)
        figures = _figures(job, Flow(job, "prompts", company), methods)
        # Settling takes heads out of what their price was found for, and so may miss the mean.
        if price is None or mean_error(figures, job.shape.num_heads) <= within.mean:
            break
        price = dearer(price, 1.0)
    return Found(bound, methods, figures, _figures(job, Flow(job, "held-out", company), methods))


def _settled(
    job: Job, company: Sequence[SharePrefill], choices: Sequence[Sequence[Choice]], bound: Bound
) -> list[list[Method]]:
    """What is left of the choices once all heads hold the bound, in clusters of two heads or more."""
    left = worth(choices)
    while True:
        methods = _settle(job, Flow(job, "prompts", company), choices, left, bound)
        members = Counter(chain.from_iterable(map(clusters_of, methods)))
        if left <= {number for number, count in members.items() if count > 1}:
            break
        left = {number for number in left if members[number] > 1}
    if not left:
        raise ConfigurationError(
            f"{COMMAND}: no two heads keep less by sharing within the bound, and without that SharePrefill is "
            "flex_vertical_slash: expected a larger --level, or --distance, or profile calibrate --method "
            "flex_vertical_slash"
        )
    return methods


def _survey(
    job: Job,
    flow: Flow,
    base: SharePrefill,
    clusters: Clusters,
    bound: Bound,
    price: float | None,
    known: dict[int, Recalled],
) -> list[list[Choice]]:
    """``known``: what layers' judges have said, filled with the first survey. A price is looked for among that."""
    choices = []
    for layer in range(job.shape.num_layers):
        if layer not in job.layers:
            choices.append([Choice(Dense(), 1.0)] * job.shape.num_heads)
            flow.add([Dense()] * job.shape.num_heads)
            continue
        if layer in known:
            choices.append(survey_layer(known[layer], bound, base, clusters[layer], price))
        else:
            judge = flow.judge()
            known[layer] = Recalled(judge)
            choices.append(survey_layer(known[layer], bound, base, clusters[layer], price))
            judge.save()
            known[layer].ask = None  # with what it holds of the layer
            job.tell.step()
        flow.add([_member(base, number) for number in clusters[layer]])
    return choices


def survey_layer(
    judge: LayerJudge, bound: Bound, base: SharePrefill, clusters: Sequence[int], price: float | None = None
) -> list[Choice]:
    """What each head may do; ``clusters`` has the cluster of each. ``price``: of an error of 1 in shares of the pairs,
    or None, where the least γ that holds the bound is taken whatever its error."""
    plain = [replace(base, gamma=gamma, cluster=NOISE) for gamma in (GAMMAS if price is None else PRICED_GAMMAS)]
    ladder = plain if price is None else priced_settings(base)

    def asked(judge: LayerJudge) -> dict[int, Judged]:
        if price is None:
            return sparsest(judge, bound, for_all(judge, ladder))
        return cheapest(judge, bound, ladder, price)

    choices = []
    for head, one in asked(judge).items():
        own, cost = sparse_enough(one), _cost(one.figures, price)
        if isinstance(own, Dense) or cost > 1:
            choices.append(Choice(Dense(), 1.0, clusters[head]))
        else:
            choices.append(Choice(own, cost, clusters[head], own_error=one.figures.error))
    if set(clusters) == {NOISE}:
        return choices
    members = InClusters(judge, clusters)
    sparsest_figures = members.judge(ladder[:1] * judge.num_heads)
    together = asked(members)
    for head, number in enumerate(clusters):
        if number == NOISE:
            continue
        choice = choices[head]
        if sparsest_figures[head].density > 1 - LEAST_SPARSITY:
            pivot = _member(plain[-1] if isinstance(choice.own, Dense) else choice.own, number)
            # Where it is a pivot in most rows and not in all, it loses something too.
            error = 0.0 if price is None else members.judge([pivot] * judge.num_heads)[head].error
            choices[head] = replace(choice, shared=pivot, is_pivot=True, shared_error=error)
            continue
        method, figures = sparse_enough(together[head]), together[head].figures
        if not isinstance(method, Dense) and (cost := _cost(figures, price)) <= choice.own_cost:
            member = _member(method, number)
            choices[head] = replace(choice, shared=member, shared_cost=cost, shared_error=figures.error)
    return choices


def _cost(figures: Figures, price: float | None) -> float:
    return figures.density + (price or 0.0) * figures.error


def worth(choices: Sequence[Sequence[Choice]]) -> set[int]:
    """Clusters of two heads and more, not all pivots, that cost nothing: where nothing is ever shared, nothing does."""
    members: dict[int, list[Choice]] = defaultdict(list)
    for one in chain.from_iterable(choices):
        if one.shared:
            members[one.cluster].append(one)
    return {
        number
        for number, heads in members.items()
        if len(heads) > 1 and not all(one.is_pivot for one in heads) and sum(one.saved for one in heads) >= 0
    }


def _settle(
    job: Job, flow: Flow, choices: Sequence[Sequence[Choice]], left: Set[int], bound: Bound
) -> list[list[Method]]:
    for of_layer in choices:
        judge, methods = flow.judge(), [one.within(left) for one in of_layer]
        if not all(isinstance(one, Dense) for one in methods):
            methods = settle_layer(judge, bound, methods, [one.own for one in of_layer])
            judge.save()
        flow.add(methods)
        job.tell.step()
    return flow.chosen


def settle_layer(judge: LayerJudge, bound: Bound, methods: Sequence[Method], own: Sequence[Method]) -> list[Method]:
    """``methods``, or for heads that do not hold the bound with them ``own``, or dense where they still do not."""
    chosen = list(methods)
    while True:
        figures = judge.judge(chosen)
        failing = [i for i, one in enumerate(chosen) if not isinstance(one, Dense) and not bound.holds(figures[i])]
        if not failing:
            return chosen
        for head in failing:
            chosen[head] = Dense() if chosen[head] == own[head] else own[head]


def _figures(job: Job, flow: Flow, methods: Sequence[Sequence[Method]]) -> list[list[Figures] | None]:
    found: list[list[Figures] | None] = []
    for of_layer in methods:
        if all(isinstance(one, Dense) for one in of_layer):
            found.append(None)
        else:
            judge = flow.judge()
            found.append(judge.judge(of_layer))
            judge.save()
        flow.add(of_layer)
    job.tell.step()
    return found


def company_of(base: SharePrefill, clusters: Clusters) -> list[SharePrefill]:
    """A member of each cluster: what other heads of the model may have."""
    return [_member(base, number) for number in sorted({*chain.from_iterable(clusters)} - {NOISE})]


def clusters_of(methods: Sequence[Method]) -> list[int]:
    """Those that heads are members of, once for each member."""
    return [one.cluster for one in methods if isinstance(one, SharePrefill) and one.cluster != NOISE]


def _member(method: Method, cluster: int) -> SharePrefill:
    assert isinstance(method, SharePrefill)
    return replace(method, cluster=cluster)


def _remembered(job: Job, name: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, from the job's folder if it is there."""
    path = job.folder / f"{name}.json"
    if not path.exists():
        write_json(path, make())
    return json.loads(path.read_text(encoding="utf-8"))
