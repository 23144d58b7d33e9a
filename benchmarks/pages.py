# SPDX-License-Identifier: Apache-2.0
"""What `eval answers` and `eval tasks` found, as pages: tables, heat maps and curves."""

from collections.abc import Sequence

from benchmarks.charts import curves, heat_map
from benchmarks.page import Page
from benchmarks.tasks import job
from vllm_sparse_backend.measure import asking
from vllm_sparse_backend.measure.answers import Share
from vllm_sparse_backend.measure.contestants import Case
from vllm_sparse_backend.measure.report import Report
from vllm_sparse_backend.settings.reasons import Fallback


def failures(cases: Sequence[Case]) -> list[str]:
    """A line for each failed request, and for each server that ran nothing sparse."""
    lines = []
    sparse = {case["label"] for case in cases if case.get("density") is not None}  # in this run or an earlier one
    for case in cases:
        if case.get("part") == "density" and case["label"] not in sparse:
            lines.append(f"{case['label']}: no request ran sparse: {_why_dense(case, cases)}")
        elif case.get("error"):
            task = f"{case['task']}, " if "task" in case else ""
            where = f"{case['label']}, {task}{case['tokens']:,} tokens, prompt {case['prompt'] + 1}"
            lines.append(f"failed, and not counted: {where}: {case['error']}")
    return lines


def _why_dense(density: Case, cases: Sequence[Case]) -> str:
    """What the server counted its rows as; where there were none, why there were none."""
    if rows := density.get("dense_rows"):
        explained = {one.value: one.explain for one in Fallback}
        return "; ".join(f"{explained.get(why, why)} (dense rows: {count:,})" for why, count in rows.items())
    own = [case for case in cases if case["part"] == "prompt" and case["label"] == density["label"]]
    return "all of its requests failed" if all(case.get("error") for case in own) else "the server's log says why"


def answers_page(model: str, rows: Sequence[Case], report: Report) -> Page:
    page = Page(f"Answers inside the prompt: {model}", report)
    page.heading(
        "Right answers",
        "Facts are spread over a text and asked for, with their answers, further on in the same prompt. An answer is "
        "right if all of its tokens rank first. Perplexity is of all other tokens. ± s.e.: one standard error, between "
        "prompts where that is larger.",
    )
    page.table(asking.COLUMNS, rows)
    labels = list(dict.fromkeys(row["label"] for row in rows))
    page.heading("By distance between fact and question, in tokens")
    buckets = sorted({bounds for row in rows for bounds in row["by_distance"]})
    drawings = {}
    for label in labels:
        of = [row for row in rows if row["label"] == label]
        shares = [[row["by_distance"].get(bounds, Share(0, 0)) for bounds in buckets] for row in of]
        drawings[label] = _shares_map(
            [f"{row['tokens']:,}" for row in of], [f"below {high:,}" for _, high in buckets], shares, "distance"
        )
    page.figures(drawings)
    if len({row["tokens"] for row in rows}) > 1:
        page.heading("By length")
        points = {label: _points(rows, label, "share") for label in labels}
        losses = {label: _points(rows, label, "perplexity") for label in labels}
        page.figures({
            "right answers": curves(points, x="tokens of a prompt", y="share", log_x=True),
            "perplexity": curves(losses, x="tokens of a prompt", y="perplexity", log_x=True),
        })  # fmt: skip
    page.failures(failures(report.cases))
    return page


def _points(rows: Sequence[Case], label: str, key: str) -> list[tuple[float, float]]:
    return [(row["tokens"], row[key]) for row in rows if row["label"] == label and row[key] is not None]


def _shares_map(rows: Sequence[str], columns: Sequence[str], shares: Sequence[Sequence[Share]], x: str) -> str:
    values = [[one.share if one.asked else None for one in of] for of in shares]
    told = [[f"{one.right}/{one.asked}" if one.asked else "" for one in of] for of in shares]
    return heat_map(rows, columns, values, told, x=x, y="tokens")


def tasks_page(
    model: str, labels: Sequence[str], rows: Sequence[Case], perplexities: Sequence[Case], report: Report
) -> Page:
    page = Page(f"Tasks: {model}", report)
    if rows:
        page.heading(
            "Found of what was asked for",
            "Greedy answers; found are the texts that an answer should hold and does. ± s.e.: one standard error, of "
            "differences that of paired prompts. Prompts of a task with one needle go through all depths, in order.",
        )
        page.table(job.COLUMNS, rows)
        page.heading("By task and length", "Share of what was asked for.")
        page.figures({label: _by_task(rows, label) for label in labels})
        _add_depths(page, labels, rows, report.cases)
    if perplexities:
        page.heading("Perplexity", "Of a text's own tokens. Of the first's: on the texts that both answered.")
        page.table(job.PERPLEXITY_COLUMNS, perplexities)
        _add_positions(page, labels, perplexities)
    page.failures(failures(report.cases))
    return page


def _by_task(rows: Sequence[Case], label: str) -> str:
    """A heat map of tasks by lengths."""
    tasks, lengths = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "tokens"))
    shares = {(row["task"], row["tokens"]): row["share"] for row in rows if row["label"] == label}
    values = [[shares.get((task, length)) for length in sorted(lengths)] for task in tasks]
    told = [["" if value is None else f"{value:.2f}" for value in of] for of in values]
    return heat_map(tasks, [f"{length:,}" for length in sorted(lengths)], values, told, x="tokens", y="")


def _add_depths(page: Page, labels: Sequence[str], rows: Sequence[Case], cases: Sequence[Case]) -> None:
    """A heat map of length by depth for each task that asks for one thing, and each server."""
    drawings = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        for label in labels:
            if found := job.by_depth(cases, task, label):
                shares = [[of.get(tenth, Share(0, 0)) for tenth in range(10)] for _, of in sorted(found.items())]
                columns = [f"{10 * tenth} %" for tenth in range(10)]
                drawings[f"{task}, {label}"] = _shares_map([f"{n:,}" for n in sorted(found)], columns, shares, "depth")
    if drawings:
        page.heading("By length and depth", "0 % is the beginning of the text.")
        page.figures(drawings)


def _add_positions(page: Page, labels: Sequence[str], perplexities: Sequence[Case]) -> None:
    """Curves of each length, and beside them times the first label's."""
    drawings = {}
    for length in dict.fromkeys(row["tokens"] for row in perplexities):
        of = {row["label"]: row["by_place"] for row in perplexities if row["tokens"] == length and row["by_place"]}
        drawn = {label: [(high, value) for (_, high), value in of[label].items()] for label in labels if label in of}
        name = f"{length:,} tokens"
        drawings[name] = curves(drawn, x="position, up to", y="perplexity", log_x=True)
        if labels[0] in of and len(of) > 1:
            first = of[labels[0]]
            times = {
                label: [(place[1], value / first[place]) for place, value in of[label].items() if place in first]
                for label in labels
                if label in of
            }
            y = f"times {labels[0]}'s"
            drawings[f"{name}, {y}"] = curves(times, x="position, up to", y=y, log_x=True)
    page.heading("Perplexity by position")
    page.figures(drawings)
