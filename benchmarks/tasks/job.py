# SPDX-License-Identifier: Apache-2.0
"""Tasks asked of servers, the same prompts for all, and what their answers say."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.tasks import FAMILIES, TASKS
from benchmarks.tasks.task import Haystack, Prompts
from vllm_sparse_backend.demo.model import project_text
from vllm_sparse_backend.measure.answers import Share, Templates, standard_error
from vllm_sparse_backend.measure.contestants import At, Case, densities
from vllm_sparse_backend.measure.endpoint import Endpoint
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.texts import asked_text
from vllm_sparse_backend.measure.tokens import first_tokens, tokenize
from vllm_sparse_backend.settings.errors import not_one_of

SAMPLE = "The sailor opened 3,141 doors.\ndef f(x: int) -> None: ...\n" * 4
"""Of which tokenizers are compared."""

COLUMNS = {
    "label": "server",
    "task": "task",
    "tokens": "tokens",
    "answers": "found",
    "share": "share",
    "standard_error": "± s.e.",
    "difference": "less the first's",
    "difference_error": "± s.e. ",
    "density": "density, all tasks",
    "failed": "failed requests",
}
PERPLEXITY_COLUMNS = {
    "label": "server",
    "tokens": "tokens",
    "perplexity": "perplexity",
    "standard_error": "± s.e.",
    "of_first": "of the first's",
    "of_first_error": "± s.e. ",
    "failed": "failed requests",
}


def chosen_tasks(text: str) -> tuple[str, ...]:
    """Names of tasks, or of families for all of theirs, with commas between. Raises BenchError on another."""
    found: dict[str, None] = {}
    for name in (part.strip() for part in text.split(",") if part.strip()):
        if name in FAMILIES:
            found |= dict.fromkeys(task.name for task in FAMILIES[name])
        elif name in TASKS:
            found[name] = None
        else:
            raise BenchError(f"--tasks: {not_one_of(name, {*FAMILIES, *TASKS})}")
    if not found:
        raise BenchError(f"--tasks: given {text!r}, expected names of tasks, with commas between")
    return tuple(found)


@dataclass(frozen=True)
class TaskJob:
    """All that makes the prompts, but for the tokenizer: a ``Job`` of servers."""

    fields: ClassVar[tuple[str, ...]] = ("task", "tokens", "prompt")

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    prompts: int
    """Of each task and length."""
    seed: int
    templates: Templates
    text: str | None
    chat: bool
    first_token: str | None

    @staticmethod
    def about(tasks: str, lengths: Sequence[int], prompts: int, text: Path | None, **others: Any) -> "TaskJob":
        read = asked_text(text, lengths, prompts)
        return TaskJob(chosen_tasks(tasks), tuple(dict.fromkeys(lengths)), prompts, text=read, **others)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def _whole_text(self) -> str:
        """The text whose perplexity is asked; empty where none is."""
        return self._any_text if any(TASKS[name].whole_text for name in self.tasks) else ""

    @property
    def _any_text(self) -> str:
        return self.text or project_text()

    def key(self, *context: object) -> str:
        """Equal where the prompts are, and what they are asked in (``context``)."""
        made_of = asdict(self) | {"whole_text": self._any_text, "context": context}
        # Others may be asked for later, perplexity too, or fewer: cases name their task and length.
        for field in ("tasks", "lengths"):
            del made_of[field]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]

    @property
    def wanted(self) -> list[At]:
        return list(product(self.tasks, self.lengths, range(self.prompts)))

    def sample(self, endpoint: Endpoint) -> object:
        return endpoint.tokenize(SAMPLE) if endpoint.tokenizes() else None

    def build(self, endpoint: Endpoint) -> Callable[[Endpoint, At], Case]:
        tokenizes = endpoint.tokenizes()
        if self._whole_text and not tokenizes:
            raise BenchError(f"{endpoint.name}: {endpoint.url} has no /tokenize: perplexity needs a vLLM server")
        prompts = Prompts(
            self.seed, self.prompts, Haystack(self.text), self.templates, self.chat, tokenizes,
            first_tokens(endpoint, self.first_token) if tokenizes else [],
            tokenize(endpoint, self._whole_text),
        )  # fmt: skip
        for name, length in product(self.tasks, self.lengths):
            TASKS[name].check(endpoint, prompts, length)

        def ask(endpoint: Endpoint, at: At) -> Case:
            name, length, number = at
            return TASKS[str(name)].ask(endpoint, prompts, int(str(length)), int(str(number)))

        return ask


def summaries(cases: Sequence[Case], labels: Sequence[str]) -> list[Case]:
    """For each task, length and label: what was found of what was asked for, beside the first label's.

    ``difference``: of the shares on prompts that both answered, with the standard error of such differences.
    """
    density = densities(cases)
    rows = []
    for (task, length), of in _grouped(cases, whole_text=False):
        first = _by_number(of, labels[0])
        for label in labels:
            mine = [case for case in of if case["label"] == label]
            good = _by_number(of, label)
            shares = [Share(sum(case["found"]), len(case["found"])) for case in good.values()]
            whole = Share(sum(one.right for one in shares), sum(one.asked for one in shares))
            apart = [_share(good[i]) - _share(first[i]) for i in good.keys() & first.keys()]
            compared = label != labels[0] and bool(apart)
            rows.append({
                "label": label, "task": task, "tokens": length, "answers": str(whole) or None,
                "share": whole.share if shares else None, "standard_error": standard_error(shares) if shares else None,
                "difference": math.fsum(apart) / len(apart) if compared else None,
                "difference_error": error_of_mean(apart) if compared else None,
                "density": density.get(label), "failed": len(mine) - len(good),
            })  # fmt: skip
    return rows


def _grouped(cases: Sequence[Case], whole_text: bool) -> Iterable[tuple[tuple[str, int], list[Case]]]:
    """Cases of requests by task and length, in order: of the tasks that ask about a whole text, or of the others."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        task = TASKS.get(case["task"] or "")
        if task is not None and task.whole_text == whole_text:
            groups.setdefault((task.name, case["tokens"]), []).append(case)
    order = list(TASKS)
    return sorted(groups.items(), key=lambda group: (order.index(group[0][0]), group[0][1]))


def _by_number(cases: Sequence[Case], label: str) -> dict[int, Case]:
    return {case["prompt"]: case for case in cases if case["label"] == label and case["error"] is None}


def _share(case: Case) -> float:
    return sum(case["found"]) / len(case["found"])


def error_of_mean(values: Sequence[float]) -> float | None:
    """None for fewer than two."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def perplexities(cases: Sequence[Case], labels: Sequence[str]) -> list[Case]:
    """For each length and label: over all tokens, and ``by_place``: {(first, past the last): perplexity}.

    ``of_first``: times the first label's on the texts that both answered.
    """
    rows = []
    for (_, length), of in _grouped(cases, whole_text=True):
        first = {i: _nats(case) for i, case in _by_number(of, labels[0]).items()}
        for label in labels:
            good = _by_number(of, label)
            nats = {i: _nats(case) for i, case in good.items()}
            apart = [nats[i] - first[i] for i in nats.keys() & first.keys()] if label != labels[0] else []
            perplexity, error = _exponential(list(nats.values()))
            of_first, of_first_error = _exponential(apart)
            rows.append({
                "label": label, "tokens": length, "perplexity": perplexity, "standard_error": error,
                "of_first": of_first, "of_first_error": of_first_error,
                "failed": sum(case["label"] == label for case in of) - len(good), "by_place": _by_place(good.values()),
            })  # fmt: skip
    return rows


def _nats(case: Case) -> float:
    """Mean negative log-probability of a text's tokens."""
    return math.fsum(p[2] for p in case["positions"]) / sum(p[3] for p in case["positions"])


def _exponential(nats: Sequence[float]) -> tuple[float | None, float | None]:
    """Of the mean, and its standard error."""
    if not nats:
        return None, None
    value, error = math.exp(math.fsum(nats) / len(nats)), error_of_mean(nats)
    return value, None if error is None else value * error


def _by_place(cases: Iterable[Case]) -> dict[tuple[int, int], float]:
    totals: dict[tuple[int, int], tuple[float, int]] = {}
    for case in cases:
        for low, high, nats, count in case["positions"]:
            before = totals.get((low, high), (0.0, 0))
            totals[low, high] = before[0] + nats, before[1] + count
    return {place: math.exp(nats / count) for place, (nats, count) in sorted(totals.items())}


def by_depth(cases: Sequence[Case], task: str, label: str) -> dict[int, dict[int, Share]]:
    """Of a task that asks for one thing: right answers by length and tenth of the depth."""
    found: dict[int, dict[int, Share]] = {}
    for case in cases:
        if case["part"] == "prompt" and (case["task"], case["label"]) == (task, label) and case["error"] is None:
            if case.get("depth") is None:
                continue
            of = found.setdefault(case["tokens"], {})
            tenth = min(9, int(10 * case["depth"]))
            before = of.get(tenth, Share(0, 0))
            of[tenth] = Share(before.right + sum(case["found"]), before.asked + len(case["found"]))
    return found


def add_figures(report: Report, rows: Sequence[Case], perplexity: Sequence[Case], model: str) -> None:
    """Of those whose requests were all answered: prompts would differ otherwise."""
    for row in rows:
        if not row["failed"] and row["share"] is not None:
            name = f"{row['label']}, {row['task']}, {row['tokens']:,} tokens, {model}"
            report.add_figure(name, row["share"], "share", "higher")
    for row in perplexity:
        if not row["failed"] and row["perplexity"] is not None:
            name = f"{row['label']}, perplexity, {row['tokens']:,} tokens, {model}"
            report.add_figure(name, row["perplexity"], "ratio", "lower")
