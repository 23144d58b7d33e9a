# SPDX-License-Identifier: Apache-2.0
"""Results of ``eval answers``: shares of right answers, and comparisons with the first server."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.evaluation.agreement import NextTokens
from vllm_sparse_backend.evaluation.answer_run import Case, name_case, right_answers
from vllm_sparse_backend.evaluation.metrics_scrape import Pairs
from vllm_sparse_backend.evaluation.report import table_of

COLUMNS = {
    "label": "server",
    "case": "prompt",
    "answers": "right",
    "share": "share",
    "of_first": "÷ first",
    "density": "density",
}
CHANGE_COLUMNS = {
    "label": "server",
    "case": "prompt",
    "perplexity_change": "perplexity, %",
    "text_kl": "KL, text",
    "text_top1": "top-1",
    "answers_kl": "KL, answers",
    "answers_top1": "top-1",
}
"""Columns of the comparison with the first server."""

FORMATS = {
    "share": ".2f",
    "of_first": ".3f",
    "perplexity_change": "+.2f",
    "text_kl": ".4f",
    "text_top1": ".3f",
    "answers_kl": ".4f",
    "answers_top1": ".3f",
}
"""Formats of numbers that have a standard error."""


def changes(first: Mapping[int, Case], second: Mapping[int, Case]) -> Case:
    """Compare two servers on the prompts that both answered: means over prompts, with standard errors."""
    shared = sorted(first.keys() & second.keys())
    nats, error = mean_and_error([_mean_nats(second[i]) - _mean_nats(first[i]) for i in shared])
    ratio = math.exp(nats or 0)
    row = {
        "perplexity_change": 100 * (ratio - 1) if shared else None,
        "perplexity_change_error": None if error is None else 100 * ratio * error,
    }
    for part in ("text", "answers"):
        agreements = [_next_tokens(second[i], part).against(_next_tokens(first[i], part)) for i in shared]
        for figure in ("kl", "top1"):
            key = f"{part}_{figure}"
            row[key], row[f"{key}_error"] = mean_and_error([getattr(agreement, figure) for agreement in agreements])
    return row


def _mean_nats(case: Case) -> float:
    return float(case["nats"] / case["others"])


def _next_tokens(case: Case, part: str) -> NextTokens:
    return NextTokens.parse(case["next_tokens"][part])


def summaries(cases: Sequence[Case], labels: Sequence[str]) -> list[Case]:
    """Return a row for each task, length and label, compared with the first label on prompts that both answered."""
    rows = []
    for task, length in dict.fromkeys((case["task"], case["tokens"]) for case in cases):
        of_prompts = [case for case in cases if (case["task"], case["tokens"]) == (task, length)]
        answered = {
            label: {case["prompt"]: case for case in of_prompts if case["label"] == label and not case["error"]}
            for label in labels
        }
        first = answered[labels[0]]
        for label, good in answered.items():
            rows.append({
                "label": label, "task": task, "tokens": length, **summary(good, first),
                "failed": sum(case["label"] == label and bool(case["error"]) for case in of_prompts),
                **({} if label == labels[0] else changes(first, good)),
            })  # fmt: skip
    return rows


def summary(good: Mapping[int, Case], first: Mapping[int, Case]) -> Case:
    """Return the figures of a server's answered prompts, and its right answers ÷ the first server's."""
    answers = {i: right_answers(case) for i, case in good.items()}
    right, asked = sum(map(sum, answers.values())), sum(map(len, answers.values()))
    shared = sorted(first.keys() & good.keys())
    right_of_first = [sum(right_answers(first[i])) for i in shared]
    of_first, of_first_error = ratio_of_answers([sum(answers[i]) for i in shared], right_of_first)
    others = sum(case["others"] for case in good.values())
    return {
        "right": right,
        "asked": asked,
        "share": right / asked if asked else None,
        "share_error": error_of_share(list(answers.values())) if asked else None,
        "of_first": of_first,
        "of_first_error": of_first_error,
        "perplexity": math.exp(sum(case["nats"] for case in good.values()) / others) if others else None,
        "density": Pairs.of_cases(case for case in good.values() if "kept_pairs" in case).density,
    }


def error_of_share(answers: Sequence[Sequence[bool]]) -> float:
    """Return the standard error of the share of right answers, which are given by prompt.

    It is the binomial error, or the error between prompts if that is larger: answers of a prompt are not independent,
    because a block of keys that is left out may lose several of them.
    """
    total, count = sum(map(len, answers)), len(answers)
    share = sum(map(sum, answers)) / total
    binomial = math.sqrt(share * (1 - share) / total)
    if count < 2:
        return binomial
    squares = math.fsum((sum(of_prompt) - share * len(of_prompt)) ** 2 for of_prompt in answers)
    return max(binomial, math.sqrt(squares * count / (count - 1)) / total)


def ratio_of_answers(right: Sequence[int], baseline: Sequence[int]) -> tuple[float | None, float | None]:
    """Return right answers ÷ the baseline's, and the standard error over prompts, from the differences."""
    total = sum(baseline)
    if not total:
        return None, None
    changes = [(ours - theirs) / total for ours, theirs in zip(right, baseline)]
    return sum(right) / total, math.sqrt(len(changes)) * stdev(changes) if len(changes) > 1 else None


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean over prompts and its standard error; None for what too few prompts do not determine."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return fmean(values) if values else None, error


def tables(rows: Sequence[Case]) -> str:
    """Return the rows of ``summaries`` as Markdown tables, with standard errors."""
    first = rows[0]["label"]
    cells = [
        row
        | {"case": f"{row['task']}, {row['tokens']:,}", "answers": f"{row['right']} of {row['asked']}"}
        | {key: with_error(row.get(key), row.get(f"{key}_error"), form) for key, form in FORMATS.items()}
        for row in rows
    ]
    changed = [row for row in cells if row["label"] != first]
    title = f"Perplexity and next-token distributions, compared with {first}"
    caption = "KL: nats, a lower bound. top-1: share of positions with the same most likely token."
    right = table_of("Answers inside the prompt", COLUMNS, cells, "right: all tokens of the answer rank first")
    return "\n".join([right, *([table_of(title, CHANGE_COLUMNS, changed, caption)] if changed else [])])


def with_error(value: float | None, error: float | None, form: str) -> str:
    """Format a number and its standard error, such as ``0.99 ± 0.01``."""
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.removeprefix('+')}}")


def failure_lines(cases: Sequence[Case]) -> list[str]:
    """Return a line for each failed request, and for each server of this backend without sparse prefill."""
    lines = [f"failed, and not counted: {name_case(case)}: {case['error']}" for case in cases if case["error"]]
    explained = {fallback.value: fallback.explain for fallback in Fallback}
    counted = [case for case in cases if "dense_rows" in case and case["level"] not in (0, EXACT)]
    for label in dict.fromkeys(case["label"] for case in counted):
        of_label = [case for case in counted if case["label"] == label]
        if Pairs.of_cases(of_label).density is None:
            rows = sum((Counter(case["dense_rows"]) for case in of_label), Counter[str]())
            reasons = [f"{explained.get(why, why)} (dense rows: {count:,})" for why, count in rows.items()]
            lines.append(f"{label}: no request ran sparse: {'; '.join(reasons) or 'it counted no rows'}")
    return lines
