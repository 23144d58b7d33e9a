# SPDX-License-Identifier: Apache-2.0
"""The calibration loop: goes through the layers in order, and judges each with the state that earlier layers leave.

A search chooses methods for a layer, and the choice is then judged as a whole: heads share an index
(``block_width.py``), and some depend on other heads, so methods that meet the bound separately may miss it jointly.
If a head misses the bound, the search excludes that method and chooses again, until all heads meet the bound. The
profile holds methods that were judged this way, and then judged on the held-out prompts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult, LayerJudge
from vllm_sparse_backend.calibration.job import Job
from vllm_sparse_backend.calibration.judge import State
from vllm_sparse_backend.calibration.papers import minference, sale, share_prefill, sparge_attn
from vllm_sparse_backend.calibration.profile_builder import LevelResult, profile_of
from vllm_sparse_backend.calibration.search import (
    Choose,
    Search,
    choose_cheapest,
    choose_sparsest,
    default_ladder,
    halved,
    ladder_of,
)
from vllm_sparse_backend.config.errors import ConfigurationError, not_one_of, unexpected
from vllm_sparse_backend.config.method_parameters import describe
from vllm_sparse_backend.config.profile import Profile
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

Strategy = Callable[[Job], Search]
"""Prepares a search for one model and its prompts."""

MARGIN = 0.1
"""Share of an error bound that is kept as a margin for unseen prompts."""

MOST_ROUNDS = 8
"""Maximum number of choices for a layer. A head that still misses the bound after that is dense."""

SHARE_PREFILL = "share_prefill"


def _search_patterns(job: Job) -> Search:
    first_layer = job.read_layer("prompts", job.layers[0])
    spaces = list(minference.search_spaces(first_layer, job.costs))
    return Search(partial(minference.choose_pattern, spaces=spaces))


PAPERS: Mapping[str, Strategy] = {
    "minference": _search_patterns,
    "sale": lambda job: Search(sale.choose_threshold),
    "sparge_attn": lambda job: Search(sparge_attn.choose_thresholds),
    "sparge_attn+skip": lambda job: Search(partial(sparge_attn.choose_thresholds, skipping=True)),
}
"""The calibrations that papers describe, except SharePrefill's, which has an option."""


def calibratable_methods() -> list[str]:
    """List the methods that ``method_strategy`` accepts."""
    return sorted({*PAPERS, *(name for name, spec in METHODS.items() if spec.ladder)})


def independent_methods() -> list[str]:
    """List the methods whose heads do not depend on other layers. ``cheapest_strategy`` chooses from these."""
    return [name for name, spec in METHODS.items() if spec.ladder and spec.full.unshared == spec.full]


def method_strategy(name: str, distance: float | None = None) -> Strategy:
    """Return the search that calibrates one method. ``distance`` is that of SharePrefill's clusters."""
    if name not in calibratable_methods():
        raise ConfigurationError(f"--method: {not_one_of(name, calibratable_methods())}")
    if distance is not None and name != SHARE_PREFILL:
        raise ConfigurationError(f"--distance: given with --method {name}, expected only with {SHARE_PREFILL}")
    if distance is not None and not distance > 0:
        raise ConfigurationError(f"--distance: {unexpected(distance, 'a number above 0')}")
    if name == SHARE_PREFILL:
        share_prefill.require_scipy()  # before prompts are made
        return partial(share_prefill.search_shares, distance=distance or share_prefill.DISTANCE)
    if name in PAPERS:
        return PAPERS[name]
    settings = default_ladder(name)

    def search(job: Job) -> Search:
        require_long_prompts(job, settings)
        return Search(partial(choose_sparsest, settings=halved(halved(settings))))

    return search


def cheapest_strategy(methods: Sequence[str]) -> Strategy:
    """Return the search that chooses the fastest setting among those of several methods."""
    for name in methods:
        if name not in independent_methods():
            raise ConfigurationError(f"--method: {not_one_of(name, independent_methods())}")
    settings = [setting for name in methods for setting in ladder_of(name)]

    def search(job: Job) -> Search:
        require_long_prompts(job, settings)
        return Search(partial(choose_cheapest, settings=settings, costs=job.costs))

    return search


def require_long_prompts(job: Job, settings: Sequence[Method]) -> None:
    """Check that prompts are long enough for a setting to leave out any key."""
    longest = max(len(ids) for ids in job.prompts.prompts)
    most_eager = min(settings, key=lambda setting: setting.least_prompt_tokens)
    least = most_eager.least_prompt_tokens
    if longest <= least:
        problem = unexpected(f"{longest} tokens", f"prompts of more than {least} tokens")
        raise ConfigurationError(
            f"prompts: {problem}: {describe(most_eager)} keeps every key of shorter prompts; pass --tokens, or longer "
            "--prompts"
        )


@dataclass
class LevelState:
    """One level's result for the layers so far, and the state that they leave, by kind of prompts."""

    result: LevelResult
    states: dict[str, list[list[State]]] = field(default_factory=lambda: {"prompts": [], "held-out": []})


def calibrate(job: Job, strategy: Strategy, bounds: Mapping[str, Bound], source: str) -> Profile:
    """Search for methods within every level's bound, and check them on the held-out prompts."""
    search = strategy(job)
    levels = {name: LevelState(LevelResult(bound)) for name, bound in bounds.items()}
    dense: list[Method] = [Dense()] * job.shape.num_heads
    job.progress.begin("layers", len(job.layers))
    for number in range(job.shape.num_layers):
        if number in job.layers:
            _choose_layer(job, number, search, levels.values())
            _check_layer(job, number, search, levels.values())
            job.progress.step()
        else:
            for level in levels.values():
                level.result.add_layer(dense, None)
    return profile_of(job, {name: level.result for name, level in levels.items()}, source)


def _choose_layer(job: Job, number: int, search: Search, levels: Iterable[LevelState]) -> None:
    """Choose the methods of a layer at each level."""
    layer = job.read_layer("prompts", number, search.others)
    for level in levels:
        layer.enter(level.states["prompts"])
        methods, figures = choose_jointly(layer, search.choose, level.result.bound.with_margin(MARGIN))
        level.result.add_layer(methods, figures)
        level.states["prompts"] = layer.leave(methods)


def _check_layer(job: Job, number: int, search: Search, levels: Iterable[LevelState]) -> None:
    """Judge the chosen methods of a layer on the held-out prompts."""
    layer = job.read_layer("held-out", number, search.others)
    for level in levels:
        methods = level.result.methods[-1]
        layer.enter(level.states["held-out"])
        if level.result.figures[-1] is not None:
            level.result.held_out[-1] = layer.judge(methods)
        level.states["held-out"] = layer.leave(methods)


def choose_jointly(judge: LayerJudge, choose: Choose, bound: Bound) -> tuple[list[Method], list[HeadResult] | None]:
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
