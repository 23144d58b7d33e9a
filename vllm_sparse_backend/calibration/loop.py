# SPDX-License-Identifier: Apache-2.0
"""The calibration loop: goes through the layers, and lets a search choose the methods of each layer's heads.

A choice is judged as a whole: heads share an index (``block_width.py``), so methods that meet the bound separately may
miss it jointly. If a head misses the bound, the search excludes that method and chooses again, until all heads meet the
bound. The profile holds methods that were judged this way, and then judged on the held-out prompts.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult, LayerJudge
from vllm_sparse_backend.calibration.job import Job
from vllm_sparse_backend.calibration.papers import minference, sale, sparge_attn
from vllm_sparse_backend.calibration.profile_builder import LevelResult, profile_of
from vllm_sparse_backend.calibration.search import (
    Choose,
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

Strategy = Callable[[Job], Choose]
"""Prepares a search for one model and its prompts."""

MARGIN = 0.1
"""Share of an error bound that is kept as a margin for unseen prompts."""

MOST_ROUNDS = 8
"""Maximum number of choices for a layer. A head that still misses the bound after that is dense."""

SHARE_PREFILL = "share_prefill"
"""The method whose paper has no search within a bound (``papers/share_prefill.py``)."""


def _search_patterns(job: Job) -> Choose:
    costs = job.costs
    spaces = list(minference.search_spaces(job.read_layer("prompts", job.layers[0]), costs))
    return partial(minference.choose_pattern, spaces=spaces)


PAPERS: Mapping[str, Strategy] = {
    "minference": _search_patterns,
    "sale": lambda job: sale.choose_threshold,
    "sparge_attn": lambda job: sparge_attn.choose_thresholds,
    "sparge_attn+skip": lambda job: partial(sparge_attn.choose_thresholds, skipping=True),
}
"""The searches that papers describe."""


def independent_methods() -> list[str]:
    """List the methods whose heads do not depend on other layers. ``cheapest_strategy`` chooses from these."""
    return [name for name, spec in METHODS.items() if spec.ladder]


def calibratable_methods() -> list[str]:
    """List the methods that `profile calibrate` accepts."""
    return sorted({SHARE_PREFILL, *PAPERS, *independent_methods()})


def method_strategy(name: str) -> Strategy:
    """Return the search that calibrates one method within a bound."""
    if name not in calibratable_methods():
        raise ConfigurationError(f"--method: {not_one_of(name, calibratable_methods())}")
    if name in PAPERS:
        return PAPERS[name]
    settings = default_ladder(name)

    def search(job: Job) -> Choose:
        require_long_prompts(job, settings)
        return partial(choose_sparsest, settings=halved(halved(settings)))

    return search


def cheapest_strategy(methods: Sequence[str]) -> Strategy:
    """Return the search that chooses the fastest setting among those of several methods."""
    for name in methods:
        if name not in independent_methods():
            raise ConfigurationError(f"--method: {not_one_of(name, independent_methods())}")
    settings = [setting for name in methods for setting in ladder_of(name)]

    def search(job: Job) -> Choose:
        require_long_prompts(job, settings)
        return partial(choose_cheapest, settings=settings, costs=job.costs)

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


def calibrate(job: Job, strategy: Strategy, bounds: Mapping[str, Bound], source: str) -> Profile:
    """Search for methods within every level's bound, and check them on the held-out prompts."""
    choose = strategy(job)
    levels = {name: LevelResult(bound) for name, bound in bounds.items()}
    dense: list[Method] = [Dense()] * job.shape.num_heads
    job.progress.begin("layers", len(job.layers))
    for number in range(job.shape.num_layers):
        if number not in job.layers:
            for level in levels.values():
                level.add_layer(dense)
            continue
        layer, held_out = job.read_layer("prompts", number), job.read_layer("held-out", number)
        for level in levels.values():
            methods, figures = choose_jointly(layer, choose, level.bound.with_margin(MARGIN))
            level.add_layer(methods, figures, held_out.judge(methods) if figures else None)
        job.progress.step()
    return profile_of(job, levels, source)


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
