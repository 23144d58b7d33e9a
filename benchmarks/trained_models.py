# SPDX-License-Identifier: Apache-2.0
"""Answers, perplexity, density, TTFT and TPOT of trained models on running servers, for several settings together.

    python -m benchmarks.trained_models prompts MODEL OUT.json TEXT.txt ... [--lengths 16384,32768,65536] [--each 24]
    python -m benchmarks.trained_models quality PROMPTS.json stock=http://localhost:8000 ours=http://localhost:8001
    python -m benchmarks.trained_models against STOCK.json OURS.json ...     # of several runs of quality --json
    python -m benchmarks.trained_models speed PROMPTS.json stock=http://localhost:8000 ours=http://localhost:8001@fast

A setting is NAME=URL, or NAME=URL@LEVEL with a level's name or p. The first setting is the baseline. Prompts are texts
with 24 facts, each of which is asked for and answered later in the same prompt, because decoding is dense and would
hide losses of a prefill. An answer is right if each of its tokens is the model's first choice. Perplexity is over the
last two thirds, without facts and questions; its standard error is computed from the differences per prompt. Density is
read from /metrics, and covers sparse rows. TTFT is the time of a request for one token. Settings are measured in turn.
"""

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated, Any

import typer

from benchmarks.traffic import texts_of
from vllm_sparse_backend.evaluation.answers import Encode, Prompt, TokenScores, build_prompt
from vllm_sparse_backend.evaluation.client import Endpoint, TimedAnswer
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.tasks import Templates, fact_threads

FACTS = 24
TEMPLATES = (
    Templates(),
    Templates("The code for {name} is {value}.", "What is the code for {name}? It is {value}."),
    Templates('{name} = "{value}"', 'assert {name} == "{value}"'),
)
"""Forms of facts: the form of the models' training, and two others."""

Settings = Annotated[list[str], typer.Argument(metavar="NAME=URL[@LEVEL]...")]

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


def endpoint_of(text: str) -> Endpoint:
    """Connect to the server of a setting, at its level."""
    name, equals, where = text.partition("=")
    url, _, level = where.partition("@")
    if not equals:
        raise BenchError(f"given {text!r}, expected NAME=http://HOST:PORT or NAME=http://HOST:PORT@LEVEL")
    endpoint = Endpoint.connect(name, url)
    return endpoint.at_level(float(level) if re.fullmatch(r"[\d.]+", level) else level) if level else endpoint


def ratio_of_answers(right: Sequence[int], baseline: Sequence[int]) -> tuple[float, float]:
    """Return right answers ÷ the baseline's, and the standard error; both are given by prompt."""
    total = sum(baseline)
    if not total:
        return math.nan, math.nan
    changes = [(ours - theirs) / total for ours, theirs in zip(right, baseline)]
    return sum(right) / total, math.sqrt(len(changes)) * stdev(changes) if len(changes) > 1 else math.nan


def tokenizer_of(model: Path) -> tuple[Encode, list[int]]:
    """Return a model folder's tokenizer, and the tokens that begin a prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = json.loads((model / "config.json").read_text()).get("bos_token_id")
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, [] if begin is None else [begin]


@dataclass
class Quality:
    """Results of one setting and length, by prompt."""

    right: list[int] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    density: float | None = None
    sparse_rows: float | None = None
    """Share of prefill rows (one per chunk) that ran sparse."""

    def against(self, other: "Quality") -> dict[str, Any]:
        """Return answers and perplexity relative to ``other``, with standard errors."""
        changes = [ours - theirs for ours, theirs in zip(self.nats, other.nats)]
        answers, answers_error = ratio_of_answers(self.right, other.right)
        return {
            "answers": answers, "answers_error": answers_error,
            "right": sum(self.right), "questions": sum(self.questions), "perplexity": math.exp(fmean(changes)),
            "perplexity_error": stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan,
            "density": self.density, "sparse_rows": self.sparse_rows,
        }  # fmt: skip


@app.command()
def prompts(
    model: Path,
    out: Path,
    texts: list[Path],
    lengths: str = "16384,32768,65536",
    per_length: Annotated[int, typer.Option("--each", help="Prompts of each length.")] = 24,
    forms: str = "0,1,2",
    seed: int = 0,
) -> None:
    """Write ``--each`` prompts of every length, with the texts and the forms of facts in turn."""
    encode, begin = tokenizer_of(model)
    ids = [encode(text.read_text(errors="ignore")) for text in texts]
    rng, chosen, written = random.Random(seed), [int(form) for form in forms.split(",")], []
    for length in map(int, lengths.split(",")):
        for i in range(per_length):
            text, form = ids[i % len(ids)], chosen[i // len(ids) % len(chosen)]
            start = rng.randrange(max(len(text) - length, 1))
            threads = fact_threads(rng, FACTS, TEMPLATES[form])
            prompt = build_prompt(encode, begin, text[start:], length, threads, rng)
            about = {"length": length, "form": form, "ids": prompt.token_ids}
            written.append(about | {"spans": prompt.answers, "lines": prompt.lines})
    out.write_text(json.dumps(written))


def _score(endpoint: Endpoint, prompt: dict[str, Any]) -> tuple[int, int, float]:
    """Return (right answers, questions, mean nats of the text's last two thirds)."""
    ids, spans = prompt["ids"], prompt["spans"]
    text_places = Prompt(ids, spans, prompt["lines"]).text_places
    scores = TokenScores.of(ids, endpoint.prompt_logprobs(ids))
    right = sum(all(rank == 1 for rank in scores.ranks[begin:end]) for begin, end in spans)
    plain = [-scores.logprobs[place] for place in text_places if place >= len(ids) // 3]
    return right, len(spans), fmean(plain)


def _qualities(endpoint: Endpoint, prompts: Sequence[dict[str, Any]], jobs: int) -> Iterator[tuple[str, Quality]]:
    for length in sorted({prompt["length"] for prompt in prompts}):
        of_length = [prompt for prompt in prompts if prompt["length"] == length]
        before, quality = parse_metrics(endpoint.metrics()), Quality()
        with ThreadPoolExecutor(jobs) as pool:
            for right, num_answers, nats in pool.map(partial(_score, endpoint), of_length):
                quality.right.append(right)
                quality.questions.append(num_answers)
                quality.nats.append(nats)
        after = parse_metrics(endpoint.metrics())
        quality.density = (after.pairs - before.pairs).density
        sparse, dense = (after.rows_of(path) - before.rows_of(path) for path in ("sparse", "dense"))
        quality.sparse_rows = sparse / (sparse + dense) if sparse + dense else None
        answers = f"{sum(quality.right)} of {sum(quality.questions)}"
        print(f"{endpoint.name} {length}: {answers}, {fmean(quality.nats):.5f} nats, density {quality.density}")
        yield str(length), quality


@app.command()
def quality(
    prompts: Path,
    settings: Settings,
    most: Annotated[int, typer.Option(help="Prompts of each length.")] = 1000,
    jobs: Annotated[int, typer.Option(help="Concurrent requests.")] = 1,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure answers, perplexity and density of every setting. Servers run in parallel, levels of a server in turn."""
    every = json.loads(prompts.read_text())
    of_length = {prompt["length"]: [x for x in every if x["length"] == prompt["length"]][:most] for prompt in every}
    chosen = [prompt for group in of_length.values() for prompt in group]
    endpoints = [endpoint_of(text) for text in settings]
    urls = list(dict.fromkeys(endpoint.url for endpoint in endpoints))
    qualities: dict[str, dict[str, Quality]] = {}

    def ask(url: str) -> None:
        for endpoint in endpoints:
            if endpoint.url == url:
                qualities[endpoint.name] = dict(_qualities(endpoint, chosen, jobs))

    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(ask, urls))
    first = qualities[endpoints[0].name]
    table = {
        name: {
            length: {**measured.against(first[length]), "prompts": asdict(measured)}
            for length, measured in by_length.items()
        }
        for name, by_length in qualities.items()
    }
    for name, rows in table.items():
        for length, figures in rows.items():
            print(_line(name, length, figures))
    if out:
        out.write_text(json.dumps(table))


@app.command()
def against(
    first: Annotated[Path, typer.Argument(help="File by `quality --json`, of one setting.")], others: list[Path]
) -> None:
    """Compare settings of other such files with the first file, for servers that ran one after the other."""
    (base,) = json.loads(first.read_text()).values()
    for path in others:
        for name, by_length in json.loads(path.read_text()).items():
            for length, figures in by_length.items():
                measured, reference = Quality(**figures["prompts"]), Quality(**base[length]["prompts"])
                print(_line(name, length, measured.against(reference)))


def _line(name: str, length: str, figures: dict[str, Any]) -> str:
    answers = (
        f"{figures['answers']:.4f} ± {figures['answers_error']:.4f} ({figures['right']} of {figures['questions']})"
    )
    perplexity = f"{100 * (figures['perplexity'] - 1):+.3f} % ± {100 * figures['perplexity_error']:.3f}"
    sparse = f"density {figures['density']}, sparse rows {figures['sparse_rows']}"
    return f"{name:12} {length:>7}: answers {answers}, perplexity {perplexity}, {sparse}"


@app.command()
def speed(
    prompts: Path,
    settings: Settings,
    lengths: str = "1024,8192,16384,32768,65536,131000",
    times: Annotated[int, typer.Option(help="Requests of each length.")] = 5,
    after: Annotated[int, typer.Option(help="Cached tokens before 1,000 new tokens; 0 for none.")] = 0,
    tokens: Annotated[int, typer.Option(help="Output tokens for TPOT, after 512 tokens; 0 for none.", min=0)] = 128,
    batches: Annotated[str, typer.Option(help="Concurrent requests for TPOT.")] = "1",
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure median TTFT by length, and TPOT. Every request has its own text, and settings take turns."""
    texts, endpoints = texts_of(prompts), [endpoint_of(text) for text in settings]
    medians: dict[str, dict[str, float]] = {}

    def measure(name: str, texts: Sequence[Sequence[int]], tokens: int = 1, jobs: int = 1) -> None:
        answers: dict[str, list[TimedAnswer]] = {endpoint.name: [] for endpoint in endpoints}
        with ThreadPoolExecutor(jobs) as pool:
            for i in range(0, len(texts), jobs):
                for endpoint in endpoints:
                    answers[endpoint.name] += pool.map(partial(endpoint.ask, max_tokens=tokens), texts[i : i + jobs])
        for key, timed in answers.items():
            seconds = [answer.first_token_s if tokens == 1 else answer.token_s for answer in timed[jobs:]]
            known = [s for s in seconds if s is not None]  # tokens that arrive together have no time of their own
            medians.setdefault(name, {})[key] = median(known) if known else math.nan
        first_s = medians[name][endpoints[0].name]
        print(name, {key: (round(s, 5), round(first_s / s, 3)) for key, s in medians[name].items()})

    for length in map(int, lengths.split(",")):
        measure(f"TTFT {length}", [texts.take(length) for _ in range(times + 1)])
    if after:
        prefix = texts.take(after)
        measure(f"TTFT 1000 after {after}", [prefix + texts.take(1000) for _ in range(times + 1)])
    for jobs in map(int, batches.split(",")) if tokens > 1 else ():
        measure(f"TPOT, {jobs} at a time", [texts.take(512) for _ in range(4 * jobs)], tokens, jobs)
    if out:
        out.write_text(json.dumps(medians))


if __name__ == "__main__":
    app()
