# SPDX-License-Identifier: Apache-2.0
"""Results of ``eval answers``: shares of right answers, and comparisons with the first server."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.evaluation.answer_scores import AnsweredPrompt, PromptScores
from vllm_sparse_backend.evaluation.metrics_scrape import Pairs
from vllm_sparse_backend.evaluation.report import table_of

Row = dict[str, Any]
"""The figures of a task, length and label."""

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


def summaries(prompts: Sequence[AnsweredPrompt], labels: Sequence[str]) -> list[Row]:
    """Return a row for each task, length and label, compared with the first label on prompts that both answered."""
    by_case: dict[tuple[str, int], dict[str, list[AnsweredPrompt]]] = {}
    for prompt in prompts:
        if prompt.label in labels:
            case = by_case.setdefault((prompt.key.task, prompt.key.tokens), {label: [] for label in labels})
            case[prompt.label].append(prompt)
    rows = []
    for (task, length), by_label in by_case.items():
        first = _scores(by_label[labels[0]])
        for label, of_label in by_label.items():
            scores = _scores(of_label)
            pairs = [prompt.pairs for prompt in of_label if prompt.scores and prompt.pairs]
            rows.append({
                "label": label, "task": task, "tokens": length, **summary(scores, first),
                "density": sum(pairs, Pairs()).density, "failed": sum(prompt.scores is None for prompt in of_label),
                **({} if label == labels[0] else changes(first, scores)),
            })  # fmt: skip
    return rows


def _scores(prompts: Sequence[AnsweredPrompt]) -> dict[int, PromptScores]:
    """Return the scores of the answered prompts by their index."""
    return {prompt.key.prompt: prompt.scores for prompt in prompts if prompt.scores}


def summary(scores: Mapping[int, PromptScores], first: Mapping[int, PromptScores]) -> Row:
    """Return the figures of a server's answered prompts, and its right answers ÷ the first server's."""
    right_by_prompt = [prompt.right for prompt in scores.values()]
    right, asked = sum(map(sum, right_by_prompt)), sum(map(len, right_by_prompt))
    shared = sorted(first.keys() & scores.keys())
    of_first, of_first_error = ratio_of_answers(
        [scores[i].num_right for i in shared], [first[i].num_right for i in shared]
    )
    text_tokens = sum(prompt.text_tokens for prompt in scores.values())
    return {
        "right": right,
        "asked": asked,
        "share": right / asked if asked else None,
        "share_error": error_of_share(right_by_prompt) if asked else None,
        "of_first": of_first,
        "of_first_error": of_first_error,
        "perplexity": math.exp(sum(p.nats for p in scores.values()) / text_tokens) if text_tokens else None,
    }


def changes(first: Mapping[int, PromptScores], second: Mapping[int, PromptScores]) -> Row:
    """Compare two servers on the prompts that both answered: means over prompts, with standard errors."""
    shared = sorted(first.keys() & second.keys())
    nats, error = mean_and_error([second[i].mean_nats - first[i].mean_nats for i in shared])
    ratio = math.exp(nats or 0)
    row = {
        "perplexity_change": 100 * (ratio - 1) if shared else None,
        "perplexity_change_error": None if error is None else 100 * ratio * error,
    }
    for part in ("text", "answers"):
        agreements = [second[i].next_tokens[part].against(first[i].next_tokens[part]) for i in shared]
        for figure in ("kl", "top1"):
            key = f"{part}_{figure}"
            row[key], row[f"{key}_error"] = mean_and_error([getattr(agreement, figure) for agreement in agreements])
    return row


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
    _, error = mean_and_error([len(right) * (ours - theirs) / total for ours, theirs in zip(right, baseline)])
    return sum(right) / total, error


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean over prompts and its standard error; None where there are too few prompts."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return fmean(values) if values else None, error


def tables(rows: Sequence[Row]) -> str:
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
    text = table_of("Answers inside the prompt", COLUMNS, cells, "right: all tokens of the answer rank first")
    if changed:
        text += "\n" + table_of(title, CHANGE_COLUMNS, changed, caption)
    return text


def with_error(value: float | None, error: float | None, form: str) -> str:
    """Format a number and its standard error, such as ``0.99 ± 0.01``."""
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.removeprefix('+')}}")


def failure_lines(prompts: Sequence[AnsweredPrompt]) -> list[str]:
    """Return a line for each failed request, and for each server of this backend without sparse prefill."""
    lines = [f"failed, and not counted: {prompt}: {prompt.error}" for prompt in prompts if prompt.error]
    explained = {fallback.value: fallback.explain for fallback in Fallback}
    pairs: dict[str, Pairs] = defaultdict(Pairs)
    dense_rows: dict[str, Counter[str]] = defaultdict(Counter)
    for prompt in prompts:
        if prompt.pairs is not None and prompt.level not in (0, EXACT):
            pairs[prompt.label] += prompt.pairs
            dense_rows[prompt.label].update(prompt.dense_rows or {})
    for label, of_label in pairs.items():
        if of_label.density is None:
            reasons = [f"{explained.get(why, why)} (dense rows: {n:,})" for why, n in dense_rows[label].items()]
            lines.append(f"{label}: no request ran sparse: {'; '.join(reasons) or 'it counted no rows'}")
    return lines
