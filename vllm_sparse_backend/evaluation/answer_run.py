# SPDX-License-Identifier: Apache-2.0
"""`eval answers`: sends the same prompts to several servers, started one after the other or already running."""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.input_files import MAX_DATA_BYTES, read_text
from vllm_sparse_backend.config.metrics import PREFIX
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.evaluation.agreement import TOP, NextTokens, mean_and_error
from vllm_sparse_backend.evaluation.answers import Prompt, Templates, TokenScores, build_prompt, standard_error
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.compared_servers import Contestant, groups, opened
from vllm_sparse_backend.evaluation.metrics_scrape import Pairs, parse_metrics
from vllm_sparse_backend.evaluation.prompt_texts import prose, read_prompt_text
from vllm_sparse_backend.evaluation.report import BenchError, Report

Case = dict[str, Any]
PromptKey = tuple[int, int]
"""Identifies a prompt: its number of tokens, and its index among prompts of that length."""

SEED = 0
"""Seed of facts and their places."""

FACT_TOKENS = 120
"""Minimum tokens of a prompt per fact: statement and question take about 50, and lines fill at most half."""

TEXT_POSITIONS = 512
"""Positions of a prompt outside answers whose next-token distributions are compared: evenly spaced."""

COLUMNS = {
    "label": "server",
    "tokens": "tokens",
    "answers": "right",
    "share": "share",
    "of_first": "÷ first",
    "density": "density",
}
CHANGE_COLUMNS = {
    "label": "server",
    "tokens": "tokens",
    "perplexity_change": "perplexity, %",
    "text_kl": "KL, text",
    "text_top1": "top-1",
    "answers_kl": "KL, answers",
    "answers_top1": "top-1",
}
"""Columns of the comparison with the first server."""


FORMATS = {
    "share": ".2f",
    "perplexity_change": "+.2f",
    "text_kl": ".4f",
    "text_top1": ".3f",
    "answers_kl": ".4f",
    "answers_top1": ".3f",
}
"""Formats of numbers that have a standard error."""


def require_room(lengths: Sequence[int], facts: int) -> None:
    """Raise BenchError before a server starts if a length is too short for the facts."""
    if facts > (most := min(lengths) // FACT_TOKENS):
        raise BenchError(f"--facts: given {facts}, expected at most {most} in a prompt of {min(lengths):,} tokens")


@dataclass(frozen=True)
class AnswerWorkload:
    """Everything that determines the prompts, except the tokenizer."""

    lengths: tuple[int, ...]
    count: int
    """Prompts of each length."""
    facts: int
    text: str

    @staticmethod
    def from_text(text: Path | None, lengths: Sequence[int], count: int, facts: int) -> "AnswerWorkload":
        """Return the workload over a text file or folder, or over generated prose if ``text`` is None."""
        longest = max(lengths)
        if text is not None:
            # A token has fewer than eight characters on average. The server tokenises the whole text.
            source = read_prompt_text(text, 8 * longest * max(4, count))
        else:
            # Prose has at least one token per word, enough for separate stretches.
            source = prose(max(2 * longest, longest + 16 * count), SEED)
        return AnswerWorkload(tuple(dict.fromkeys(lengths)), count, facts, source)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def key(self, *context: object) -> str:
        """Return a hash that is equal for equal prompts in an equal ``context``."""
        return hashlib.sha256(json.dumps(asdict(self) | {"context": context}).encode()).hexdigest()[:16]

    @property
    def wanted(self) -> list[PromptKey]:
        return list(product(self.lengths, range(self.count)))

    def sample_tokens(self, endpoint: Endpoint) -> list[int]:
        """Return tokens of the text by a server's tokenizer, to compare it with another's."""
        return endpoint.tokenize(self.text[:2000], special=True)

    def build_prompts(self, endpoint: Endpoint) -> dict[PromptKey, Prompt]:
        """Build all prompts with a server's tokenizer, each from a different stretch of the text."""
        text_ids = endpoint.tokenize(self.text)
        begin_ids = endpoint.first_tokens()
        # Stretches begin in different places, so that no two prompts of a length begin alike.
        spare = len(text_ids) - self.longest
        if spare < 16 * self.count:
            most = self.longest + 16 * self.count
            raise BenchError(f"text: given {len(text_ids):,} tokens, expected at least {most:,} for such prompts")

        built: dict[PromptKey, Prompt] = {}
        for length, i in self.wanted:
            rng = Random(f"{SEED}/{length}/{i}")
            start = spare * i // self.count + rng.randrange(spare // self.count)
            stretch = text_ids[start : start + length]
            try:
                built[length, i] = build_prompt(
                    endpoint.tokenize, begin_ids, stretch, length, self.facts, Templates(), rng
                )
            except BenchError as error:
                raise BenchError(f"prompts for the tokenizer of {endpoint.model}: {error}") from None
        return built


def ask(endpoint: Endpoint, prompt: Prompt) -> Case:
    """Send a prompt, and return its case. A failed or incomplete request has an ``error`` and no answers."""
    case: Case = {"sha256": prompt.sha256, "error": None}
    began = time.perf_counter()
    try:
        returned = endpoint.prompt_logprobs(prompt.token_ids, TOP)
        scores = TokenScores.of(prompt.token_ids, returned)
    except RequestError as error:
        return case | {"error": str(error)}
    answers = [
        {"place": answer.begin, "distance": answer.distance, "ranks": ranks}
        for answer, ranks in zip(prompt.answers, scores.of_answers(prompt))
    ]
    text_places = prompt.text_places
    sample = text_places[:: max(1, len(text_places) // TEXT_POSITIONS)]
    return case | {
        "seconds": round(time.perf_counter() - began, 3),
        "nats": math.fsum(-scores.logprobs[place] for place in text_places),
        "others": len(text_places),
        "answers": answers,
        "next_tokens": {
            part: str(NextTokens.of(returned, places))
            for part, places in (("text", sample), ("answers", prompt.answer_places))
        },
    }


def resume(report: Report, path: Path | None, key: str, contestants: Sequence[Contestant]) -> None:
    """Add an earlier run's cases, except failed requests. Raises BenchError if the file belongs to another run."""
    if path is None or not path.exists():
        return
    try:
        cases = json.loads(read_text(path, MAX_DATA_BYTES))["cases"]
        held = {case["label"]: case["what"] for case in cases}
        keys = {case["key"] for case in cases}
    except (ConfigurationError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of `eval {report.bench}`: {error!r}") from None
    if keys - {key}:
        raise BenchError(f"{path}: holds answers to other prompts, or of other servers; name another file with --json")
    for contestant in contestants:
        if (what := held.get(contestant.label, contestant.what)) != contestant.what:
            raise BenchError(
                f"{path}: holds {contestant.label} as {what}, now it is {contestant.what}; name another file"
            )
    report.cases.extend(case for case in cases if not case.get("error"))


def missing_requests(
    contestants: Sequence[Contestant], workload: AnswerWorkload, report: Report
) -> dict[str, list[PromptKey]]:
    """Return, by label, the prompts that a report lacks. Raises BenchError if two servers share a label."""
    labels = [contestant.label for contestant in contestants]
    if len(set(labels)) < len(labels):
        raise BenchError(f"--label: given {', '.join(labels)}, expected each label only once")
    answered = {(case["label"], case["tokens"], case["prompt"]) for case in prompt_cases(report.cases)}
    return {label: [key for key in workload.wanted if (label, *key) not in answered] for label in labels}


def ask_all(contestants: Sequence[Contestant], workload: AnswerWorkload, key: str, report: Report) -> None:
    """Add a case for each server and prompt that the report lacks. Raises BenchError or ServerError."""
    todo = missing_requests(contestants, workload, report)
    prompts: dict[PromptKey, Prompt] = {}
    sample: list[int] = []
    for group in groups([contestant for contestant in contestants if todo[contestant.label]]):
        with opened(group, report) as endpoints:
            for contestant, endpoint in zip(group, endpoints, strict=True):
                tokens = workload.sample_tokens(endpoint)
                if not prompts:  # the first server that is ready makes the prompts for all servers
                    sample, prompts = tokens, workload.build_prompts(endpoint)
                if tokens != sample:
                    raise BenchError(
                        f"{contestant.label}: its tokenizer differs from the first server's, so prompts would differ"
                    )
                about = {"key": key, "label": contestant.label, "what": contestant.what, "model": contestant.model}
                wanted = {prompt_key: prompts[prompt_key] for prompt_key in todo[contestant.label]}
                for case in _ask_server(endpoint, wanted):
                    report.add_case(about | {"level": contestant.level} | case)


def _ask_server(endpoint: Endpoint, prompts: Mapping[PromptKey, Prompt]) -> Iterator[Case]:
    """Yield a case for each prompt, then a case with the density over all prompts and the reasons for dense rows."""
    before = endpoint.metrics()
    for (tokens, i), prompt in prompts.items():
        yield {"part": "prompt", "tokens": tokens, "prompt": i, **ask(endpoint, prompt)}
    after = endpoint.metrics()
    if PREFIX in before and PREFIX in after:  # the server counts pairs
        now, then = parse_metrics(after), parse_metrics(before)
        dense = {reason: count for (path, reason), count in (now.rows - then.rows).items() if path == "dense"}
        figures = (now.pairs - then.pairs).figures
        yield {"part": "density", "tokens": None, "prompt": None, **figures, "dense_rows": dense}


def prompt_cases(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case["part"] == "prompt"]


def densities(cases: Sequence[Case]) -> dict[str, float | None]:
    """Return the density by label, over all runs in a file."""
    counted = [case for case in cases if case["part"] == "density"]
    labels = dict.fromkeys(case["label"] for case in counted)
    return {label: Pairs.of_cases(case for case in counted if case["label"] == label).density for label in labels}


def failure_lines(cases: Sequence[Case]) -> list[str]:
    """Return a line for each failed request, and for each server of this backend without sparse prefill."""
    lines = [
        f"failed, and not counted: {case['label']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}: "
        f"{case['error']}"
        for case in prompt_cases(cases)
        if case["error"]
    ]
    explained = {fallback.value: fallback.explain for fallback in Fallback}
    exact_labels = {case["label"] for case in cases if case.get("level") in (0, EXACT)}
    for label, density in densities(cases).items():
        if density is None and label not in exact_labels:
            rows = Counter[str]()
            for case in cases:
                if (case["label"], case["part"]) == (label, "density"):
                    rows.update(case["dense_rows"])
            reasons = [f"{explained.get(why, why)} (dense rows: {count:,})" for why, count in rows.items()]
            lines.append(f"{label}: no request ran sparse: {'; '.join(reasons) or 'it counted no rows'}")
    return lines


def describe_case(case: Case) -> str:
    """Return the outcome of a request in a few words."""
    if case["error"] is not None:
        return f"failed: {case['error']}"
    return f"{sum(right_answers(case))} of {len(case['answers'])} right, {case['seconds']:.1f} s"


def right_answers(case: Case) -> list[bool]:
    """Return for each answer whether it is right: all of its tokens have rank 1."""
    return [all(rank == 1 for rank in answer["ranks"]) for answer in case["answers"]]


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


def summaries(cases: Sequence[Case], labels: Sequence[str], lengths: Sequence[int]) -> list[Case]:
    """Return a row for each label and length: right answers, and their ratio to the first label's on shared prompts."""
    density = densities(cases)
    rows = []
    for length in lengths:
        of_length = [case for case in prompt_cases(cases) if case["tokens"] == length]
        answered = {
            label: {case["prompt"]: case for case in of_length if case["label"] == label and not case["error"]}
            for label in labels
        }
        first = answered[labels[0]]
        for label, good in answered.items():
            answers = {i: right_answers(case) for i, case in good.items()}
            right, asked = sum(map(sum, answers.values())), sum(map(len, answers.values()))
            shared = first.keys() & good.keys()
            right_of_first = sum(sum(right_answers(first[i])) for i in shared)
            others = sum(case["others"] for case in good.values())
            failed = [case for case in of_length if case["label"] == label and case["error"]]
            rows.append({
                "label": label, "tokens": length, "right": right, "asked": asked,
                "answers": f"{right} of {asked}" if asked else None, "share": right / asked if asked else None,
                "share_error": standard_error(list(answers.values())) if asked else None,
                "of_first": sum(sum(answers[i]) for i in shared) / right_of_first if right_of_first else None,
                "perplexity": math.exp(sum(case["nats"] for case in good.values()) / others) if others else None,
                "density": density.get(label), "failed": len(failed),
                **({} if label == labels[0] else changes(first, good)),
            })  # fmt: skip
    return rows


def cells_of(row: Case) -> Case:
    """Format a row of ``summaries`` for its columns, with standard errors; density is over all lengths."""
    return row | {key: with_error(row.get(key), row.get(f"{key}_error"), form) for key, form in FORMATS.items()}


def with_error(value: float | None, error: float | None, form: str) -> str:
    """Format a number and its standard error, such as ``0.99 ± 0.01``."""
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.removeprefix('+')}}")
