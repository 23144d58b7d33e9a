# SPDX-License-Identifier: Apache-2.0
"""Errors over turns: conversations whose cached prefixes were themselves prefilled sparsely, turn by turn.

    python -m benchmarks.turns MODEL TEXT.txt stock=http://localhost:8000 ours=http://localhost:8001 --json turns.json

A setting is NAME=URL or NAME=URL@LEVEL; the first is the baseline. A conversation begins with ``--start`` tokens of the
text, and each turn appends ``--growth`` tokens. These parts state facts at equal distances. After a turn, two kinds of
requests read the conversation through the prefix cache:

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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from scipy.stats import linregress

from benchmarks.options import Json, run_alone, show
from benchmarks.traffic import CacheReads, Settings, endpoint_of, show_rows
from vllm_sparse_backend.calibration.capture import load_tokenizer
from vllm_sparse_backend.calibration.prompts import encoder
from vllm_sparse_backend.evaluation.agreement import TOP, NextTokens
from vllm_sparse_backend.evaluation.answer_prompts import Statement
from vllm_sparse_backend.evaluation.answer_run import require_room
from vllm_sparse_backend.evaluation.answer_tables import mean_and_error, ratio_of_answers
from vllm_sparse_backend.evaluation.client import Endpoint, connected
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.tasks import fact_thread
from vllm_sparse_backend.prompts.lookups import NAMES, Encode, begin_ids
from vllm_sparse_backend.prompts.texts import read_prompt_text


@dataclass(frozen=True)
class Question:
    """The line's tokens up to the answer, and the answer's."""

    line_ids: list[int]
    answer_ids: list[int]

    @staticmethod
    def of(encode: Encode, question: Statement) -> "Question":
        line = question.encode(encode)
        ((begin, end),) = line.answers
        return Question(line.token_ids[:begin], line.token_ids[begin:end])


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


@dataclass(frozen=True)
class Comparison:
    """A setting's results and the baseline's."""

    right: np.ndarray  # [conversation, turn, question]
    baseline: np.ndarray  # [conversation, turn, question]
    agreement: dict[str, np.ndarray]  # [conversation, turn]

    @staticmethod
    def of(outcomes: Sequence[Sequence[Outcome]], baseline: Sequence[Sequence[Outcome]]) -> "Comparison":
        right, baseline_right = (np.array([[x.right for x in turns] for turns in of]) for of in (outcomes, baseline))
        agreements = [[x.text.against(y.text) for x, y in zip(*turns)] for turns in zip(outcomes, baseline)]
        kl, top1 = np.moveaxis(np.array(agreements), -1, 0)
        return Comparison(right, baseline_right, {"KL": kl, "top-1": top1})

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a row for each turn, and one for all. Errors are over conversations."""
        num_turns, half = self.right.shape[1], self.right.shape[2] // 2
        turns = {str(i + 1): slice(i, i + 1) for i in range(num_turns)} | {"all": slice(num_turns)}
        for turn, at in turns.items():
            row: dict[str, Any] = {"setting": name, "turn": turn}
            for kind, questions in (("answers", slice(None)), ("fresh", slice(half)), ("old", slice(half, None))):
                sums = [right[:, at, questions].sum(axis=(1, 2)).tolist() for right in (self.right, self.baseline)]
                row[kind], row[f"± {kind}"] = ratio_of_answers(*sums)
            for figure, values in self.agreement.items():
                row[figure], row[f"± {figure}"] = mean_and_error(values[:, at].mean(axis=1).tolist())
            yield row

    def slopes(self, name: str) -> Iterator[dict[str, Any]]:
        gained = self.right.sum(axis=2) - self.baseline.sum(axis=2, dtype=int)
        for figure, values in {"gained": gained, **self.agreement}.items():
            change, error = slope(values.tolist())
            yield {"setting": name, "figure": figure, "per turn": change, "±": error}


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
        endpoints = [endpoint_of(setting) for setting in self.settings]
        drawn = list(self.draw())
        # Threads would share one interpreter lock and send too slowly.
        with ProcessPoolExecutor(len(endpoints)) as pool:
            first, *others = pool.map(partial(run_all, drawn), endpoints)
        rows: list[dict[str, Any]] = []
        slopes: list[dict[str, Any]] = []
        for endpoint, outcomes in zip(endpoints[1:], others):
            comparison = Comparison.of(outcomes, first)
            rows += comparison.rows(endpoint.name)
            slopes += comparison.slopes(endpoint.name)
        show_rows(rows, self.out, slopes=slopes)
        show("Change per turn", slopes)

    def draw(self) -> Iterator[Conversation]:
        """Yield conversations, each from another stretch of the text."""
        require_room([self.start, self.growth], self.questions // 2)
        tokenizer = load_tokenizer(self.model)
        encode, start_ids = encoder(tokenizer), begin_ids(tokenizer)
        ids = encode(read_prompt_text(self.text))
        whole = self.start + self.turns * self.growth
        if len(ids) < whole:
            raise BenchError(f"{self.text}: given {len(ids):,} tokens, expected at least {whole:,}, a conversation's")
        for i in range(self.conversations):
            at = i * (len(ids) - whole) // max(self.conversations - 1, 1)
            yield self.draw_conversation(encode, start_ids, ids[at:], random.Random(f"{self.seed} {i}"))

    def draw_conversation(
        self, encode: Encode, start_ids: Sequence[int], text_ids: Sequence[int], rng: random.Random
    ) -> Conversation:
        num_facts = self.questions // 2
        names = rng.sample(NAMES, (self.turns + 1) * num_facts)
        token_ids, turns, old = list(start_ids), [Turn(self.start, [], [])], list[Question]()
        for end in range(self.start, self.start + self.turns * self.growth + 1, self.growth):
            begin, fresh = len(token_ids), list[Question]()
            for number in range(num_facts):
                fact, question = fact_thread(names.pop(), str(rng.randrange(1_000_000, 10_000_000)))
                line = fact.encode(encode).token_ids
                line_end = begin + (end - begin) * (number + 1) // num_facts
                token_ids += [*text_ids[len(token_ids) : line_end - len(line)], *line]
                fresh.append(Question.of(encode, question))
            if old:
                places = rng.sample(range(begin + 1, end), self.questions)
                turns.append(Turn(end, fresh + rng.sample(old, num_facts), places))
            old += fresh
        return Conversation(token_ids, turns)


def run_all(conversations: Sequence[Conversation], endpoint: Endpoint) -> list[list[Outcome]]:
    """Run all conversations in parallel, and return the outcomes of their turns but the first."""
    before, metrics_before = CacheReads.of(endpoint), parse_metrics(endpoint.metrics())
    with ThreadPoolExecutor(len(conversations)) as pool:
        outcomes = list(pool.map(partial(_run, endpoint), conversations))
    before.require(endpoint, (request for conversation in conversations for request in conversation.requests()))
    counts = parse_metrics(endpoint.metrics()) - metrics_before
    num_sparse = counts.by("rows", "path")["sparse"]
    print(f"{endpoint.name}: {num_sparse} rows ran sparse, density {counts.pairs.density}", flush=True)
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
    body = endpoint.body(prompt, tokens) | {"logprobs": TOP, "return_tokens_as_token_ids": True}
    with connected(endpoint.url) as send:
        logprobs = json.load(send("/v1/completions", body))["choices"][0]["logprobs"]
    first = {_token_id(token): logprob for token, logprob in logprobs["top_logprobs"][0].items()}
    return list(map(_token_id, logprobs["tokens"])), first


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))  # as vLLM writes tokens with return_tokens_as_token_ids


def slope(conversations: Iterable[Sequence[float]]) -> tuple[float | None, float | None]:
    """Return the mean change per turn, and its standard error over conversations, whose turns are not independent."""
    return mean_and_error([linregress(range(len(values)), values).slope for values in conversations])


if __name__ == "__main__":
    run_alone(Turns)
