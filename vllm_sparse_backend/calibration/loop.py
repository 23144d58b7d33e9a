# SPDX-License-Identifier: Apache-2.0
"""The calibration loop: goes through the layers, and lets a search choose the methods of each layer's heads.

A choice is judged as a whole: heads share an index (``block_width.py``), so methods that meet the bound separately may
miss it jointly. If a head misses the bound, the search excludes that method and chooses again, until all heads meet the
bound. The profile holds methods that were judged this way, and then judged on the held-out prompts.

A capture takes (heads + 2 · kv heads) · head_dim elements on disk for each token and layer: 13 GB for a prompt of
32,768 tokens of Llama-3.1-8B.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from vllm_sparse_backend.calibration.capture import Capture, capture_prompts
from vllm_sparse_backend.calibration.costs import Costs, measure_costs
from vllm_sparse_backend.calibration.cuda_device import Card
from vllm_sparse_backend.calibration.judge import Bound, CapturedLayer, HeadResult, LayerPrompt, Served
from vllm_sparse_backend.calibration.papers import minference, sale, sparge_attn
from vllm_sparse_backend.calibration.prompts import sha256_of
from vllm_sparse_backend.calibration.search import (
    Choose,
    choose_cheapest,
    choose_in_order,
    choose_sparsest,
    default_ladder,
    halved,
    ladder_of,
)
from vllm_sparse_backend.config.errors import ConfigurationError, refusal
from vllm_sparse_backend.config.method_parameters import describe
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import Level, Profile
from vllm_sparse_backend.identity import versions
from vllm_sparse_backend.progress import Progress
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

MARGIN = 0.1
"""Share of an error bound that is kept as a margin for unseen prompts."""

MOST_ROUNDS = 8
"""Number of choices for a layer after which heads that still miss the bound become dense."""

SHARE_PREFILL = "share_prefill"
"""The method whose paper has no search within a bound (``papers/share_prefill.py``)."""

PAPERS = (SHARE_PREFILL, "minference", "sale", "sparge_attn", "sparge_attn+skip")
"""The methods whose papers describe a calibration."""


class Captures(NamedTuple):
    prompts: list[Capture]
    held_out: list[Capture]


@dataclass(frozen=True)
class Job:
    """The inputs of a calibration. Equal jobs with equal costs produce equal profiles."""

    model: Path
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    held_out: Sequence[Sequence[int]]
    served: Served
    folder: Path
    """Folder for the captures, which the caller deletes."""
    device: torch.device
    seed: int | None
    """Seed of generated prompts; None for the operator's own prompts."""
    min_tokens: int | None
    """Sets ``min_tokens`` in the profile; None for the server's setting."""
    progress: Progress

    def __post_init__(self) -> None:
        shortest = min(len(ids) for ids in (*self.prompts, *self.held_out))
        if shortest <= self.served.min_tokens:
            expected = f"prompts of more than {self.served.min_tokens} tokens, because shorter prompts run dense"
            raise refusal("prompts", f"{shortest} tokens", expected)

    @cached_property
    def shape(self) -> ModelShape:
        """Layers, heads and head size of the model."""
        return ModelShape.from_folder(self.model)

    @cached_property
    def costs(self) -> Costs:
        """Times of selection and attention, measured on a CUDA device."""
        if self.card is None:
            raise ConfigurationError(
                "given no CUDA device, expected one: this search measures times, and those of a CPU do not represent a "
                "server; use profile calibrate with another method than minference"
            )
        return measure_costs(self.card, self._batches)

    def _batches(self) -> Sequence[Batch]:
        """Load the first prompt's chunks of the first layer that can run sparse."""
        return self.read_layer(self.captures.prompts[:1], self.layers[0]).prompts[0].batches

    @cached_property
    def card(self) -> Card | None:
        """The CUDA device; None on a CPU."""
        return Card() if self.device.type == "cuda" else None

    @cached_property
    def captures(self) -> Captures:
        """Captures of ``prompts`` and ``held_out``, made with one load of the model."""
        captures = self.capture([*self.prompts, *self.held_out])
        num_prompts = len(self.prompts)
        return Captures(captures[:num_prompts], captures[num_prompts:])

    def capture(self, prompts: Sequence[Sequence[int]]) -> list[Capture]:
        """Run the model on prompts, and write the inputs of its attention layers to the job's folder."""
        self.progress.print(f"capturing {len(prompts)} prompts")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32  # a CPU's bfloat16 is slow
        return capture_prompts(self.model, prompts, self.folder, self.device, dtype)

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the layers that can run sparse."""
        return sorted(self.captures.prompts[0].scales)

    def read_layer(self, captures: Sequence[Capture], layer: int) -> CapturedLayer:
        """Load a layer of some captures."""
        engines = self.card.engines if self.card else None
        return CapturedLayer(
            [LayerPrompt.read(captured, layer, self.served, self.device, engines) for captured in captures]
        )

    @property
    def profile_fields(self) -> dict[str, Any]:
        """Fields of a profile that do not depend on the search."""
        return {"format": 1, "model": self.shape, "min_tokens": self.min_tokens}

    def provenance(self, source: str, **figures: Any) -> dict[str, Any]:
        """Record how a profile was made: versions, device, prompts and ``figures``."""
        return {
            "prompts_sha256": sha256_of(self.prompts),
            "device": "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            "source": source,
            **({} if self.seed is None else {"seed": self.seed}),
            "versions": versions(),
            **figures,
        }


def independent_methods() -> list[str]:
    """List the methods whose heads do not depend on other layers. `profile best` chooses from these."""
    return [name for name, spec in METHODS.items() if spec.ladder]


def search_of_method(job: Job, name: str) -> Choose:
    """Return the search of a method's paper within a bound; for other methods, the search for the sparsest setting."""
    match name:
        case "minference":
            costs = job.costs
            spaces = list(minference.search_spaces(job.read_layer(job.captures.prompts, job.layers[0]), costs))
            return partial(choose_in_order, spaces=spaces)
        case "sale":
            return sale.choose_threshold
        case "sparge_attn" | "sparge_attn+skip":
            return partial(sparge_attn.choose_thresholds, skipping=name.endswith("+skip"))
    settings = default_ladder(name)
    require_long_prompts(job, settings)
    return partial(choose_sparsest, ladders=[halved(halved(settings))])


def search_for_cheapest(job: Job, names: Sequence[str]) -> Choose:
    """Return the search that chooses the fastest setting among those of several methods."""
    settings = [setting for name in names for setting in ladder_of(name)]
    require_long_prompts(job, settings)
    return partial(choose_cheapest, settings=settings, costs=job.costs)


def require_long_prompts(job: Job, settings: Sequence[Method]) -> None:
    """Check that prompts are long enough for a setting to leave out any key."""
    longest = max(len(ids) for ids in job.prompts)
    most_eager = min(settings, key=lambda setting: setting.least_prompt_tokens)
    least = most_eager.least_prompt_tokens
    if longest <= least:
        expected = (
            f"prompts of more than {least} tokens: {describe(most_eager)} keeps every key of shorter prompts; pass "
            "--tokens, or longer --prompts"
        )
        raise refusal("prompts", f"{longest} tokens", expected)


@dataclass
class LevelResult:
    """Search result for one bound."""

    bound: Bound
    methods: list[Sequence[Method]]
    """For each layer of the model, the method of each head."""
    figures: dict[int, list[HeadResult]] = field(default_factory=dict)
    """Figures of each head on the prompts, by layer; without layers whose heads are all dense."""
    held_out: list[HeadResult] = field(default_factory=list)
    """Figures of the sparse heads on the held-out prompts."""

    def provenance(self, job: Job, source: str) -> dict[str, Any]:
        """Record how the level was made, with its bound and figures of four significant digits."""
        shares = [self.bound.used_fraction(head) for head in self.held_out]
        left_out = sum(1 - head.density for heads in self.figures.values() for head in heads)
        held_out = {
            "heads_within_bound": sum(share <= 1 for share in shares) / len(shares),
            "most_of_bound": max(shares),
            "error": fmean(head.seen.error for head in self.held_out),
            "p99_error": fmean(head.seen.p99 for head in self.held_out),
        }
        return job.provenance(
            source,
            bounds=self.bound.numbers,
            density=_rounded(1 - left_out / sum(map(len, self.methods))),
            figures={
                "density": self._by_layer(lambda head: head.density),
                "error": self._by_layer(lambda head: head.seen.error),
                "p99_error": self._by_layer(lambda head: head.seen.p99),
            },
            held_out={name: _rounded(figure) for name, figure in held_out.items()},
        )

    def _by_layer(self, figure: Callable[[HeadResult], float]) -> dict[int, list[float]]:
        return {number: [_rounded(figure(head)) for head in heads] for number, heads in self.figures.items()}


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def calibrate(job: Job, choose: Choose, bounds: Mapping[str, Bound], source: str) -> Profile:
    """Search for methods within every level's bound, and check them on the held-out prompts."""
    dense = [Dense()] * job.shape.num_heads
    levels = {name: LevelResult(bound, [dense] * job.shape.num_layers) for name, bound in bounds.items()}
    job.progress.begin("layers", len(job.layers))
    for number in job.layers:
        layer, held_out = (job.read_layer(captures, number) for captures in job.captures)
        for level in levels.values():
            methods, figures = choose_jointly(layer, choose, level.bound.with_margin(MARGIN))
            if figures is not None:
                level.methods[number], level.figures[number] = methods, figures
                seen = zip(methods, held_out.judge(methods), strict=True)
                level.held_out += [head for method, head in seen if not isinstance(method, Dense)]
        job.progress.step()
    return profile_of(job, levels, source)


def choose_jointly(judge: CapturedLayer, choose: Choose, bound: Bound) -> tuple[list[Method], list[HeadResult] | None]:
    """Choose methods for a layer until all of its heads meet the bound when they run together.

    Returns the methods with their figures; None for a dense layer.
    """
    failed: dict[int, set[Method]] = defaultdict(set)
    given_up: set[int] = set()

    def is_allowed(head: int, method: Method) -> bool:
        return head not in given_up and method not in failed[head]

    for rounds in count(1):
        methods = choose(judge, bound, is_allowed)
        sparse = [head for head, method in enumerate(methods) if not isinstance(method, Dense)]
        if not sparse:
            break
        figures = judge.judge(methods)
        # Even dense attention misses the bound if an output is not a number. The head is then dense.
        failing = [head for head in sparse if not bound.holds(figures[head])]
        if not failing:
            return methods, figures
        for head in failing:
            failed[head].add(methods[head])
        given_up.update(failing if rounds >= MOST_ROUNDS else ())
    return methods, None


def profile_of(job: Job, results: Mapping[str, LevelResult], source: str) -> Profile:
    """Build the profile from each level's result.

    Levels without a sparse head are left out, because they would equal ``exact``.
    """
    levels = {
        name: Level.of_heads(result.methods, result.provenance(job, source))
        for name, result in results.items()
        if result.held_out
    }
    first = next(iter(results))
    if first not in levels:
        # If another level took its place, it would become the default level of requests.
        numbers = ":".join(f"{x:g}" for x in results[first].bound.numbers.values())
        why = f"{source}: no head meets the bound {numbers} of level {first} and saves time"
        raise ConfigurationError(f"{why}; use a larger bound, or longer prompts")
    own = levels.pop(first)
    return Profile(**dict(own), level=first, levels=levels, **job.profile_fields)
