# SPDX-License-Identifier: Apache-2.0
"""The speed figures of docs/results/performance.json: what we ask of them, and the tables of docs/performance.md.

    sparse-prefill bench attend --results docs/results/performance.json      (and methods, serve)
    python -m benchmarks.performance [--results FILE] [--markdown docs/performance.md]

Writes each figure's bar into the results, says which are not met, and puts the figures between the marks of the
document. What was measured on an H100 besides has no bars: they are asked of one card.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.tables import markdown_table, put_between
from vllm_sparse_backend.measure.report import merge_figures, read_figures, table_of

RESULTS = Path("docs/results/performance.json")
H100 = Path("docs/results/performance_h100.json")

Figures = Mapping[str, Mapping[str, Any]]

CHUNKS = ("122,880", "24,576")
DENSITIES = ("1", "0.5", "0.2", "0.08", "0.03")
ATTEND = dict(zip(CHUNKS, ((0.93, 0.93, 0.90, 0.87, 0.80), (0.92, 0.90, 0.85, 0.78, 0.65)), strict=True))
NARROW_BLOCKS = 0.93
"""What blocks of 64 and of 32 may have of the efficiency asked of blocks of 128."""
STRIPES = {"8,192": 0.65, "1,024": 0.55}
SELECTION = {
    "vertical_slash": (0.03, 0.06),
    "flex_vertical_slash": (0.03, 0.06),
    "share_prefill": (0.03, 0.06),
    "anchor_attention": (0.03, 0.07),
    "sparge_attn": (0.02, 0.04),
    "block_sparse": (0.01, 0.03),
    "sale": (0.24, 0.28),
}
STRUCTURED = {"a_shape": 14.0, "anchor_attention theta=9": 4.0, "anchor_attention": 1.5}
STRUCTURED_SPARSE, SPARSE_DENSITY = 1.3, 0.6
"""Asked of any other method that keeps at most this."""
TRAINED = "code-lm-29m-128k"
CAPTURED: dict[str, tuple[float | None, float | None]] = {
    "a_shape": (18.0, None),
    "block_sparse": (10.0, 2.8),
    "sparge_attn": (4.3, 4.2),
    "flex_vertical_slash": (3.5, 3.1),
    "share_prefill": (3.5, 3.1),
    "vertical_slash vertical_tokens=512 slash_tokens=2048": (4.5, 2.2),
    "anchor_attention": (2.0, 1.6),
    "anchor_attention theta=9": (3.9, None),
    "sale": (1.8, 1.45),
}
DENSE_DATA = ("anchor_attention", "sparge_attn", "flex_vertical_slash", "share_prefill")
"""Methods with a threshold that take hardly longer where nothing can be left out; SALE takes longer. These and others
without a parameter are levels of ``benchmarks.levels``."""
SERVED = {
    "a_shape, 131,072 tokens": 2.9,
    "a_shape, 32,768 tokens": 1.38,
    "dense, 131,072 tokens": 0.95,
    "sale-keeps-all, 131,072 tokens": 0.78,
    "per-head-llama-3.1-8b, 131,072 tokens": 1.9,
    **{f"{name}, 131,072 tokens": 0.9 for name in DENSE_DATA},
    **{f"a_shape, {case}": 0.99 for case in ("1,024 tokens", "4,096 tokens", "8,192 tokens")},
    **{f"a_shape, {n} new after 102,400 cached": 0.99 for n in ("20", "200", "1,000")},
    **{
        f"no configuration, {n} tokens": 0.99
        for n in ("1,024", "8,192", "16,384", "32,768", "65,536", "131,072")
    },
}  # fmt: skip
OUTPUT_TOKEN = 0.99
MIXED = {"throughput, times stock's": 1.5, "p99 of short requests' first token, times sooner": 1.5}


def fixed_bars() -> Iterator[tuple[str, float]]:
    """(name, bar) of all figures whose bar depends on nothing else."""
    for after, bars in ATTEND.items():
        for density, bar in zip(DENSITIES, bars, strict=True):
            for width in (128, 64, 32):
                share = 1.0 if width == 128 else NARROW_BLOCKS
                yield f"attend, chunk after {after}, blocks of {width}, density {density}: efficiency", bar * share
    for count, bar in STRIPES.items():
        yield f"attend, stripes {count}: efficiency", bar
    for method, bars in SELECTION.items():
        for after, bar in zip(CHUNKS, bars, strict=True):
            yield f"selection, {method}, chunk after {after}: share of FlashAttention-3", bar
    for method, bar in STRUCTURED.items():
        yield f"whole method, {method}, structured, after {CHUNKS[0]}: times faster", bar
    for method, captured_bars in CAPTURED.items():
        for after, captured_bar in zip(CHUNKS, captured_bars, strict=True):
            if captured_bar is not None:
                yield f"whole method, {method}, {TRAINED}, after {after}: times faster", captured_bar
    for case, bar in SERVED.items():
        yield f"vllm serve, {case}: first token, times sooner", bar
    for what, bar in MIXED.items():
        yield f"vllm serve, a_shape, mixed load of 8 clients: {what}", bar


def bar_of(name: str, figures: Figures) -> float | None:
    """What is asked of a figure, or None."""
    if (bar := dict(fixed_bars()).get(name)) is not None:
        return round(bar, 4)
    if name.endswith(": per output token, times faster"):
        return OUTPUT_TOKEN
    if re.fullmatch(rf"whole method, [^,]+, structured, after {CHUNKS[0]}: times faster", name):
        density = figures.get(name.replace("times faster", "density"))
        return STRUCTURED_SPARSE if density and density["value"] <= SPARSE_DENSITY else None
    return None


def met(figure: Mapping[str, Any]) -> bool:
    """Whether a figure is what is asked of it; one without a bar is."""
    if figure["bar"] is None:
        return True
    if figure["better"] == "higher":
        return bool(figure["value"] >= figure["bar"])
    return bool(figure["value"] <= figure["bar"])


Cell = Callable[[str], str]


def cell_of(figures: Figures) -> Cell:
    """A figure as a table has it, by name: with its bar where that is not met, and empty where it is not there."""

    def cell(name: str) -> str:
        figure = figures.get(name)
        if figure is None:
            return ""
        return f"{figure['value']:.3g}" + ("" if met(figure) else f" (asked: {figure['bar']:g})")

    return cell


def pivot(figures: Figures, pattern: str, headings: Mapping[str, str]) -> str:
    """A table of the figures whose whole names fit; of the pattern's groups, the last is the column, others the row.

    ``headings``: of the groups that make a row, each with what it stands for where a name leaves it out. One that says
    nothing in any row is left out.
    """
    found = [match for name in figures if (match := re.fullmatch(pattern, name))]
    columns = list(dict.fromkeys(match.groups()[-1] for match in found))
    keys = dict.fromkeys(match.groups()[:-1] for match in found)
    cell = cell_of(figures)
    at = {match.groups(): cell(match[0]) for match in found}
    place = _places([key[0] or "" for key in keys])
    rows = sorted(keys, key=lambda key: (place[key[0] or ""], *map(_by_number, key[1:])))
    labels = [[part or default for part, default in zip(row, headings.values(), strict=True)] for row in rows]
    shown = [i for i in range(len(headings)) if any(label[i] for label in labels)]
    body = [
        [*(label[i] for i in shown), *(at.get((*row, column), "") for column in columns)]
        for row, label in zip(rows, labels, strict=True)
    ]
    return markdown_table([*(list(headings)[i] for i in shown), *columns], body) if body else "Not measured yet."


def _places(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Where names stand that begin with the same word: together, and else in their order."""
    order = list(dict.fromkeys(names))
    words = [name.split(" ")[0] for name in order]
    return {name: (words.index(word), i) for i, (name, word) in enumerate(zip(order, words, strict=True))}


def _by_number(text: str | None) -> tuple[bool, int, str]:
    """Prompts by length, those after a cached prefix last; other texts by themselves."""
    number = re.match(r"[\d,]+", text or "")
    return "cached" in (text or ""), int(number[0].replace(",", "")) if number else 0, text or ""


def whole_table(figures: Figures, data: str) -> str:
    """Times faster → density, error of the output, by method (and engine) and context."""
    pattern = rf"whole method, (.+), {data}, after ([\d,]+): times faster"
    found = [match for name in figures if (match := re.fullmatch(pattern, name))]
    columns = list(dict.fromkeys(match[2] for match in found))
    cell = cell_of(figures)
    rows = []
    methods = [match[1] for match in found]
    for method in sorted(set(methods), key=_places(methods).__getitem__):
        row = [method]
        for after in columns:
            about = f"whole method, {method}, {data}, after {after}"
            parts = [cell(f"{about}: {what}") for what in ("times faster", "density", "output error")]
            row.append(f"{parts[0]} → {parts[1]}, {parts[2]}" if parts[0] else "")
        rows.append(row)
    headings = ["method", *(f"after {after}" for after in columns)]
    return markdown_table(headings, rows) if rows else "Not measured yet."


RATIO = r"(.+): (efficiency|share of FlashAttention-\d|(?:first token, |per output token, )?times (?:faster|sooner))"


def beside_table(figures: Figures, others: Figures) -> str:
    """Ratios of another card that these figures have too, and those commands."""
    names = [name for name in others if name in figures and re.fullmatch(RATIO, name)]
    if not names:
        return "Not measured yet."
    devices = [of[names[0]]["device"] for of in (figures, others)]
    rows = [[name, *(f"{of[name]['value']:.3g}" for of in (figures, others))] for name in names]
    return f"{markdown_table(['', *devices], rows)}\n\n{commands_of(others)}"


def commands_of(figures: Figures) -> str:
    commands = dict.fromkeys((f["device"], f["command"]) for f in figures.values())
    return "\n".join(f"* {device}: `{command}`" for device, command in commands) or "Not measured yet."


def sections(figures: Figures, elsewhere: Figures) -> dict[str, str]:
    """Each section of the document, by its mark; every figure is in one. ``elsewhere``: of another card."""
    served = r"vllm serve, (.+), ([\d,]+ (?:tokens|new after [\d,]+ cached)): "
    tables = {
        "attend": pivot(
            figures, r"attend(?:, (\w+))?, chunk after ([\d,]+), blocks of (\d+), density ([\d.]+): efficiency",
            {"engine": "", "after": "", "blocks of": ""},
        ),
        "stripes": pivot(figures, r"attend(?:, (\w+))?(?:, chunk after ([\d,]+))?, stripes ([\d,]+): efficiency",
                         {"engine": "", "after": ""}),
        "selection": pivot(
            figures, r"selection, ([^,]+)(?:, ([^,]+))?, chunk after ([\d,]+): share of FlashAttention-\d",
            {"method": "", "data": "structured"},
        ),
        "structured": whole_table(figures, "structured"),
        "captured": whole_table(figures, TRAINED),
        "first token": pivot(
            figures,
            served + r"(first token(?:, times sooner)?|density of its sparse rows)",
            {"configuration": "", "prompt": ""},
        ),
        "output token": pivot(
            figures, served + r"(per output token, times faster)", {"configuration": "", "prompt": ""}
        ),
        "load": pivot(
            figures, r"vllm serve, (.+), mixed load(?: of (\d+) clients)?: (.+)", {"configuration": "", "clients": ""}
        ),
    }  # fmt: skip
    others = [f for name, f in figures.items() if not _is_shown(name, figures)]
    rows = [[f["name"], f"{f['value']:.4g}", f["unit"], "" if f["bar"] is None else f"{f['bar']:g}"] for f in others]
    tables["others"] = markdown_table(("figure", "value", "unit", "asked"), rows) if rows else "None."
    tables["beside"] = beside_table(figures, elsewhere)
    tables["commands"] = commands_of(figures)
    return tables


def _is_shown(name: str, figures: Figures) -> bool:
    """Whether one of the tables above has this figure, or the same of one length."""
    whole = re.fullmatch(r"vllm serve, (.+): (density of its sparse rows)", name)
    if whole and any(re.fullmatch(rf"vllm serve, {re.escape(whole[1])}, .+: {whole[2]}", other) for other in figures):
        return True
    patterns = (
        r"attend.*: efficiency",
        r"selection, .*: share of FlashAttention-\d",
        rf"whole method, .+, (structured|{TRAINED}), after .*",
        r"vllm serve, .+ (tokens|cached): .*",
        r"vllm serve, .+, mixed load(?: of \d+ clients)?: .*",
    )
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def with_bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures by name, each with the bar of today."""
    figures = {row["name"]: dict(row) for row in rows}
    for name, figure in figures.items():
        figure["bar"] = bar_of(name, figures)
    return figures


def main(
    results: Annotated[Path, typer.Option(help="What `sparse-prefill bench … --results` wrote.")] = RESULTS,
    markdown: Annotated[Path | None, typer.Option(help="Document with marks for the tables.")] = None,
    merge: Annotated[list[Path] | None, typer.Option(help="Results of other runs to put in; may be repeated.")] = None,
) -> None:
    for path in merge or ():
        merge_figures(results, {row["name"]: row for row in read_figures(path)})
    figures = with_bars(read_figures(results) if results.exists() else [])
    if figures:
        merge_figures(results, figures, keep_bars=False)
    if markdown is not None:
        elsewhere = read_figures(H100) if H100.exists() else []
        for mark, body in sections(figures, {row["name"]: row for row in elsewhere}).items():
            put_between(markdown, f"<!-- figures: {mark} -->", "<!-- end of figures -->", body)
    columns = {"name": "figure", "value": "value", "bar": "asked"}
    missed = [figure for figure in figures.values() if not met(figure)]
    asked = [name for name, _ in fixed_bars() if name not in figures]
    console = Console(width=150)
    console.print(table_of("Not met", columns, missed), highlight=False)
    console.print(f"{len(figures)} figures, {len(missed)} not met, {len(asked)} with a bar not measured yet")
    for name in asked:
        console.print(f"  not measured: {name}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
