# SPDX-License-Identifier: Apache-2.0
"""Builds profiles from search results: methods of all heads, their figures, and the origin of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult
from vllm_sparse_backend.calibration.job import Job
from vllm_sparse_backend.config.crossover_table import Crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.head_figures import HeadFigures, PerHead
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.profile import Level, Profile, Provenance
from vllm_sparse_backend.evaluation.report import versions
from vllm_sparse_backend.identity import PACKAGE, package_version
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense


@dataclass
class LevelResult:
    """Search result for one bound: the method of each layer and head of the whole model, with figures.

    Figures are None for layers that never run sparse, and for dense layers.
    """

    bound: Bound
    methods: list[Sequence[Method]] = field(default_factory=list)
    figures: list[list[HeadResult] | None] = field(default_factory=list)
    """Figures on the prompts."""
    held_out: list[list[HeadResult] | None] = field(default_factory=list)

    def add_layer(
        self,
        methods: Sequence[Method],
        figures: list[HeadResult] | None = None,
        held_out: list[HeadResult] | None = None,
    ) -> None:
        """Add the next layer."""
        self.methods.append(methods)
        self.figures.append(figures)
        self.held_out.append(held_out)

    def summary(self) -> dict[str, float]:
        """Summarise the held-out prompts over the heads that are not dense."""
        sparse = [
            head
            for methods, figures in zip(self.methods, self.held_out)
            for method, head in zip(methods, figures or ())
            if not isinstance(method, Dense)
        ]
        if not sparse:
            return {}
        shares = [self.bound.used_fraction(head) for head in sparse]
        figures = {
            "heads_within_bound": sum(share <= 1 for share in shares) / len(shares),
            "most_of_bound": max(shares),
            "error": fmean(head.error for head in sparse),
            "p99_error": fmean(head.p99 for head in sparse),
        }
        return {name: float(f"{value:.4g}") for name, value in figures.items()}

    @property
    def density(self) -> float:
        """Mean density over all layers' heads."""
        left_out = sum(1 - head.density for layer in self.figures for head in layer or ())
        return 1 - left_out / sum(map(len, self.methods))


def profile_of(job: Job, results: Mapping[str, LevelResult], source: str) -> Profile:
    """Build the profile from each level's result.

    Levels without a sparse head are left out, because they would equal ``exact``.
    """
    levels = {
        name: Level.of_heads(result.methods, _provenance_of_level(job, source, result))
        for name, result in results.items()
        if any(not isinstance(method, Dense) for layer in result.methods for method in layer)
    }
    if (first := next(iter(results))) not in levels:
        # If another level took its place, it would become the default level of requests.
        numbers = ":".join(f"{x:g}" for x in results[first].bound.numbers.values())
        why = f"{source}: no head meets the bound {numbers} of level {first} and saves time"
        raise ConfigurationError(f"{why}; use a larger bound, or longer prompts")
    first_level, *others = levels
    return _profile(job, levels[first_level], level=first_level, levels={name: levels[name] for name in others})


def profile_of_heads(job: Job, methods: Sequence[Sequence[Method]], source: str) -> Profile:
    """Build a profile of methods that were not judged."""
    return _profile(job, Level.of_heads(methods, provenance_of(job, source)))


def _profile(job: Job, own: Level, **names: object) -> Profile:
    own_fields = {field: getattr(own, field) for field in Level.model_fields}
    min_tokens = job.served.min_tokens if job.sets_min_tokens else None
    return Profile.model_validate({"format": 1, "model": job.shape, "min_tokens": min_tokens, **own_fields, **names})


def with_default_crossover(profile: Profile, job: Job, table: Crossover) -> Profile:
    """Set the lengths from which the default method was measured to be faster than dense attention on this device.

    No head of a profile of `profile best` takes longer than with the default method, which is one of its candidates.
    The other methods were measured in all heads at once, and would keep longer prompts dense.
    """
    shape, default = job.shape, make_method("default", {})
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    engines = () if job.card is None else job.card.engines
    entries = (entry for engine in engines for entry in table.find(job.device_name, engine, default, heads))
    fastest = next((entry for entry in entries if entry.pays), None)
    if fastest is None:
        return profile
    lengths = {"min_tokens": fastest.min_tokens, "min_query_tokens": fastest.min_query_tokens}
    return profile.model_copy(update=lengths)


def provenance_of(job: Job, source: str) -> Provenance:
    """Record how a profile was made: versions, device and prompts."""
    return Provenance(
        tool_version=package_version(PACKAGE),
        prompts_sha256=job.prompts.sha256,
        device=job.device_name,
        source=source,
        seed=job.seed,
        versions=versions(),
    )


def _provenance_of_level(job: Job, source: str, result: LevelResult) -> Provenance:
    """Add a search's bounds and figures."""
    rows: dict[str, PerHead] = {
        name: [[getattr(head, of_name) for head in layer] if layer else None for layer in result.figures]
        for name, of_name in (("density", "density"), ("error", "error"), ("p99_error", "p99"))
    }
    figures = {
        "bounds": result.bound.numbers,
        "density": float(f"{result.density:.4g}"),
        "figures": HeadFigures.of_heads(**rows),
        "held_out": result.summary(),
    }
    return provenance_of(job, source).model_copy(update=figures)
