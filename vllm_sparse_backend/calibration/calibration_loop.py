# SPDX-License-Identifier: Apache-2.0
"""The calibration loop: goes through the layers in order, and judges each with the state that earlier layers leave.

A search chooses methods for a layer, and the choice is then judged as a whole: heads share an index
(``block_width.py``), and some depend on other heads, so methods that meet the bound separately may miss it jointly.
If a head misses the bound, the search excludes that method and chooses again, until all heads meet the bound. The
profile holds methods that were judged this way, and then judged on the held-out prompts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.cheapest_method import CheapestSearch
from vllm_sparse_backend.calibration.head_clusters import require_scipy
from vllm_sparse_backend.calibration.head_costs import EstimatedCosts
from vllm_sparse_backend.calibration.head_errors import Bound, HeadResult, LayerJudge
from vllm_sparse_backend.calibration.layer_walk import walk_layers
from vllm_sparse_backend.calibration.minference import MInferenceSearch
from vllm_sparse_backend.calibration.profile_builder import FiguresByLayer, LevelResult, mean_error, profile_of
from vllm_sparse_backend.calibration.profile_crossover import measure_crossover
from vllm_sparse_backend.calibration.search import LadderSearch, Search, halved, halving_settings, ladder_of
from vllm_sparse_backend.calibration.share_prefill import PaperSharing, SharePrefillSearch
from vllm_sparse_backend.calibration.sparge_attn import SpargeAttnSearch
from vllm_sparse_backend.config.errors import ConfigurationError, not_one_of, unexpected
from vllm_sparse_backend.config.method_parameters import describe, make_method
from vllm_sparse_backend.config.profile import Profile
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

Strategy = Callable[[Job, Bound], Search]

MARGIN = 0.1
"""Share of an error bound that is kept as a margin for unseen prompts."""

MOST_ROUNDS = 8
"""Maximum number of choices for a layer. A head that still misses the bound after that is dense."""

NO_MEAN = ("minference", "share_prefill", "share_prefill+paper", "sparge_attn+skip")
PAPERS = (*NO_MEAN, "sparge_attn")
"""Methods whose papers describe their own calibration procedure."""

WITHOUT_LADDER = ("minference", "share_prefill+paper")
"""Methods for which ``NAME:FIELD=VALUE`` cannot select a part of the ladder."""

SHARING = ("share_prefill", "share_prefill+paper")
UNBOUNDED = ("share_prefill+paper",)
"""Methods that use the paper's settings regardless of the error."""


def calibratable_methods() -> list[str]:
    """List the methods that ``parse_strategy`` accepts."""
    return sorted({*PAPERS, *(name for name, spec in METHODS.items() if spec.ladder)})


def independent_methods() -> list[str]:
    """List the methods whose heads do not depend on other layers. ``cheapest_strategy`` chooses from these."""
    return [name for name, spec in METHODS.items() if spec.ladder and spec.full.unshared == spec.full]


def parse_strategy(
    text: str, bounds: Mapping[str, Bound], distance: float | None = None, taus: str | None = None
) -> Strategy:
    """Return the search that calibrates one method."""
    name, _, fields = text.partition(":")
    if fields and name in WITHOUT_LADDER:
        raise ConfigurationError(f"--method {name}: {unexpected(fields, 'no fields: its search has no ladder')}")
    _refuse_unsupported(name, bounds, distance, taus)
    if name == "minference":
        return MInferenceSearch
    settings = _settings(name.split("+")[0], fields)
    if name in SHARING:
        require_scipy()
        if distance is not None and not distance > 0:
            raise ConfigurationError(f"--distance: {unexpected(distance, 'a number above 0')}")
        if name in UNBOUNDED:
            return partial(PaperSharing, distance=distance)
        return partial(SharePrefillSearch, ladder=settings, distance=distance)
    every = halved(settings if fields else ladder_of(name.split("+")[0]))
    ladder = halved(halved(settings))
    if taus is not None:
        every = ladder = halving_settings(settings, *_threshold_range(taus))

    def search(job: Job, bound: Bound) -> Search:
        require_long_prompts(job, settings)
        if bound.has_mean:
            return CheapestSearch(job, bound, every, EstimatedCosts(job.shape.num_heads, selects=False))
        if name in PAPERS:
            return SpargeAttnSearch(bound, skipping="+" in name)
        return LadderSearch(bound, ladder)

    return search


def _refuse_unsupported(name: str, bounds: Mapping[str, Bound], distance: float | None, taus: str | None) -> None:
    """Raise ConfigurationError if the method is unknown, or does not support an option."""
    if name not in calibratable_methods():
        raise ConfigurationError(f"--method: {not_one_of(name, calibratable_methods())}")
    if distance is not None and name not in SHARING:
        raise ConfigurationError(f"--distance: given with --method {name}, expected only with share_prefill")
    if name in UNBOUNDED and any(bound.numbers for bound in bounds.values()):
        raise ConfigurationError(f"--level: given with --method {name}, expected none: its settings are the paper's")
    if taus is not None and name != "sale":
        raise ConfigurationError(f"--taus: given with --method {name}, expected only with sale")
    if name in PAPERS and any(math.isfinite(bound.absolute) for bound in bounds.values()):
        raise ConfigurationError(
            f"--level: given an absolute bound with --method {name}, expected a bound of errors relative to the dense "
            "output (an absolute bound is SALE's, and for methods that search along a ladder)"
        )
    if name in NO_MEAN and any(bound.has_mean for bound in bounds.values()):
        raise ConfigurationError(f"--level: given a bound of the mean of all heads, expected none with --method {name}")


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


def _threshold_range(text: str) -> tuple[float, float]:
    """Parse ``MOST:LEAST``. Raises ConfigurationError."""
    expected = "MOST:LEAST with 0 < LEAST < MOST < 1, such as 0.008:0.0001"
    try:
        most, least = (float(number) for number in text.split(":"))
    except ValueError:
        raise ConfigurationError(f"--taus: {unexpected(text, expected)}") from None
    if not 0 < least < most < 1:
        raise ConfigurationError(f"--taus: {unexpected(text, expected)}")
    return most, least


def _settings(name: str, fields: str) -> list[Any]:
    """Return the settings of one kind: the kind of these values or, without values, of the method's defaults."""
    ladder, default = ladder_of(name), METHODS[name].parameters()
    if not fields:
        return [setting for setting in ladder if setting.group_key == default.group_key] or ladder
    wanted = [part.strip().partition("=")[::2] for part in fields.split(",")]
    matching = [
        setting
        for setting in ladder
        if all(str(setting.shown_fields.get(field)).lower() == value for field, value in wanted)
    ]
    matching = matching or _with_options(name, wanted)
    if not matching:
        known = "; ".join(dict.fromkeys(describe(setting.group_key) for setting in ladder))
        expected = f"values of one of its ladders, or options that are on or off: {known}"
        raise ConfigurationError(f"--method {name}: {unexpected(fields, expected)}")
    return [setting for setting in matching if setting.group_key == matching[0].group_key]


def _with_options(name: str, wanted: Sequence[tuple[str, str]]) -> list[Method]:
    """Return the ladder of the method's defaults with options set; empty if a field is not an option of the method."""
    defaults = METHODS[name].parameters().shown_fields
    options = {field: value == "true" for field, value in wanted}
    if not all(isinstance(defaults.get(field), bool) and value in ("true", "false") for field, value in wanted):
        return []
    return [make_method(name, {**setting.shown_fields, **options}) for setting in _settings(name, "")]


def cheapest_strategy(methods: Sequence[str]) -> Strategy:
    """Return the search that chooses the fastest setting among those of several methods."""
    for name in methods:
        if name not in independent_methods():
            raise ConfigurationError(f"--method: {not_one_of(name, independent_methods())}")

    def search(job: Job, bound: Bound) -> Search:
        settings = [setting for name in methods for setting in ladder_of(name)]
        require_long_prompts(job, settings)
        return CheapestSearch(job, bound, settings, job.costs)

    return search


def calibrate(job: Job, how: Strategy, bounds: Mapping[str, Bound], source: str) -> Profile:
    """Search for methods within every level's bound, and check them on the held-out prompts."""
    job.open_folder()
    findings = {}
    for name, bound in bounds.items():
        within = bound.with_margin(MARGIN)
        search = how(job, within)
        while True:
            choose = partial(choose_jointly, search=search, bound=within)
            methods, figures = walk_layers(job, "prompts", search.others, choose)
            if not search.should_repeat(methods, mean_error(figures, job.shape.num_heads)):
                break
        held_out = _held_out(job, search, methods, bound)
        findings[name] = LevelResult(bound, methods, figures, held_out, measure_crossover(job, methods))
    return profile_of(job, findings, source)


def choose_jointly(judge: LayerJudge, search: Search, bound: Bound) -> tuple[list[Method], list[HeadResult] | None]:
    """Choose methods for a layer until all of its heads meet the bound when they run together."""
    failed: dict[int, set[Method]] = defaultdict(set)
    given_up: set[int] = set()

    def is_allowed(head: int, method: Method) -> bool:
        return head not in given_up and method not in failed[head]

    for rounds in count(1):
        methods = search.choose(judge, is_allowed)
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


def _held_out(job: Job, search: Search, methods: Sequence[Sequence[Method]], bound: Bound) -> FiguresByLayer:
    def judged(judge: LayerJudge) -> tuple[Sequence[Method], list[HeadResult] | None]:
        of_layer = methods[judge.layer]
        dense = all(isinstance(method, Dense) for method in of_layer)
        return of_layer, None if dense else judge.judge(of_layer)

    return walk_layers(job, "held-out", search.others, judged)[1]
