# SPDX-License-Identifier: Apache-2.0
"""`eval answers`: sends the same prompts to several servers, started one after the other or already running."""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.input_files import MAX_DATA_BYTES, read_text
from vllm_sparse_backend.config.metrics import PREFIX
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.evaluation.answers import Prompt, Share, Templates, build_prompt, score, standard_error
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.compared_servers import Contestant, announce_start, opened
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

COLUMNS = {
    "label": "server",
    "tokens": "tokens",
    "answers": "right",
    "share": "share",
    "of_first": "÷ first",
    "perplexity_change": "perplexity, %",
    "density": "density",
}


@dataclass(frozen=True)
class AnswerWorkload:
    """Everything that determines the prompts, except the tokenizer."""

    lengths: tuple[int, ...]
    count: int
    """Prompts of each length."""
    facts: int
    text: str | None
    made: dict[PromptKey, Prompt] = field(default_factory=dict, compare=False)
    """The prompts, once a server is available to tokenize."""
    tokens: list[int] = field(default_factory=list, compare=False)
    """Tokens of a sample of the text, by that server."""

    @staticmethod
    def from_text(text: Path | None, lengths: Sequence[int], count: int, facts: int) -> "AnswerWorkload":
        """Return the workload over a text file or folder, or over generated prose if ``text`` is None."""
        # A token has fewer than eight characters on average. The server tokenises the whole text.
        read = None if text is None else read_prompt_text(text, 8 * max(lengths) * max(4, count))
        return AnswerWorkload(tuple(dict.fromkeys(lengths)), count, facts, read)

    def require_room(self) -> None:
        """Raise BenchError before a server starts if a length is too short for the facts."""
        if self.facts > (most := min(self.lengths) // FACT_TOKENS):
            raise BenchError(
                f"--facts: given {self.facts}, expected at most {most} in a prompt of {min(self.lengths):,} tokens"
            )

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def source(self) -> str:
        """The text. Generated prose has at least one token per word, enough for separate stretches."""
        words = max(2 * self.longest, self.longest + 16 * self.count)
        return self.text if self.text is not None else prose(words, SEED)

    def key(self, *context: object) -> str:
        """Return a hash that is equal for equal prompts in an equal ``context``."""
        made_of = {name: value for name, value in vars(self).items() if name not in ("made", "tokens", "source")}
        made_of |= {"text": self.source, "context": context}
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]

    @property
    def wanted(self) -> list[PromptKey]:
        return list(product(self.lengths, range(self.count)))

    def make(self, endpoint: Endpoint) -> bool:
        """Build the prompts with the first server's tokenizer, and return whether this server's tokenizer agrees."""
        sample = endpoint.tokenize(self.source[:2000], special=True)
        if not self.made:
            self.made.update(self.build_prompts(endpoint))
            self.tokens.extend(sample)
        return sample == self.tokens

    def ask(self, endpoint: Endpoint, prompt_key: PromptKey) -> Case:
        """Send one prompt, and return its case. A failed or incomplete request has an ``error`` and no answers."""
        prompt = self.made[prompt_key]
        case: Case = {"sha256": prompt.sha256, "error": None}
        began = time.perf_counter()
        try:
            scores = score(prompt, endpoint.prompt_logprobs(prompt.token_ids))
        except RequestError as error:
            return case | {"error": str(error)}
        answers = [
            {"place": answer.begin, "distance": answer.distance, "ranks": ranks}
            for answer, ranks in zip(prompt.answers, scores.ranks)
        ]
        seconds = round(time.perf_counter() - began, 3)
        return case | {"seconds": seconds, "nats": scores.nats, "others": scores.others, "answers": answers}

    def build_prompts(self, endpoint: Endpoint) -> dict[PromptKey, Prompt]:
        """Build all prompts, each from a different stretch of the text."""
        text_ids = endpoint.tokenize(self.source)
        begin_ids = endpoint.first_tokens()
        # Stretches begin in different places, so that no two prompts of a length begin alike.
        spare = len(text_ids) - self.longest
        if spare < 16 * self.count:
            most = self.longest + 16 * self.count
            raise BenchError(f"text: given {len(text_ids):,} tokens, expected at least {most:,} for such prompts")

        built: dict[PromptKey, Prompt] = {}
        for length in self.lengths:
            for i in range(self.count):
                rng = Random(f"{SEED}/{length}/{i}")
                start = spare * i // self.count + rng.randrange(spare // self.count)
                stretch = text_ids[start : start + length]
                prompt = (endpoint.tokenize, begin_ids, stretch, length, self.facts, Templates(), rng)
                try:
                    built[length, i] = build_prompt(*prompt)
                except BenchError as error:
                    raise BenchError(f"prompts for the tokenizer of {endpoint.model}: {error}") from None
        return built


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
    if len({contestant.label for contestant in contestants}) < len(contestants):
        raise BenchError(
            f"--label: given {', '.join(contestant.label for contestant in contestants)}, expected each label only once"
        )
    answered = {(case["label"], case["tokens"], case["prompt"]) for case in report.cases if case["part"] == "prompt"}
    return {
        contestant.label: [
            prompt_key for prompt_key in workload.wanted if (contestant.label, *prompt_key) not in answered
        ]
        for contestant in contestants
    }


def ask_all(
    contestants: Sequence[Contestant], workload: AnswerWorkload, key: str, report: Report, concurrency: int = 1
) -> None:
    """Add a case for each server and prompt that the report lacks. Raises BenchError or ServerError."""
    todo = missing_requests(contestants, workload, report)
    waiting = [contestant for contestant in contestants if todo[contestant.label]]
    for _, group in groupby(waiting, key=lambda contestant: contestant.open):
        announce_start(levels := list(group), report)
        with opened(levels) as endpoints:
            # The first server that is ready makes the prompts for all servers.
            if not workload.make(endpoints[0]):
                whose = "its tokenizer differs from the first server's"
                raise BenchError(f"{levels[0].label}: {whose}, so prompts would differ")
            for contestant, endpoint in zip(levels, endpoints, strict=True):
                names = {"key": key, "label": contestant.label, "what": contestant.what, "model": contestant.model}
                base = names | {"level": contestant.level}
                for case in _ask_server(endpoint, workload, todo[contestant.label], concurrency):
                    report.add_case(base | case)


def _ask_server(
    endpoint: Endpoint, workload: AnswerWorkload, todo: Sequence[PromptKey], concurrency: int
) -> Iterator[Case]:
    """Yield a case for each prompt, then a case with the density over all prompts and the reasons for dense rows."""
    before = endpoint.metrics()
    pool = ThreadPoolExecutor(concurrency)
    try:
        for prompt_key, case in zip(todo, pool.map(lambda prompt_key: workload.ask(endpoint, prompt_key), todo)):
            yield {"part": "prompt", "tokens": prompt_key[0], "prompt": prompt_key[1], **case}
    finally:
        # After an interruption, do not wait for prompts that take minutes. They end with the server.
        pool.shutdown(wait=False, cancel_futures=True)
    after = endpoint.metrics()
    if PREFIX in before and PREFIX in after:  # the server counts pairs
        now, then = parse_metrics(after), parse_metrics(before)
        dense = {reason: count for (path, reason), count in (now.rows - then.rows).items() if path == "dense"}
        figures = (now.pairs - then.pairs).figures
        yield {"part": "density", "tokens": None, "prompt": None, **figures, "dense_rows": dense}


def densities(cases: Sequence[Case]) -> dict[str, float | None]:
    """Return the density by label, over all runs in a file."""
    counted = [case for case in cases if case["part"] == "density"]
    labels = dict.fromkeys(case["label"] for case in counted)
    return {label: Pairs.of_cases(case for case in counted if case["label"] == label).density for label in labels}


def failure_lines(cases: Sequence[Case]) -> list[str]:
    """Return a line for each failed request, and for each server of this backend without sparse prefill."""
    prompt_cases = [case for case in cases if case["part"] == "prompt"]
    lines = [
        f"failed, and not counted: {case['label']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}: "
        f"{case['error']}"
        for case in prompt_cases
        if case["error"]
    ]
    exact_labels = {case["label"] for case in cases if case.get("level") in (0, EXACT)}
    for label, density in densities(cases).items():
        if density is None and label not in exact_labels:
            lines.append(f"{label}: no request ran sparse: {_why_dense([c for c in cases if c['label'] == label])}")
    return lines


def _why_dense(cases: Sequence[Case]) -> str:
    """Explain why a server ran nothing sparse: the reasons that it counted, or failed requests."""
    rows = sum((Counter(case["dense_rows"]) for case in cases if case["part"] == "density"), Counter[str]())
    if rows:
        explained = {fallback.value: fallback.explain for fallback in Fallback}
        return "; ".join(f"{explained.get(why, why)} (dense rows: {count:,})" for why, count in rows.items())
    failed = all(case["error"] for case in cases if case["part"] == "prompt")
    return "all of its requests failed" if failed else "see the server's log"


def describe_case(case: Case) -> str:
    """Return the outcome of a request in a few words."""
    if case["error"] is not None:
        return f"failed: {case['error']}"
    return f"{sum(right_answers(case))} of {len(case['answers'])} right, {case['seconds']:.1f} s"


def right_answers(case: Case) -> list[bool]:
    """Return for each answer whether it is right: all of its tokens have rank 1."""
    return [all(rank == 1 for rank in answer["ranks"]) for answer in case["answers"]]


def perplexity_change(first: Mapping[int, Case], second: Mapping[int, Case]) -> tuple[float | None, float | None]:
    """Return the change of perplexity in percent over prompts that both servers answered, and its standard error."""
    nats = [
        second[i]["nats"] / second[i]["others"] - case["nats"] / case["others"]
        for i, case in first.items()
        if i in second
    ]
    if not nats:
        return None, None
    ratio = math.exp(fmean(nats))
    return 100 * (ratio - 1), 100 * ratio * stdev(nats) / math.sqrt(len(nats)) if len(nats) > 1 else None


def summaries(cases: Sequence[Case], labels: Sequence[str], lengths: Sequence[int]) -> list[Case]:
    """Return a row for each label and length: right answers, and their ratio to the first label's on shared prompts."""
    prompt_cases = {(c["label"], c["tokens"], c["prompt"]): c for c in cases if c["part"] == "prompt"}
    density = densities(cases)
    rows = []
    for length in lengths:
        base = {
            i: c
            for (label, n, i), c in prompt_cases.items()
            if label == labels[0] and n == length and c["error"] is None
        }
        for label in labels:
            cases_of_row = [c for (name, n, _), c in prompt_cases.items() if name == label and n == length]
            good = {c["prompt"]: c for c in cases_of_row if c["error"] is None}
            shares = [Share(sum(right_answers(c)), len(c["answers"])) for c in good.values()]
            whole = Share(sum(share.right for share in shares), sum(share.total for share in shares))
            answered_by_both = base.keys() & good.keys()
            first = sum(sum(right_answers(base[i])) for i in answered_by_both)
            others = sum(c["others"] for c in good.values())
            change, its_error = (None, None) if label == labels[0] else perplexity_change(base, good)
            rows.append({
                "label": label, "tokens": length, "answers": str(whole) or None, "right": whole.right,
                "asked": whole.total, "share": whole.share if whole.total else None,
                "standard_error": standard_error(shares) if whole.total else None,
                "of_first": sum(sum(right_answers(good[i])) for i in answered_by_both) / first if first else None,
                "perplexity": math.exp(sum(c["nats"] for c in good.values()) / others) if others else None,
                "perplexity_change": change, "perplexity_change_error": its_error,
                "density": density.get(label), "failed": len(cases_of_row) - len(good),
            })  # fmt: skip
    return rows


def cells_of(row: Case) -> Case:
    """Format a row of ``summaries`` for ``COLUMNS``, with standard errors; density is over all lengths."""
    return row | {
        "share": with_error(row["share"], row["standard_error"], ".2f"),
        "perplexity_change": with_error(row["perplexity_change"], row["perplexity_change_error"], "+.2f"),
    }


def with_error(value: float | None, error: float | None, form: str) -> str:
    """Format a number and its standard error, such as ``0.99 ± 0.01``."""
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:.2f}")
