# SPDX-License-Identifier: Apache-2.0
"""Errors over turns: conversations whose cached prefixes were themselves prefilled sparsely, turn by turn.

    python -m benchmarks.turns MODEL TEXT.txt stock=http://localhost:8000 ours=http://localhost:8001 --json turns.json

A setting is NAME=URL or NAME=URL@LEVEL; the first is the baseline. A conversation begins with ``--start`` tokens of the
text, and each turn appends ``--growth`` tokens. Each of these parts states facts. After a turn, two kinds of requests
read the conversation through the prefix cache:

* Questions: the conversation, and a line that asks for a fact, up to the answer. Half of the facts are from this turn
  (fresh), half from earlier parts (old). An answer is right if greedy decoding returns all of its tokens.
* Places: the conversation up to a random place in this turn, for the distribution of the next token.

They add no whole block that the next turn would find in the cache. ``prompt_logprobs`` would take fewer requests, but
vLLM computes such prompts without its prefix cache. Settings run in parallel, because nothing is timed.

A change per turn is the slope of a linear fit, with its standard error over conversations. "Gained" are right answers
less the baseline's.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import typer
from scipy.stats import linregress

from benchmarks.options import Json
from benchmarks.traffic import CacheReads, show
from benchmarks.trained_models import Settings, endpoint_of, ratio_of_answers, tokenizer_of
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.evaluation.agreement import TOP, NextTokens, mean_and_error
from vllm_sparse_backend.evaluation.answer_run import require_room
from vllm_sparse_backend.evaluation.answers import NAMES, Encode, Line, Templates, weave
from vllm_sparse_backend.evaluation.client import Endpoint, connected
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.prompt_texts import read_prompt_text
from vllm_sparse_backend.evaluation.report import BenchError, table_of


@dataclass(frozen=True)
class Question:
    """The line's tokens up to the answer, and the answer's."""

    line_ids: list[int]
    answer_ids: list[int]

    @staticmethod
    def of(encode: Encode, name: str, value: str) -> "Question":
        line = Line.of(encode, Templates().question, name, value)
        return Question(line.token_ids[: line.begin], line.token_ids[line.begin : line.end])


@dataclass(frozen=True)
class Turn:
    end: int
    """Number of the conversation's tokens with this turn."""
    questions: list[Question]
    """Fresh ones, then as many old ones."""
    places: list[int]


@dataclass(frozen=True)
class Conversation:
    token_ids: list[int]
    turns: list[Turn]
    """The first has no questions: there are no old facts yet."""

    def requests(self) -> Iterator[tuple[int, int]]:
        """Yield the number of tokens of each request, and how many of them are cached."""
        for earlier, turn in pairwise([Turn(0, [], []), *self.turns]):
            yield turn.end, earlier.end
            yield from ((turn.end + len(question.line_ids), turn.end) for question in turn.questions)
            yield from ((place, place - 1) for place in turn.places)


@dataclass(frozen=True)
class Outcome:
    """A setting's results after one turn of a conversation."""

    right: list[bool]
    text: NextTokens
    """Distributions at the places."""


class Comparison(NamedTuple):
    """A setting's results after one turn of a conversation, and the baseline's."""

    fresh: int
    old: int
    baseline_fresh: int
    baseline_old: int
    kl: float
    top1: float

    @staticmethod
    def of(outcome: Outcome, baseline: Outcome) -> "Comparison":
        half = len(outcome.right) // 2
        right = [sum(part) for x in (outcome, baseline) for part in (x.right[:half], x.right[half:])]
        return Comparison(*right, *outcome.text.against(baseline.text))

    @property
    def right(self) -> int:
        return self.fresh + self.old

    @property
    def baseline_right(self) -> int:
        return self.baseline_fresh + self.baseline_old

    @property
    def gained(self) -> int:
        """Right answers less the baseline's."""
        return self.right - self.baseline_right


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Measure answers and next-token distributions by turn, compared with the first setting."""

    model: Annotated[Path, typer.Argument(help="Folder of the model, for its tokenizer.")]
    text: Path
    settings: Settings
    conversations: Annotated[int, typer.Option(help="Conversations, in parallel.")] = 8
    turns: Annotated[int, typer.Option(help="Turns of a conversation.", min=2)] = 12
    start: Annotated[int, typer.Option(help="Tokens before the first turn.")] = 8000
    growth: Annotated[int, typer.Option(help="New tokens of a turn.")] = 2000
    questions: Annotated[int, typer.Option(help="Questions, and places, of each turn; an even number.")] = 24
    seed: int = 0
    out: Json = None

    def run(self) -> None:
        endpoints = [endpoint_of(text) for text in self.settings]
        drawn = list(self.draw())
        with ThreadPoolExecutor(len(endpoints)) as pool:
            first, *others = pool.map(partial(run_all, drawn), endpoints)
        table: list[dict[str, Any]] = []
        slopes: list[dict[str, Any]] = []
        raw: dict[str, Any] = {}
        for endpoint, outcomes in zip(endpoints[1:], others):
            compared = [list(map(Comparison.of, *pair)) for pair in zip(outcomes, first)]
            table += rows(endpoint.name, compared)
            slopes += slope_rows(endpoint.name, compared)
            raw[endpoint.name] = [[x._asdict() for x in turns] for turns in compared]
        show(table, self.out, slopes=slopes, conversations=raw)
        print(table_of("Change per turn", {column: column for column in slopes[0]}, slopes))

    def draw(self) -> Iterator[Conversation]:
        """Yield conversations, each from another stretch of the text."""
        require_room([self.start, self.growth], self.questions // 2)
        encode, begin_ids = tokenizer_of(self.model)
        ids = encode(read_prompt_text(self.text))
        whole = self.start + self.turns * self.growth
        if len(ids) < whole:
            raise BenchError(f"{self.text}: given {len(ids):,} tokens, expected at least {whole:,}, a conversation's")
        for i in range(self.conversations):
            at = i * (len(ids) - whole) // max(self.conversations - 1, 1)
            yield self.draw_conversation(encode, begin_ids, ids[at:], random.Random(f"{self.seed} {i}"))

    def draw_conversation(
        self, encode: Encode, begin_ids: Sequence[int], text_ids: Sequence[int], rng: random.Random
    ) -> Conversation:
        num_facts = self.questions // 2
        names = rng.sample(NAMES, (self.turns + 1) * num_facts)
        token_ids, turns, old = list(begin_ids), [], list[Question]()
        for i in range(self.turns + 1):
            begin, end = len(token_ids), self.start + i * self.growth
            facts = [(names.pop(), str(rng.randrange(1_000_000, 10_000_000))) for _ in range(num_facts)]
            lines = [Line.of(encode, Templates().fact, *fact).token_ids for fact in facts]
            room = end - begin - sum(map(len, lines))
            cuts = [[rng.randint(0, room)] for _ in lines]
            part, _ = weave([], text_ids[begin : begin + room], [[line] for line in lines], cuts)
            token_ids += part
            fresh = [Question.of(encode, *fact) for fact in facts]
            if old:
                places = rng.sample(range(begin + 1, end), self.questions)
                turns.append(Turn(end, fresh + rng.sample(old, num_facts), places))
            else:
                turns.append(Turn(end, [], []))
            old += fresh
        return Conversation(token_ids, turns)


def run_all(conversations: Sequence[Conversation], endpoint: Endpoint) -> list[list[Outcome]]:
    """Run all conversations in parallel, and return the outcomes of their turns but the first."""
    before, metrics = CacheReads.of(endpoint), parse_metrics(endpoint.metrics())
    with ThreadPoolExecutor(len(conversations)) as pool:
        outcomes = list(pool.map(partial(_run, endpoint), conversations))
    before.require(endpoint, (request for conversation in conversations for request in conversation.requests()))
    after = parse_metrics(endpoint.metrics())
    sparse, pairs = after.rows_of("sparse") - metrics.rows_of("sparse"), after.pairs - metrics.pairs
    print(f"{endpoint.name}: {sparse} rows ran sparse, density {pairs.density}", flush=True)
    return outcomes


def _run(endpoint: Endpoint, conversation: Conversation) -> list[Outcome]:
    ids, outcomes = conversation.token_ids, []
    for turn in conversation.turns:
        generate(endpoint, ids[: turn.end], 1)
        right = []
        for question in turn.questions:
            answer_ids, _ = generate(endpoint, ids[: turn.end] + question.line_ids, len(question.answer_ids))
            right.append(answer_ids == question.answer_ids)
        outcomes.append(Outcome(right, NextTokens([generate(endpoint, ids[:place], 1)[1] for place in turn.places])))
    return outcomes[1:]


def generate(endpoint: Endpoint, prompt: Sequence[int], tokens: int) -> tuple[list[int], dict[int, float]]:
    """Return the tokens of greedy decoding, and the ``TOP`` most likely tokens of the first position.

    A request for log-probabilities of generated tokens reads the prefix cache; one for ``prompt_logprobs`` does not.
    """
    body = {
        "model": endpoint.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": TOP,
        "return_tokens_as_token_ids": True, **endpoint.extra,
    }  # fmt: skip
    with connected(endpoint.url) as send:
        logprobs = json.load(send("/v1/completions", body))["choices"][0]["logprobs"]
    first = {_token_id(token): logprob for token, logprob in logprobs["top_logprobs"][0].items()}
    return list(map(_token_id, logprobs["tokens"])), first


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))  # as vLLM writes tokens with return_tokens_as_token_ids


def rows(name: str, conversations: Sequence[Sequence[Comparison]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each turn, and one for all. Errors are over conversations."""
    by_turn = [(str(i + 1), [[x] for x in column]) for i, column in enumerate(zip(*conversations))]
    for turn, groups in (*by_turn, ("all", conversations)):
        every = [x for group in groups for x in group]
        right, baseline = (
            [sum(getattr(x, key) for x in group) for group in groups] for key in ("right", "baseline_right")
        )
        answers, answers_error = ratio_of_answers(right, baseline)
        kl, kl_error = mean_and_error([fmean(x.kl for x in group) for group in groups])
        top1, top1_error = mean_and_error([fmean(x.top1 for x in group) for group in groups])
        yield {
            "setting": name, "turn": turn,
            "fresh": f"{sum(x.fresh for x in every)} for {sum(x.baseline_fresh for x in every)}",
            "old": f"{sum(x.old for x in every)} for {sum(x.baseline_old for x in every)}",
            "answers": answers, "± answers": answers_error, "KL": kl, "± KL": kl_error,
            "top-1": top1, "± top-1": top1_error,
        }  # fmt: skip


def slope_rows(name: str, conversations: Sequence[Sequence[Comparison]]) -> Iterator[dict[str, Any]]:
    for figure in ("gained", "kl", "top1"):
        change, error = slope([[getattr(x, figure) for x in turns] for turns in conversations])
        yield {"setting": name, "figure": figure, "per turn": change, "±": error}


def slope(conversations: Iterable[Sequence[float]]) -> tuple[float | None, float | None]:
    """Return the mean change per turn, and its standard error over conversations, whose turns are not independent."""
    return mean_and_error([linregress(range(len(values)), values).slope for values in conversations])


if __name__ == "__main__":
    run_alone(Turns)
