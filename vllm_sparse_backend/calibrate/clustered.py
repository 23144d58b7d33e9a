# SPDX-License-Identifier: Apache-2.0
"""SharePrefill by one command: clusters of the first prompt's heads, and the γ that holds a bound with them.

Which pattern a head takes over depends on heads of earlier layers, so no head can be judged by itself: what is bound
here is the error of whole layers, ‖O − Õ‖₂ / ‖O‖₂, mean over layers, on the prompt where it is largest; and γ, the one
of the thresholds that costs, is the same for all heads. The paper's δ and τ stay.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vllm_sparse_backend.bench.report import write_json
from vllm_sparse_backend.calibrate import share_prefill
from vllm_sparse_backend.calibrate.job import Job, given_provenance
from vllm_sparse_backend.evaluate.capture import Capture
from vllm_sparse_backend.evaluate.clusters import head_clusters, plan_of
from vllm_sparse_backend.evaluate.quality import Asked, measure_plans
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.profile import Profile
from vllm_sparse_kernels.select.share_prefill import NOISE, SharePrefill

SOURCE = "sparse-prefill profile cluster"


class Whole(NamedTuple):
    """Of all layers under one γ."""

    error: float
    density: float


def cluster(job: Job, max_error: float, distance: float, side: int | None = None) -> Profile:
    """``distance``: where the hierarchy of heads is cut. ``side``: of the maps; the paper's, or what a prompt allows.

    Raises ConfigurationError where no cluster has two heads, or the bound holds with no γ.
    """
    job.enter()
    side = side or share_prefill.map_side(min(map(len, job.prompts.prompts)))
    clusters = _remembered(
        job, f"clusters-{side}-{distance:g}",
        lambda: head_clusters(job.captures("prompts")[0], job.device, side, distance),
    )  # fmt: skip
    found = tuple(tuple(heads) for heads in clusters)
    settings = [replace(one, cluster=NOISE) for one in share_prefill.ladder() if isinstance(one, SharePrefill)]
    job.tell.begin("prompts", len(job.prompts.prompts) + len(job.held_out.prompts))
    measure = partial(_measure, job, found, f"clusters-{side}-{distance:g}")
    on_prompts = measure(settings, "prompts")
    holding = [i for i, of in enumerate(on_prompts) if of.error <= max_error]
    if not holding:
        least = min(of.error for of in on_prompts)
        raise ConfigurationError(f"{SOURCE}: the least error is {least:.3g}: expected an --error of at least that")
    chosen = min(holding, key=lambda i: on_prompts[i].density)
    held_out = measure([settings[chosen]], "held-out")[0]
    profile = share_prefill.profile_of(found, job.shape, settings[chosen])
    provenance = given_provenance(job, SOURCE).model_copy(
        update={
            "bounds": {"error": max_error, "distance": distance, "side": float(side)},
            "density": float(f"{on_prompts[chosen].density:.4g}"),
            "held_out": {name: float(f"{value:.4g}") for name, value in held_out._asdict().items()},
        }
    )
    profile = profile.model_copy(update={"provenance": provenance})
    profile.check_model(job.shape, SOURCE)
    return profile


def _measure(
    job: Job, clusters: share_prefill.Clusters, name: str, settings: Sequence[SharePrefill], kind: str
) -> list[Whole]:
    """Of each setting: the error of the prompt where it is largest, mean density."""

    def make() -> list[list[Whole]]:
        return [_on_prompt(job, captured, clusters, settings) for captured in job.captures(kind)]

    gammas = "-".join(f"{one.gamma:g}" for one in settings)
    prompts = [[Whole(*of) for of in prompt] for prompt in _remembered(job, f"{kind}-{name}-{gammas}", make)]
    each = list(zip(*prompts, strict=True))
    return [Whole(max(of.error for of in one), sum(of.density for of in one) / len(one)) for one in each]


def _on_prompt(
    job: Job, captured: Capture, clusters: share_prefill.Clusters, settings: Sequence[SharePrefill]
) -> list[Whole]:
    with tempfile.TemporaryDirectory() as aside:
        params = [{"gamma": one.gamma} for one in settings]
        plans = [plan_of("share_prefill", of, job.shape, clusters, Path(aside)) for of in params]
    asked = [Asked(plan, with_output=True) for plan in plans]
    measured = measure_plans(captured, asked, job.served.chunk_tokens, job.device, (), min_tokens=job.served.min_tokens)
    job.tell.step()
    return [Whole(kept.mean_error, kept.mean_density) for kept in measured.kept]


def _remembered(job: Job, name: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, from the job's folder if it is there."""
    path = job.folder / f"{name}.json"
    if not path.exists():
        write_json(path, make())
    return json.loads(path.read_text(encoding="utf-8"))
