# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: clusters the heads on the first prompt, and finds for each head the γ that meets a bound.

The paper (arXiv:2505.19578) has one γ for all heads, and all members of a cluster share patterns. The search per head
is our addition, and uses the paper's δ and τ. The pattern that a head takes over depends on heads of the same layer and
of earlier layers. γ does not affect which heads share: only the clusters do (``methods/share_prefill/method.py``).
Nothing depends on later layers.

1. *Survey*, with all clusters as computed. For each head, find the least γ of its own vertical-slash that meets the
   bound, and then the least γ as a member of its cluster. Members that are dense at any γ are pivots.
2. *Choice.* A head leaves its cluster if it misses the bound there, or if it keeps at least as many pairs as alone. A
   cluster is dissolved unless its heads save more than its pivots cost. Pivots have the γ of their own lines, for
   prompts in which they are not pivots. Outside a cluster, a head is dense if no γ meets the bound and leaves
   out at least a tenth.
3. The whole model is then judged as chosen (``calibration_loop.py``): heads that miss the bound leave their cluster,
   and those that still miss it become dense. A cluster with one remaining member is dissolved, and the model is judged
   again.

``PaperSharing`` is the paper's own procedure instead, without a search and without a bound.

A server with several tensor-parallel ranks shares only within each rank. The figures here are for one rank.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.head_clusters import DISTANCE, MIN_HEADS, Clusters, head_clusters, map_side
from vllm_sparse_backend.calibration.head_errors import Bound, LayerJudge
from vllm_sparse_backend.calibration.layer_walk import needs_others, walk_layers
from vllm_sparse_backend.calibration.search import LEAST_SPARSITY, IsAllowed, Search, halved, sparse_enough, sparsest
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill


@dataclass(frozen=True)
class SharingOptions:
    """Options of one head: its own pattern, or its cluster's."""

    alone: Method
    """The head's method outside any cluster."""
    shared: SharePrefill | None = None
    """The head's method in its cluster, for a pivot, or if it meets the bound and keeps no more pairs than alone."""
    saved: float = 0.0
    """Share of pairs that sharing saves; negative for a pivot."""


class SharePrefillSearch(Search):
    """Search for each head's best option: its cluster's pattern, its own lines, or dense."""

    def __init__(self, job: Job, bound: Bound, ladder: Sequence[SharePrefill], distance: float | None = None) -> None:
        self.clusters, self.distance = find_clusters(job, distance)
        self.others = [replace(ladder[0], cluster=number) for number in cluster_numbers(self.clusters)]
        fine = halved(halved(ladder))

        def survey(judge: LayerJudge) -> tuple[list[SharePrefill], list[SharingOptions]]:
            of_heads = self.clusters[judge.layer]
            return [replace(ladder[0], cluster=number) for number in of_heads], survey_layer(
                judge, bound, fine, of_heads
            )

        choices_by_layer = walk_layers(job, "prompts", self.others, survey)[1]
        self.choices = [of_layer or [SharingOptions(Dense())] * job.shape.num_heads for of_layer in choices_by_layer]
        self.left = worthwhile_clusters(self.choices)
        self._require_any()

    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        """Choose each head's method from its options. The cluster's pattern comes first."""
        chosen: list[Method] = []
        for head, choice in enumerate(self.choices[judge.layer]):
            shared = [choice.shared] if choice.shared and choice.shared.cluster in self.left else []
            chosen.append(next((method for method in (*shared, choice.alone) if is_allowed(head, method)), Dense()))
        return chosen

    def should_repeat(self, methods: Sequence[Sequence[Method]], mean_error: float) -> bool:
        """Dissolve clusters with a single remaining head, which has no partner to share with."""
        members = Counter(method.sharing for method in chain.from_iterable(methods) if needs_others(method))
        numbers = {
            method.cluster for method, count in members.items() if count > 1 and isinstance(method, SharePrefill)
        }
        lonely, self.left = self.left - numbers, self.left & numbers
        self._require_any()
        return bool(lonely)

    def _require_any(self) -> None:
        if self.left:
            return
        heads = [number for of_layer in self.clusters for number in of_layer]
        clustered = [number for number in heads if number != NOISE]
        options = [option for option in chain.from_iterable(self.choices) if option.shared]
        pivots = sum(option.saved < 0 for option in options)
        raise ConfigurationError(
            f"--method share_prefill: given {len(clustered)} of {len(heads)} heads in clusters (clusters: "
            f"{len(cluster_numbers(self.clusters))}, --distance {self.distance:g}), expected a cluster whose heads "
            "hold the bound and together keep fewer pairs by sharing than by their own vertical-slash (heads that hold "
            f"the bound by sharing and keep at most as many: {len(options) - pivots}; dense pivots that they would "
            f"need: {pivots}); use --method flex_vertical_slash, a larger --level or --distance, or --method "
            "share_prefill+paper, which writes the paper's clusters and thresholds without a bound"
        )


class PaperSharing(Search):
    """The paper's procedure: every head is in the cluster of its attention map, with the paper's γ, δ and τ.

    Heads outside clusters use vertical-slash with the same γ. As in the paper, no error is bounded. Figures on held-out
    prompts are still measured.
    """

    def __init__(self, job: Job, bound: Bound, distance: float | None = None) -> None:
        """Cluster the heads."""
        self.clusters, distance = find_clusters(job, distance)
        self.others = [SharePrefill(cluster=number) for number in cluster_numbers(self.clusters)]
        if not self.others:
            raise ConfigurationError(
                f"--method share_prefill+paper: found no cluster at --distance {distance:g}, expected at least "
                f"{MIN_HEADS} heads with similar attention; use a larger --distance, or --method flex_vertical_slash"
            )

    def choose(self, judge: LayerJudge, is_allowed: IsAllowed) -> list[Method]:
        """Return the paper's method for each head."""
        methods = [SharePrefill(cluster=number) for number in self.clusters[judge.layer]]
        return [method if is_allowed(head, method) else Dense() for head, method in enumerate(methods)]


def find_clusters(job: Job, distance: float | None) -> tuple[Clusters, float]:
    """Return the clusters of a model's heads on the first prompt, and the linkage distance."""
    distance = DISTANCE if distance is None else distance
    side = map_side(min(map(len, job.prompts.prompts)), job.device)
    clusters = job.load_or_make(
        f"clusters-{distance:g}",
        Clusters,
        lambda: head_clusters(job.captures["prompts"][0], job.device, side, distance, job.progress),
    )
    return clusters, distance


def cluster_numbers(clusters: Clusters) -> list[int]:
    """Return the numbers of all clusters, ascending."""
    return sorted({*chain.from_iterable(clusters)} - {NOISE})


def survey_layer(
    judge: LayerJudge, bound: Bound, ladder: Sequence[SharePrefill], clusters: Sequence[int]
) -> list[SharingOptions]:
    """Find the options of each head of a layer."""
    alone = sparsest(judge, bound, dict.fromkeys(range(judge.num_heads), ladder))
    choices = [SharingOptions(sparse_enough(judged)) for judged in alone.values()]
    if set(clusters) == {NOISE}:
        return choices
    members = {head: [replace(setting, cluster=number) for setting in ladder] for head, number in enumerate(clusters)}
    for head, judged in sparsest(judge, bound, members).items():
        alone_method, number = choices[head].alone, clusters[head]
        saved = (1.0 if isinstance(alone_method, Dense) else alone[head].figures.density) - judged.figures.density
        if number == NOISE:
            continue
        if judged.method == members[head][0] and judged.sparsity < LEAST_SPARSITY:  # a pivot
            lines = alone_method if isinstance(alone_method, SharePrefill) else ladder[-1]
            choices[head] = SharingOptions(alone_method, replace(lines, cluster=number), saved)
        elif isinstance(member := sparse_enough(judged), SharePrefill) and saved >= 0:
            choices[head] = SharingOptions(alone_method, member, saved)
    return choices


def worthwhile_clusters(choices: Sequence[Sequence[SharingOptions]]) -> set[int]:
    """Return the clusters of at least two heads that save more than they cost."""
    saved: dict[int, list[float]] = defaultdict(list)
    for choice in chain.from_iterable(choices):
        if choice.shared:
            saved[choice.shared.cluster].append(choice.saved)
    return {number for number, savings in saved.items() if len(savings) > 1 and sum(savings) > 0}
