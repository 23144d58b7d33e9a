# SPDX-License-Identifier: Apache-2.0
"""What calibrated profiles keep, lose and gain: docs/results/profiles.json, and the table of docs/profiles.md.

    sparse-prefill profile best MODEL --out best-NAME.yaml …          (and search, calibrate, cluster)
    sparse-prefill eval answers MODEL --settings '{"profile": …}' --results docs/results/answers.json
    sparse-prefill bench methods --captured FOLDER --profile … --results docs/results/performance.json
    python -m benchmarks.profiles FILE… [--took FILE=SECONDS] [--work FOLDER] [--against FILE=FOLDER]
        [--markdown docs/profiles.md]

``--work``: the folder of a `profile best` that judged every ladder, without means and with. Of each ladder, and of all
together, it tells what a setting for each head keeps under ``--bound``, chosen as `profile calibrate` chooses, ÷ what
one setting of it keeps for all heads: at the same mean error, and of those that hold the same bound.

``--against``: the folder of a calibration in which ``benchmarks.one_setting`` has left its file. It tells what the
profile keeps ÷ what one setting for all heads keeps on the same prompts: of the paper's own settings and of all that
heads can choose from, at the same mean error, and the sparsest that holds its bounds, in every head and on average.
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from vllm_sparse_backend.profiling.best import candidates, choose, holding, price_of
from vllm_sparse_backend.profiling.ladders import LADDERS

from benchmarks.one_setting import FILE
from benchmarks.performance import CHUNKS, TRAINED, met
from benchmarks.quality import ANSWERS, NAMED, PERFORMANCE, by_plain_label, load, relative
from benchmarks.tables import markdown_table, put_between
from vllm_sparse_backend.measure.report import merge_figures, table_of
from vllm_sparse_backend.profiling.costs import PairCosts
from vllm_sparse_backend.profiling.job import SLACK
from vllm_sparse_backend.profiling.judge import Outcome
from vllm_sparse_backend.profiling.measure import Bound
from vllm_sparse_backend.profiling.measure import Figures as HeadFigures
from vllm_sparse_backend.settings.methods import parameters_of
from vllm_sparse_backend.settings.profile import Profile, load_profile
from vllm_sparse_kernels.methods.base import Method

RESULTS = Path("docs/results/profiles.json")
RIGHT, PERPLEXITY = "right answers ÷ stock's", "perplexity ÷ stock's"
BEST = "best-"
LEAST_ANSWERS = {True: 0.98, False: 0.95}
"""Of stock's: of profiles that `best` made, and of others."""
MOST_PERPLEXITY = 1.01
LEAST_SPEED = dict(zip(CHUNKS, (3.5, 1.8), strict=True))
MOST_SECONDS = 480
MOST_OF_SINGLE = 0.85
"""Of the density of one setting for all heads, at the same mean error."""
BOUNDS_OF_HEADS = ("error", "worst", "rare", "mean")
"""In the order of ``--level``."""

Figures = Mapping[str, Mapping[str, Any]]
Point = tuple[float, float]
"""(error, density)."""

Head = Sequence[float]
"""(error, worst, rare, density)."""


def figure(
    name: str, value: float, unit: str, bar: float | None, better: str, device: str, command: str
) -> dict[str, Any]:
    return {
        "name": name, "value": float(f"{value:.4g}"), "unit": unit, "bar": bar, "better": better, "device": device,
        "command": command,
    }  # fmt: skip


def command_of(profile: Profile) -> str:
    """What made it, with its bounds; prompts are those of its provenance."""
    made, bounds = profile.provenance, profile.provenance.bounds or {}
    return f"{made.source} --level {profile.level}={as_option(bounds)}" if "error" in bounds else f"{made.source}"


def as_option(bounds: Mapping[str, float]) -> str:
    """As ``--level`` and ``--bound`` have it."""
    numbers = ":".join(f"{bounds.get(kind, math.inf):g}" for kind in BOUNDS_OF_HEADS)
    return re.sub("(:inf)+$", "", numbers)


def of_profile(name: str, profile: Profile, took_s: float | None) -> Iterator[dict[str, Any]]:
    """What its own provenance says."""
    made, about = profile.provenance, f"profile {name}"
    where = {"device": made.device or "", "command": command_of(profile)}
    if made.density is not None:
        yield figure(f"{about}: density on its prompts", made.density, "share", None, "lower", **where)
    held = made.held_out or {}
    if (share := held.get("heads_within_1.2_of_it")) is not None:
        yield figure(f"{about}: sparse heads within 1.2 of the bound, held-out prompts", share, "share", 1.0, "higher",
                     **where)  # fmt: skip
    if (error := held.get("error")) is not None:
        yield figure(
            f"{about}: mean error of sparse heads, held-out prompts", error, "relative", None, "lower", **where
        )
    if (share := held.get("mean_of_bound")) is not None:
        yield figure(f"{about}: mean error of all heads ÷ its bound, held-out prompts", share, "ratio", SLACK, "lower",
                     **where)  # fmt: skip
    if took_s is not None:
        yield figure(f"{about}: made in", took_s, "s", MOST_SECONDS, "lower", **where)


def of_answers(names: Sequence[str], answers: Figures) -> Iterator[dict[str, Any]]:
    shares = relative(answers)
    for name in names:
        for tokens, share in shares.get(f"profile {name}", {}).items():
            source = answers[f"profile {name}, answers inside the prompt, {tokens} tokens, {TRAINED}: right"]
            where = {"device": source["device"], "command": source["command"]}
            about, least = f"profile {name}, {tokens} tokens, {TRAINED}", LEAST_ANSWERS[name.startswith(BEST)]
            yield figure(f"{about}: {RIGHT}", share["right"], "ratio", least, "higher", **where)
            yield figure(f"{about}: {PERPLEXITY}", share["perplexity"], "ratio", MOST_PERPLEXITY, "lower", **where)


def of_speed(names: Sequence[str], performance: Figures) -> Iterator[dict[str, Any]]:
    for name in names:
        for after, bar in LEAST_SPEED.items():
            for what in ("times faster", "density", "output error"):
                found = performance.get(f"whole method, profile {name}, {TRAINED}, after {after}: {what}")
                if found is not None:
                    asked = bar if what == "times faster" and name.startswith(BEST) else None
                    yield {**found, "bar": asked}


def single_density(points: Sequence[Point], error: float) -> float:
    """What one setting keeps at an error, between the two of a ladder that lie around it; all at none."""
    ordered = sorted([(0.0, 1.0), *points])
    place = bisect_left([point[0] for point in ordered], error)
    if place == len(ordered):
        return ordered[-1][1]
    if place == 0:
        return ordered[0][1]
    (low, dense), (high, sparse) = ordered[place - 1], ordered[place]
    return dense + (sparse - dense) * (error - low) / (high - low)


def by_head(layers: Sequence[Mapping[Method, Sequence[HeadFigures]]], bound: Bound) -> Point:
    """Of all heads together, each with the setting that `profile calibrate` would choose for it; some may be dense.

    ``layers``: of each what came of its heads under every setting.
    """
    costs = PairCosts(len(next(iter(layers[0].values()))))
    held = [holding(figures, bound) for figures in layers]
    price = price_of(held, costs, bound.mean)
    chosen = [
        (of[method].error, of[method].density) if method in of else (0.0, 1.0)
        for heads in held
        for of, method in zip(heads, choose(heads, costs, price), strict=True)
    ]
    return fmean(error for error, _ in chosen), fmean(density for _, density in chosen)


def sparsest_for_all(settings: Iterable[Sequence[Head]], most: Head, most_mean: float = math.inf) -> float:
    """Mean density of the sparsest setting whose outcomes are at most ``most`` in every head, and whose mean error is
    at most ``most_mean``; 1 where none is."""

    def holds(heads: Sequence[Head]) -> bool:
        each = all(found <= limit for head in heads for found, limit in zip(head, most, strict=True))
        return each and fmean(head[0] for head in heads) <= most_mean

    return min((fmean(head[-1] for head in heads) for heads in settings if holds(heads)), default=1.0)


def of_work(folder: Path, bound: Bound) -> Iterator[dict[str, Any]]:
    judged = [json.loads(path.read_text())["judged"] for path in sorted(folder.glob("prompts-layer-*.json"))]
    device = json.loads((folder / "job.json").read_text())["device"]
    command = (
        f"sparse-prefill profile best {TRAINED} --tokens 32768, then benchmarks.profiles --work "
        f"--bound {as_option(bound.numbers)}"
    )
    for name, ladders in {**{name: [name] for name in LADDERS}, "all methods": list(LADDERS)}.items():
        keys = {method: json.dumps([parameters_of(method)]) for method in candidates(ladders=ladders)}
        keys = {method: key for method, key in keys.items() if all(key in layer for layer in judged)}
        if not keys:
            continue
        layers = [
            {method: [Outcome(*one).figures(0.0) for one in layer[key]] for method, key in keys.items()}
            for layer in judged
        ]
        error, density = by_head(layers, bound)
        single = [
            [(of.error, of.worst, of.rare, of.density) for layer in layers for of in layer[method]] for method in keys
        ]
        for what, alone in (
            ("at the same error", at_same_error(single, error)),
            ("that holds the bound in every head",
             sparsest_for_all(single, (bound.error, bound.worst, bound.rare, math.inf), bound.mean)),
        ):  # fmt: skip
            about = f"{name}, a setting for each head: density ÷ one setting's {what}"
            yield figure(about, density / alone, "ratio", MOST_OF_SINGLE, "lower", device, command)


def mean_error(profile: Profile) -> float:
    """Over all heads on the profile's own prompts, dense ones included."""
    assert profile.model is not None
    assert profile.provenance.figures is not None
    heads = profile.model.num_heads
    rows = profile.provenance.figures.rows("error", profile.model)
    return fmean(error for row in rows for error in row or [0.0] * heads)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Of all settings those that none undercuts in both error and density."""
    found: list[Point] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def at_same_error(settings: Iterable[Sequence[Head]], error: float) -> float:
    """What one of these settings for all heads keeps at a mean error, or what two keep between which it lies."""
    points = [(fmean(head[0] for head in heads), fmean(head[-1] for head in heads)) for heads in settings]
    return single_density(frontier(points), error)


def against_one_setting(name: str, profile: Profile, folder: Path) -> Iterator[dict[str, Any]]:
    """What a calibrated profile keeps ÷ what one setting for all heads does: see the module's docstring."""
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    own, every = ([one["heads"] for one in found[kind]] for kind in ("own", "every"))
    made = profile.provenance
    bounds = made.bounds or {}
    *most, most_mean = (bounds.get(kind, math.inf) for kind in BOUNDS_OF_HEADS)
    most.append(math.inf)  # of densities
    where = {"device": made.device or "", "command": command_of(profile)}
    about = f"profile {name}: density ÷ that of one setting"
    for whose, settings in (("of its paper", own), ("of all that heads can choose from", every)):
        for what, single in (
            (", same mean error", at_same_error(settings, mean_error(profile))),
            (" that holds its bounds", sparsest_for_all(settings, most, most_mean)),
        ):
            ratio = (made.density or 1.0) / single
            yield figure(f"{about} {whose}{what}", ratio, "ratio", MOST_OF_SINGLE, "lower", **where)
    yield figure(f"profile {name}: mean error of all heads on its prompts", mean_error(profile), "relative", None,
                 "lower", **where)  # fmt: skip


def table(names: Sequence[str], figures: Figures) -> str:
    lengths = sorted(
        {name.split(", ")[1].removesuffix(" tokens") for name in figures if name.endswith(RIGHT)},
        key=lambda n: int(n.replace(",", "")),
    )

    lengths_after = list(reversed(LEAST_SPEED))

    def value(name: str, form: str) -> str:
        return format(figures[name]["value"], form) if name in figures else ""

    rows = []
    for name in names:
        about, row = f"profile {name}", [name.removeprefix("calibrated-")]
        row += [value(f"{about}: made in", ".0f"), value(f"{about}: density on its prompts", ".2f")]
        for n in lengths:
            at = f"{about}, {n} tokens, {TRAINED}"
            row.append(", ".join((value(f"{at}: {RIGHT}", ".2f"), value(f"{at}: {PERPLEXITY}", ".3f"))))
        speeds = [value(f"whole method, {about}, {TRAINED}, after {n}: times faster", ".1f") for n in lengths_after]
        row += [f"{speed}×" if speed else "not measured" for speed in speeds]
        rows.append(row)
    headings = ["", "made in, s", "density", *(f"{n} tokens" for n in lengths), *(f"after {n}" for n in lengths_after)]
    return markdown_table(headings, rows)


def main(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles of one model.")],
    took: Annotated[list[str] | None, typer.Option(help="FILE=SECONDS that a profile took to make.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of a `profile best` with all ladders.")] = None,
    bound: Annotated[str, typer.Option(help="What settings of --work hold, as --level has it.")] = "0.15:0.5:inf:0.04",
    against: Annotated[list[str] | None, typer.Option(help="FILE=FOLDER that a calibration left.")] = None,
    results: Annotated[Path, typer.Option(help="Where figures go.")] = RESULTS,
    markdown: Annotated[Path | None, typer.Option(help="Document with marks for the table.")] = None,
) -> None:
    seconds = {Path(name).stem: float(s) for name, s in (one.split("=") for one in took or ())}
    names = [path.stem for path in profiles]
    found = [f for path in profiles for f in of_profile(path.stem, load_profile(path), seconds.get(path.stem))]
    found += of_answers(names, by_plain_label(load(ANSWERS), NAMED))
    found += of_speed(names, load(PERFORMANCE))
    found += of_work(work, Bound(*map(float, bound.split(":")))) if work else ()
    for name, folder in (one.split("=", 1) for one in against or ()):
        found += against_one_setting(Path(name).stem, load_profile(Path(name)), Path(folder))
    merge_figures(results, {one["name"]: one for one in found}, keep_bars=False)
    if markdown is not None:
        put_between(markdown, "<!-- figures: profiles -->", "<!-- end of figures -->", table(names, load(results)))
    console = Console(width=150)
    missed = [one for one in load(results).values() if not met(one)]
    console.print(table_of("Not met", {"name": "figure", "value": "value", "bar": "asked"}, missed), highlight=False)


if __name__ == "__main__":
    typer.run(main)
