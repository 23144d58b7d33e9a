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

A slope is the change per turn: the mean of a linear fit's over conversations, with its standard error.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from scipy.stats import linregress

from benchmarks.options import Json
from benchmarks.traffic import CacheReads, show
from benchmarks.trained_models import Settings, endpoint_of, ratio_of_answers, tokenizer_of
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.evaluation.agreement import TOP, NextTokens, mean_and_error
from vllm_sparse_backend.evaluation.answers import NAMES, Encode, Line, Templates, weave
from vllm_sparse_backend.evaluation.client import Endpoint, connected
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.prompt_texts import read_prompt_text
from vllm_sparse_backend.evaluation.report import BenchError, table_of

TOKEN_ID = "token_id:"
"""Prefix of a token in vLLM's answers with ``return_tokens_as_token_ids``."""


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
    fresh: list[Question]
    old: list[Question]
    places: list[int]


@dataclass(frozen=True)
class Conversation:
    token_ids: list[int]
    start: int
    """Number of tokens of the first request, which nothing is asked after."""
    turns: list[Turn]


@dataclass(frozen=True)
class Outcome:
    """A setting's results after one turn of a conversation."""

    fresh: int
    old: int
    """Right answers."""
    answers: NextTokens
    """Distributions of each answer's first token."""
    text: NextTokens
    """Distributions at the places."""


@dataclass(frozen=True)
class Comparison:
    """A setting's results after one turn of a conversation, and the baseline's."""

    fresh: int
    old: int
    baseline_fresh: int
    baseline_old: int
    text_kl: float
    text_top1: float
    answers_kl: float

    @staticmethod
    def of(outcome: Outcome, baseline: Outcome) -> "Comparison":
        text, answers = outcome.text.against(baseline.text), outcome.answers.against(baseline.answers)
        return Comparison(
            outcome.fresh, outcome.old, baseline.fresh, baseline.old, text.kl, text.top1, answers.kl
        )  # fmt: skip

    @property
    def right(self) -> int:
        return self.fresh + self.old

    @property
    def baseline_right(self) -> int:
        return self.baseline_fresh + self.baseline_old


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
        compared = {
            endpoint.name: [list(map(Comparison.of, *pair)) for pair in zip(outcomes, first)]
            for endpoint, outcomes in zip(endpoints[1:], others)
        }
        slopes = [row for name, conversations in compared.items() for row in slope_rows(name, conversations)]
        raw = {name: [[asdict(x) for x in turns] for turns in of_name] for name, of_name in compared.items()}
        ends = [turn.end for turn in drawn[0].turns]
        rows = (row for name, conversations in compared.items() for row in turn_rows(name, conversations, ends))
        show(rows, self.out, slopes=slopes, conversations=raw)
        print(table_of("Change per turn", {column: column for column in slopes[0]}, slopes))

    def draw(self) -> Iterator[Conversation]:
        """Yield conversations, each from another stretch of the text."""
        encode, begin = tokenizer_of(self.model)
        ids = encode(read_prompt_text(self.text))
        whole = self.start + self.turns * self.growth
        if len(ids) < whole:
            raise BenchError(f"{self.text}: given {len(ids):,} tokens, expected at least {whole:,}, a conversation's")
        for i in range(self.conversations):
            at = i * (len(ids) - whole) // max(self.conversations - 1, 1)
            yield self.draw_conversation(encode, begin, ids[at:], random.Random(f"{self.seed} {i}"))

    def draw_conversation(
        self, encode: Encode, begin_ids: Sequence[int], text_ids: Sequence[int], rng: random.Random
    ) -> Conversation:
        per_part = self.questions // 2
        names = iter(rng.sample(NAMES, (self.turns + 1) * per_part))
        token_ids, turns, old = list(begin_ids), [], list[Question]()
        for i in range(self.turns + 1):
            begin, end = len(token_ids), self.start + i * self.growth
            facts = [(next(names), str(rng.randrange(1_000_000, 10_000_000))) for _ in range(per_part)]
            lines = [[Line.of(encode, Templates().fact, *fact).token_ids] for fact in facts]
            room = end - begin - sum(len(line) for (line,) in lines)
            if 2 * room < end - begin:
                raise BenchError(
                    f"--questions: {per_part} facts take {end - begin - room:,} of a part's {end - begin:,} tokens, "
                    "expected at most half; ask for fewer --questions, or raise --start and --growth"
                )
            part, _ = weave([], text_ids[begin : begin + room], lines, [[rng.randint(0, room)] for _ in lines])
            token_ids += part
            fresh = [Question.of(encode, *fact) for fact in facts]
            if i:
                places = sorted(rng.sample(range(begin + 1, end), self.questions))
                turns.append(Turn(end, fresh, rng.sample(old, per_part), places))
            old += fresh
        return Conversation(token_ids, self.start, turns)


def run_all(conversations: Sequence[Conversation], endpoint: Endpoint) -> list[list[Outcome]]:
    """Run all conversations in parallel, and return the outcomes of their turns."""
    before, metrics = CacheReads.of(endpoint), parse_metrics(endpoint.metrics())
    with ThreadPoolExecutor(len(conversations)) as pool:
        outcomes = list(pool.map(partial(_run, endpoint), conversations))
    before.require(endpoint, (request for conversation in conversations for request in requests_of(conversation)))
    after = parse_metrics(endpoint.metrics())
    sparse, density = after.rows_of("sparse") - metrics.rows_of("sparse"), (after.pairs - metrics.pairs).density
    print(f"{endpoint.name}: {sparse} rows ran sparse, density {density}", flush=True)
    return outcomes


def _run(endpoint: Endpoint, conversation: Conversation) -> list[Outcome]:
    ids, outcomes = conversation.token_ids, []
    generate(endpoint, ids[: conversation.start], 1)
    for turn in conversation.turns:
        generate(endpoint, ids[: turn.end], 1)
        right, firsts = [], []
        for question in (*turn.fresh, *turn.old):
            tokens, distributions = generate(endpoint, ids[: turn.end] + question.line_ids, len(question.answer_ids))
            right.append(tokens == question.answer_ids)
            firsts.append(distributions[0])
        text = [generate(endpoint, ids[:place], 1)[1][0] for place in turn.places]
        num_fresh = len(turn.fresh)
        outcomes.append(
            Outcome(sum(right[:num_fresh]), sum(right[num_fresh:]), NextTokens(firsts), NextTokens(text))
        )  # fmt: skip
    return outcomes


def requests_of(conversation: Conversation) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens of each request, and how many of them are cached."""
    earlier = conversation.start
    yield earlier, 0
    for turn in conversation.turns:
        yield turn.end, earlier
        yield from ((turn.end + len(question.line_ids), turn.end) for question in (*turn.fresh, *turn.old))
        yield from ((place, place - 1) for place in turn.places)
        earlier = turn.end


def generate(endpoint: Endpoint, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[dict[int, float]]]:
    """Return the tokens of greedy decoding, and the ``TOP`` most likely tokens of each position.

    A request for log-probabilities of generated tokens reads the prefix cache; one for ``prompt_logprobs`` does not.
    """
    body = {
        "model": endpoint.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": TOP,
        "return_tokens_as_token_ids": True, **endpoint.extra,
    }  # fmt: skip
    with connected(endpoint.url) as send:
        logprobs = json.load(send("/v1/completions", body))["choices"][0]["logprobs"]
    of_text = lambda token: int(token.removeprefix(TOKEN_ID))  # noqa: E731
    positions = [{of_text(token): logprob for token, logprob in top.items()} for top in logprobs["top_logprobs"]]
    return list(map(of_text, logprobs["tokens"])), positions


def turn_rows(
    name: str, conversations: Sequence[Sequence[Comparison]], ends: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each turn, and one for all. Errors are over conversations."""
    by_turn = [(str(i + 1), ends[i], [[x] for x in column]) for i, column in enumerate(zip(*conversations))]
    for turn, tokens, groups in (*by_turn, ("all", ends[-1], conversations)):
        column = [x for group in groups for x in group]
        answers, answers_error = ratio_of_answers(
            [sum(x.right for x in group) for group in groups],
            [sum(x.baseline_right for x in group) for group in groups],
        )
        kl, kl_error = mean_and_error([fmean(x.text_kl for x in group) for group in groups])
        top1, top1_error = mean_and_error([fmean(x.text_top1 for x in group) for group in groups])
        yield {
            "setting": name, "turn": turn, "tokens": tokens,
            "fresh": f"{sum(x.fresh for x in column)} for {sum(x.baseline_fresh for x in column)}",
            "old": f"{sum(x.old for x in column)} for {sum(x.baseline_old for x in column)}",
            "answers": answers, "± answers": answers_error, "KL": kl, "± KL": kl_error,
            "top-1": top1, "± top-1": top1_error, "KL of answers": fmean(x.answers_kl for x in column),
        }  # fmt: skip


def slope_rows(name: str, conversations: Sequence[Sequence[Comparison]]) -> Iterator[dict[str, Any]]:
    figures: Mapping[str, Any] = {
        "right answers, less the baseline's": lambda x: x.right - x.baseline_right,
        "KL": lambda x: x.text_kl,
        "top-1": lambda x: x.text_top1,
        "KL of answers": lambda x: x.answers_kl,
    }
    for figure, value_of in figures.items():
        change, error = slope([[value_of(x) for x in turns] for turns in conversations])
        yield {"setting": name, "figure": figure, "per turn": change, "±": error}


def slope(conversations: Iterable[Sequence[float]]) -> tuple[float | None, float | None]:
    """Return the mean change per turn, and its standard error over conversations, whose turns are not independent."""
    return mean_and_error([linregress(range(len(values)), values).slope for values in conversations])


if __name__ == "__main__":
    run_alone(Turns)
