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

import http.client
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from vllm_sparse_backend.config.metrics import FRESH_METRICS_PATH
from vllm_sparse_backend.evaluation.answers import Templates, build_prompt
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, parse_metrics

FACTS = 24
LINE_TOKENS = 40
"""Maximum number of a line's tokens before the value."""

TEMPLATES = (
    Templates(),
    Templates("The code for {name} is {value}.", "What is the code for {name}? It is {value}."),
    Templates('{name} = "{value}"', 'assert {name} == "{value}"'),
)
"""Forms of facts: the form of the models' training, and two others."""

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Setting:
    name: str
    url: str
    level: str | float | None

    @staticmethod
    def parse(text: str) -> "Setting":
        name, equals, where = text.partition("=")
        url, _, level = where.partition("@")
        if not equals or not url.startswith("http"):
            raise typer.BadParameter(f"given {text!r}, expected NAME=http://HOST:PORT or NAME=http://HOST:PORT@LEVEL")
        return Setting(name, url, float(level) if re.fullmatch(r"[\d.]+", level) else level or None)

    @property
    def more(self) -> dict[str, Any]:
        """Return the fields of a request's body for its level. 0 is also a level."""
        return {} if self.level is None else {"vllm_xargs": {"sparse_prefill": self.level}}

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=600)
        if body is None:
            connection.request("GET", path)
        else:
            text = json.dumps({"model": "m", "temperature": 0, "max_tokens": 1, **self.more, **body})
            connection.request("POST", path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{self.name}: {path} answers {answer.status}: {answer.read()[:300]!r}")
        return connection, answer

    def counted(self) -> MetricsReport:
        return parse_metrics(self.ask(FRESH_METRICS_PATH)[1].read().decode())


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
        answers = [(ours - theirs) / sum(other.right) for ours, theirs in zip(self.right, other.right)]
        return {
            "answers": sum(self.right) / sum(other.right),
            "answers_error": math.sqrt(len(answers)) * stdev(answers) if len(answers) > 1 else math.nan,
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
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = json.loads((model / "config.json").read_text()).get("bos_token_id")
    ids = [tokenizer.encode(text.read_text(errors="ignore"), add_special_tokens=False).ids for text in texts]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    rng, chosen, written = random.Random(seed), [int(form) for form in forms.split(",")], []
    for length in map(int, lengths.split(",")):
        for i in range(per_length):
            text, form = ids[i % len(ids)], chosen[i // len(ids) % len(chosen)]
            start = rng.randrange(max(len(text) - length, 1))
            templates = TEMPLATES[form]
            prompt = build_prompt(encode, [] if begin is None else [begin], text[start:], length, FACTS, templates, rng)
            spans = [(answer.begin, answer.end) for answer in prompt.answers]
            facts = [answer.fact_at for answer in prompt.answers]
            written.append({"length": length, "form": form, "ids": prompt.token_ids, "spans": spans, "facts": facts})
    out.write_text(json.dumps(written))


def _score(setting: Setting, prompt: dict[str, Any]) -> tuple[int, int, float]:
    """Return (right answers, questions, mean nats of the text's last two thirds)."""
    ids = prompt["ids"]
    connection, answer = setting.ask(
        "/v1/completions", {"prompt": ids, "prompt_logprobs": 0, "add_special_tokens": False}
    )
    returned = json.loads(answer.read())["choices"][0]["prompt_logprobs"]
    connection.close()
    returned_ranks = [returned[i][str(ids[i])] if i else {"rank": 0, "logprob": 0.0} for i in range(len(ids))]
    right = sum(all(returned_ranks[i]["rank"] == 1 for i in range(*span)) for span in prompt["spans"])
    of_values = [*prompt["spans"], *((at, at + 9) for at in prompt["facts"])]
    lines = {i for begin, end in of_values for i in range(begin - LINE_TOKENS, end + 3)}
    plain = [-returned_ranks[i]["logprob"] for i in range(len(ids) // 3, len(ids)) if i not in lines]
    return right, len(prompt["spans"]), fmean(plain)


def _qualities(setting: Setting, prompts: Sequence[dict[str, Any]], jobs: int) -> Iterator[tuple[str, Quality]]:
    for length in sorted({prompt["length"] for prompt in prompts}):
        of_length = [prompt for prompt in prompts if prompt["length"] == length]
        before, quality = setting.counted(), Quality()
        with ThreadPoolExecutor(jobs) as pool:
            for right, num_answers, nats in pool.map(partial(_score, setting), of_length):
                quality.right.append(right)
                quality.questions.append(num_answers)
                quality.nats.append(nats)
        after = setting.counted()
        quality.density = (after.pairs - before.pairs).density
        sparse, dense = (after.rows_of(path) - before.rows_of(path) for path in ("sparse", "dense"))
        quality.sparse_rows = sparse / (sparse + dense) if sparse + dense else None
        print(
            setting.name,
            length,
            sum(quality.right),
            sum(quality.questions),
            f"{fmean(quality.nats):.5f}",
            quality.density,
        )
        yield str(length), quality


@app.command()
def quality(
    prompts: Path,
    settings: Annotated[list[str], typer.Argument(metavar="NAME=URL[@LEVEL]...")],
    most: Annotated[int, typer.Option(help="Prompts of each length.")] = 1000,
    jobs: Annotated[int, typer.Option(help="Concurrent requests.")] = 1,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure answers, perplexity and density of every setting. Servers run in parallel, levels of a server in turn."""
    every = json.loads(prompts.read_text())
    of_length = {prompt["length"]: [x for x in every if x["length"] == prompt["length"]][:most] for prompt in every}
    chosen = [prompt for group in of_length.values() for prompt in group]
    parsed = [Setting.parse(text) for text in settings]
    urls = list(dict.fromkeys(setting.url for setting in parsed))
    qualities: dict[str, dict[str, Quality]] = {}

    def ask(url: str) -> None:
        for setting in parsed:
            if setting.url == url:
                qualities[setting.name] = dict(_qualities(setting, chosen, jobs))

    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(ask, urls))
    first = qualities[parsed[0].name]
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


def _timed(setting: Setting, ids: Sequence[int], tokens: int) -> tuple[float, float]:
    """Return (seconds to the first token, seconds per token after it)."""
    begin = time.perf_counter()
    body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True, "add_special_tokens": False}
    connection, answer = setting.ask("/v1/completions", body)
    at = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    connection.close()
    return at[0] - begin, (at[-1] - at[0]) / max(tokens - 1, 1)


@app.command()
def speed(
    prompts: Path,
    settings: Annotated[list[str], typer.Argument(metavar="NAME=URL[@LEVEL]...")],
    lengths: str = "1024,8192,16384,32768,65536,131000",
    times: Annotated[int, typer.Option(help="Requests of each length.")] = 5,
    after: Annotated[int, typer.Option(help="Cached tokens before 1,000 new tokens; 0 for none.")] = 0,
    tokens: Annotated[int, typer.Option(help="Output tokens for TPOT, after 512 tokens; 0 for none.", min=0)] = 128,
    batches: Annotated[str, typer.Option(help="Concurrent requests for TPOT.")] = "1",
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure median TTFT by length, and TPOT. Every request has its own text, and settings take turns."""
    ids = [token for prompt in json.loads(prompts.read_text()) for token in prompt["ids"]]
    parsed = [Setting.parse(text) for text in settings]
    medians: dict[str, dict[str, list[float]]] = {}
    place = 0

    def piece(length: int) -> list[int]:
        nonlocal place
        place = (place + 100_003) % (len(ids) - length)
        return ids[place : place + length]

    def measure(name: str, texts: Sequence[Sequence[int]], tokens: int = 1, jobs: int = 1) -> None:
        seen: dict[str, list[tuple[float, float]]] = {setting.name: [] for setting in parsed}
        with ThreadPoolExecutor(jobs) as pool:
            for i in range(0, len(texts), jobs):
                for setting in parsed:
                    seen[setting.name] += pool.map(partial(_timed, setting, tokens=tokens), texts[i : i + jobs])
        medians[name] = {key: [median(pair[i] for pair in pairs[jobs:]) for i in (0, 1)] for key, pairs in seen.items()}
        first = medians[name][parsed[0].name]
        which = 1 if tokens > 1 else 0
        # Two tokens may arrive together, and a TPOT of 0 has no ratio.
        ratio = {key: round(first[which] / x[which], 3) if x[which] else None for key, x in medians[name].items()}
        print(name, {key: (round(x[which], 5), ratio[key]) for key, x in medians[name].items()})

    for length in map(int, lengths.split(",")):
        measure(f"TTFT {length}", [piece(length) for _ in range(times + 1)])
    if after:
        prefix = piece(after)
        measure(f"TTFT 1000 after {after}", [prefix + piece(1000) for _ in range(times + 1)])
    for jobs in map(int, batches.split(",")) if tokens > 1 else ():
        measure(f"TPOT, {jobs} at a time", [piece(512) for _ in range(4 * jobs)], tokens, jobs)
    if out:
        out.write_text(json.dumps(medians))


if __name__ == "__main__":
    app()
