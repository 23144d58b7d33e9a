# SPDX-License-Identifier: Apache-2.0
"""What each setting loses beside how fast it is: docs/results/quality.json, and what docs/quality.md shows of it.

    sparse-prefill eval answers MODEL --settings '{…}' --results docs/results/answers.json
    python -m benchmarks.densities CAPTURE --results docs/results/answers.json
    sparse-prefill eval tasks MODEL --settings '{…}' --results docs/results/quality.json
    sparse-prefill bench methods --captured FOLDER --results docs/results/performance.json
    python -m benchmarks.quality [--merge FILE] [--markdown docs/quality.md] [--picture docs/answers.png]
                                 [--profiles profiles] [--took evaluation=SECONDS]

Answers and perplexity are divided by stock's on the same prompts, speed is that on the same model's attention. Figures
of a setting that a bar is set for go into docs/results/quality.json with it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import frontier
from benchmarks.performance import CHUNKS, TRAINED, met
from benchmarks.tables import markdown_table, put_between
from vllm_sparse_backend.measure.report import merge_figures, read_figures, table_of, write_json
from vllm_sparse_backend.settings.methods import PRESETS

ANSWERS = Path("docs/results/answers.json")
PERFORMANCE = Path("docs/results/performance.json")
RESULTS = Path("docs/results/quality.json")

Figures = Mapping[str, Mapping[str, Any]]

NAMED = re.compile(
    rf"(?P<label>.+), answers inside the prompt, (?P<tokens>[\d,]+) tokens, {TRAINED}: (?P<what>right|perplexity)"
)
TIMED = re.compile(rf"whole method, (?P<label>.+), {TRAINED}, after [\d,]+: .+")
DENSITY = re.compile(rf"(?P<label>.+), density, (?P<tokens>[\d,]+) tokens, {TRAINED}")
TASK = re.compile(r"(?P<label>default|no configuration), (?P<task>\w+), [\d,]+ tokens, .+")
DEFAULT = "default"
"""The preset that a server without configuration takes."""

LEAST_ANSWERS, MOST_PERPLEXITY, LEAST_SPEED = 0.98, 1.01, dict(zip(CHUNKS, (2.5, 1.6), strict=True))
"""Asked of the default: shares of stock's, and times faster than FlashAttention, selection included."""

LEAST_ANSWERS_OF = {"sale": 0.99}

MOST_LOST = {"needle": 0.05, "needle_multikey": 0.02, "niah": 0.02, "vt": 0.02}
"""Less than stock, what the default may find of a task, by the beginning of its name: one of 20, two in a hundred."""
CAN_DO = 0.5
"""A task that stock finds less of tells nothing of what was lost."""

TOOK = {
    "evaluation": ("evaluation of all methods, 8,192 tokens, needle", 900, "sparse-prefill eval answers needle --jobs"),
    "ci": (
        "tests of answers and of methods through servers",
        480,
        "pytest tests/server/test_answers.py test_methods.py",
    ),
    "demo": ("make demo, after set-up", 180, "make demo"),
}
"""Seconds that were taken by a clock: name, bar and command."""


def default_label() -> str:
    """The default as results name it: the method and its parameters."""
    method, params = PRESETS[DEFAULT]
    return " ".join([method, *(f"{name}={value:g}" for name, value in params.items())])


def plain(label: str) -> str:
    """A label with its parameters in one order and way of writing: servers and benchmarks have their own."""
    method, *params = label.split(" ")
    if not all("=" in param for param in params):
        return label
    pairs = (param.split("=", 1) for param in params)
    return " ".join([method, *sorted(f"{name}={_plain_value(value)}" for name, value in pairs)])


def _plain_value(value: str) -> str:
    try:
        return f"{float(value):g}"
    except ValueError:
        return value.strip('"')


def by_plain_label(figures: Figures, pattern: re.Pattern[str]) -> dict[str, Mapping[str, Any]]:
    """Figures whose names fit, under names with plain labels."""
    found = {}
    for name, figure in figures.items():
        if match := pattern.fullmatch(name):
            found[name.replace(match["label"], plain(match["label"]), 1)] = figure
    return found


def relative(answers: Figures) -> dict[str, dict[str, dict[str, float]]]:
    """label → tokens → shares of stock's right answers and perplexity, where stock was asked the same."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, figure in answers.items():
        if match := NAMED.fullmatch(name):
            stock = answers.get(name.replace(match["label"], "stock", 1))
            if stock and stock["device"] == figure["device"]:
                at = found.setdefault(match["label"], {}).setdefault(match["tokens"], {})
                at[match["what"]] = figure["value"] / stock["value"]
    return found


def figures_of(answers: Figures, performance: Figures) -> list[dict[str, Any]]:
    """Those that a bar is set for."""
    label, found = default_label(), list[dict[str, Any]]()
    for method, shares in relative(answers).items():
        for tokens, share in shares.items() if method != "stock" else ():
            name = f"{method}, {tokens} tokens, {TRAINED}"
            source = answers[f"{method}, answers inside the prompt, {tokens} tokens, {TRAINED}: right"]
            least = LEAST_ANSWERS if method == label else LEAST_ANSWERS_OF.get(method)
            most = MOST_PERPLEXITY if method == label else None
            found += [
                _figure(f"{name}: right answers ÷ stock's", share.get("right"), least, "higher", source),
                _figure(f"{name}: perplexity ÷ stock's", share.get("perplexity"), most, "lower", source),
            ]
    for after, bar in LEAST_SPEED.items():
        name = f"whole method, {label}, {TRAINED}, after {after}: times faster"
        if (figure := performance.get(name)) is not None:
            found.append({**figure, "name": name, "bar": bar})
    return [figure for figure in found if figure["value"] is not None]


def _figure(
    name: str, value: float | None, bar: float | None, better: str, source: Mapping[str, Any]
) -> dict[str, Any]:
    about = {key: source[key] for key in ("device", "command")}
    return {"name": name, "value": value and round(value, 4), "unit": "ratio", "bar": bar, "better": better, **about}


def table(answers: Figures, performance: Figures) -> str:
    """A row for each setting, the most faithful first: answers and perplexity by length, density and speed."""
    shares = relative(answers)
    lengths = sorted({n for of in shares.values() for n in of}, key=lambda n: int(n.replace(",", "")))

    def worst(label: str) -> float:
        return min(of.get("right", 0.0) for of in shares[label].values())

    rows = []
    for label in sorted(shares, key=lambda label: (label != "stock", -worst(label), label)):
        row = [f"**{label}**" if label == default_label() else label]
        for n in lengths:
            of = shares[label].get(n, {})
            row.append(f"{of['right']:.2f}, {of['perplexity']:.3f}" if {"right", "perplexity"} <= of.keys() else "")
        for after in CHUNKS[::-1]:
            about = f"whole method, {label}, {TRAINED}, after {after}"
            parts = [performance.get(f"{about}: {what}") for what in ("times faster", "density")]
            row.append(f"{parts[0]['value']:.1f}× ({parts[1]['value']:.2f})" if parts[0] and parts[1] else "")
        rows.append(row)
    return markdown_table(["", *(f"{n} tokens" for n in lengths), *(f"after {a}" for a in CHUNKS[::-1])], rows)


def task_figures(rows: Figures) -> list[dict[str, Any]]:
    """The default's of tasks, with what is asked of them where stock can do the task at all."""
    found = []
    for name, figure in rows.items():
        match = TASK.fullmatch(name)
        stock = rows.get(name.replace(match["label"], "stock", 1)) if match else None
        if match and stock:
            lost = next((most for task, most in MOST_LOST.items() if match["task"] == task), None)
            lost = lost or next((most for task, most in MOST_LOST.items() if match["task"].startswith(task)), None)
            bar = round(stock["value"] - lost, 4) if lost and stock["value"] >= CAN_DO else None
            found.append({**figure, "bar": bar})
    return found


def took_figures(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Of NAME=SECONDS or NAME=SECONDS@DEVICE."""
    found = []
    for text in texts:
        name, _, rest = text.partition("=")
        seconds, _, device = rest.partition("@")
        try:
            what, bar, command = TOOK[name]
            value = float(seconds)
        except (KeyError, ValueError):
            raise typer.BadParameter(f"--took: given {text!r}, expected NAME=SECONDS of {', '.join(TOOK)}") from None
        found.append({"name": f"{what}: took", "value": value, "unit": "s", "bar": bar, "better": "lower",
                      "device": device or "CPU, 2 cores", "command": command})  # fmt: skip
    return found


def frontier_of(answers: Figures, densities: Figures, performance: Figures) -> list[frontier.Setting]:
    kept = {
        (m["label"], m["tokens"]): row["value"] for name, row in densities.items() if (m := DENSITY.fullmatch(name))
    }
    speeds = {}
    for label in relative(answers):
        for after in CHUNKS:
            about = f"whole method, {label}, {TRAINED}, after {after}"
            parts = [performance.get(f"{about}: {what}") for what in ("times faster", "density")]
            if parts[0] and parts[1]:
                speeds[label, after] = parts[0]["value"], parts[1]["value"]
    return frontier.settings_of(relative(answers), kept, speeds)


def load(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in read_figures(path)} if path.exists() else {}


def merged(path: Path, answers: Path, results: Path) -> None:
    """Of another run, figures of answers and densities into one file, those of tasks into the other."""
    rows = load(path)
    first = {name: row for name, row in rows.items() if NAMED.fullmatch(name) or DENSITY.fullmatch(name)}
    merge_figures(answers, first)
    merge_figures(results, {name: row for name, row in rows.items() if name not in first})


Merge = Annotated[list[Path] | None, typer.Option(help="Results of other runs to put in; may be repeated.")]


def main(
    answers: Annotated[Path, typer.Option(help="What `sparse-prefill eval answers --results` wrote.")] = ANSWERS,
    performance: Annotated[Path, typer.Option(help="What `sparse-prefill bench` wrote.")] = PERFORMANCE,
    results: Annotated[Path, typer.Option(help="Where figures with bars go.")] = RESULTS,
    markdown: Annotated[Path | None, typer.Option(help="Document with marks for the tables.")] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG of answers against density; needs matplotlib.")] = None,
    profiles: Annotated[Path | None, typer.Option(help="Folder for the profiles of shipped settings.")] = None,
    took: Annotated[list[str] | None, typer.Option(help=f"Seconds, as NAME=SECONDS of {', '.join(TOOK)}.")] = None,
    merge: Merge = None,
) -> None:
    for path in merge or ():
        merged(path, answers, results)
    everything = load(answers)
    asked, timed = by_plain_label(everything, NAMED), by_plain_label(load(performance), TIMED)
    settings = frontier_of(asked, by_plain_label(everything, DENSITY), timed)
    sources = {match["label"]: row for name, row in asked.items() if (match := NAMED.fullmatch(name))}
    figures = figures_of(asked, timed) + frontier.figures(settings, sources, TRAINED)
    figures += task_figures(load(results)) + took_figures(took or ())
    kept = {name: row for name, row in load(results).items() if not name.startswith("shipped setting of ")}
    write_json(results, list(kept.values()))
    merge_figures(results, {figure["name"]: figure for figure in figures}, keep_bars=False)
    if markdown is not None:
        tables = {"answers": table(asked, timed), "shipped": frontier.shipped_table(settings)}
        for mark, body in {**tables, "lowest density": frontier.lowest_table(settings)}.items():
            put_between(markdown, f"<!-- figures: {mark} -->", "<!-- end of figures -->", body)
    if picture is not None:
        frontier.draw(settings, picture)
    if profiles is not None:
        frontier.write_profiles(settings, profiles)
    columns = {"name": "figure", "value": "value", "bar": "asked"}
    missed = [figure for figure in figures if not met(figure)]
    Console(width=150).print(table_of("Not met", columns, missed), highlight=False)


if __name__ == "__main__":
    typer.run(main)
