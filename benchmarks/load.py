# SPDX-License-Identifier: Apache-2.0
"""A mixed load of short and long prompts for running servers, sent by vLLM's own `vllm bench serve`.

    python -m benchmarks.load --url http://STOCK:8000 --url http://OURS:8001 [--level fast] [--rate 2] [--clients 8]

In an open loop (``--rate``), requests arrive as a Poisson process, regardless of the server's speed. In a closed loop,
each client sends its next request when the previous request is answered. All servers get the same prompts in the same
order, one server after the other. Throughput is prompt and answer tokens of answered requests over the time from the
first request to the last answer. In an open loop it is comparable only if the load exceeds stock's capacity.
"""

import importlib.util
import json
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import typer

from benchmarks.options import Json
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.cli.common import Text, failures, levels_of, token_counts, wide_console
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts
from vllm_sparse_backend.evaluation.compared_servers import contestants_from_options, opened
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.prompt_texts import read_prompt_text
from vllm_sparse_backend.evaluation.report import BenchError, Report, table_of
from vllm_sparse_backend.evaluation.vllm_server import device_name, environment, vllm_command

COLUMNS = {
    "server": "server",
    "answered": "answered",
    "failures": "failed",
    "tokens_per_s": "tokens/s",
    "short_p50_s": "short: TTFT p50, s",
    "short_p99_s": "p99",
    "long_p50_s": "long: p50, s",
    "long_p99_s": "p99",
    "span_s": "took, s",
    "density": "density",
}
TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class Mix:
    """A load: ``rate`` requests per second on average, of which the share ``long_share`` is long."""

    num_requests: int
    rate: float | None
    """Requests per second; None in a closed loop."""
    short_lengths: tuple[int, ...]
    long_lengths: tuple[int, ...]
    long_share: float = 0.25
    output_tokens: int = 64
    seed: int = 0
    clients: int | None = None
    """Number of clients in a closed loop."""

    def lengths(self) -> list[tuple[int, bool]]:
        """Return the prompts' lengths, and whether each is long. Of at least two prompts, one is long and one short.

        Equal seeds give equal lengths.
        """
        chosen = random.Random(self.seed)
        num_long = min(max(1, round(self.num_requests * self.long_share)), max(1, self.num_requests - 1))
        is_long = [True] * num_long + [False] * (self.num_requests - num_long)
        chosen.shuffle(is_long)
        return [(chosen.choice(self.long_lengths if long else self.short_lengths), long) for long in is_long]


def run_load(servers: Sequence[Endpoint], mix: Mix, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Send the load to each server in turn, and yield a case for each."""
    lengths = mix.lengths()
    texts = [servers[0].detokenize(prompts.take(tokens)) for tokens, _ in lengths]
    for server in servers:
        before = parse_metrics(server.metrics()).pairs
        case = summary(send(server, mix, texts), [long for _, long in lengths], mix.output_tokens)
        how = {"rate": mix.rate} if mix.clients is None else {"clients": mix.clients}
        yield case | how | (parse_metrics(server.metrics()).pairs - before).figures


def require_pandas() -> None:
    """Raise BenchError before measuring if pandas is missing."""
    if importlib.util.find_spec("pandas") is None:
        raise BenchError("`vllm bench serve` needs pandas for a mixed load; pip install pandas")


def send(server: Endpoint, mix: Mix, texts: Sequence[str]) -> dict[str, Any]:
    """Return the result of `vllm bench serve`. Raises BenchError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        requests, result = Path(folder) / "requests.jsonl", Path(folder) / "result.json"
        requests.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        command = [*vllm_command(), *arguments(server, mix, len(texts), requests, result)]
        done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode or not result.is_file():
            said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise BenchError(f"{server.name}: `vllm bench serve` ended with {done.returncode}:\n{said}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


def arguments(server: Endpoint, mix: Mix, count: int, requests: Path, result: Path) -> list[str]:
    """Return the arguments of `vllm bench serve`, with the tokenizer of the server's model folder, if it is local."""
    tokenizer = server.root if server.root and Path(server.root).is_dir() else server.model
    how = ["--request-rate", f"{mix.rate:g}"] if mix.clients is None else ["--max-concurrency", str(mix.clients)]
    return [
        "bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", server.model, "--tokenizer", tokenizer, "--dataset-name", "custom", "--dataset-path", str(requests),
        "--disable-shuffle", "--skip-chat-template", "--custom-output-len", str(mix.output_tokens), "--ignore-eos",
        "--num-prompts", str(count), *how, "--seed", str(mix.seed), "--temperature", "0",
        "--extra-body", json.dumps(dict(server.extra)), "--save-result", "--save-detailed",
        "--result-dir", str(result.parent), "--result-filename", result.name, "--disable-tqdm",
    ]  # fmt: skip


def summary(result: Mapping[str, Any], is_long: Sequence[bool], output_tokens: int) -> dict[str, Any]:
    """Summarise answered requests. Failed and short answers are counted separately."""
    errors = [
        said or (None if tokens == output_tokens else f"{tokens} tokens answered, asked for {output_tokens}")
        for said, tokens in zip(result["errors"], result["output_lens"], strict=True)
    ]
    good = [i for i, said in enumerate(errors) if said is None]
    ends = {i: result["start_times"][i] + result["ttfts"][i] + sum(result["itls"][i]) for i in good}
    span = max(ends.values()) - min(result["start_times"]) if ends else 0.0
    tokens = sum(result["input_lens"][i] + output_tokens for i in good)
    case: dict[str, Any] = {
        "part": "load", "answered": len(good), "failures": len(errors) - len(good),
        "said": [said.strip().splitlines()[-1] for said in errors if said][:10], "span_s": span,
        "tokens_per_s": tokens / span if span else None,
    }  # fmt: skip
    for name, long in (("short", False), ("long", True)):
        firsts = [result["ttfts"][i] for i in good if is_long[i] == long]
        case |= {f"{name}_p50_s": percentile(firsts, 50), f"{name}_p99_s": percentile(firsts, 99)}
    return case | {"requests": [[result["input_lens"][i], result["ttfts"][i]] for i in good]}


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile with linear interpolation; None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def compare(servers: Sequence[tuple[str, Endpoint]], mix: Mix, text: str | None, report: Report) -> None:
    """Compare every server after the first with the first, and add the cases of both under the server's label."""
    endpoints = [endpoint for _, endpoint in servers]
    of_first, *others = run_load(endpoints, mix, Prompts.of(endpoints[0], text))
    for (label, _), case in zip(servers[1:], others, strict=True):
        for server, sent in (("stock", of_first), ("ours", case)):
            report.add_case({**sent, "server": server, "label": label})


@dataclass(frozen=True, kw_only=True)
class Load:
    """Exit code 1 if a request fails."""

    url: Annotated[list[str], typer.Option(help="A running server; repeatable. The first is the baseline.")]
    label: Annotated[list[str] | None, typer.Option(help="Name of each --url, in order.")] = None
    level: Annotated[list[str] | None, typer.Option(help="Level of the requests; repeatable.")] = None
    short: Annotated[str, typer.Option(help="Tokens of short prompts, comma-separated.")] = "1024,2048,4096"
    long: Annotated[str, typer.Option(help="Tokens of long prompts, a quarter of all, comma-separated.")] = (
        "32768,65536,131072"
    )
    requests: Annotated[int, typer.Option(help="How many.", min=2)] = 48
    rate: Annotated[float | None, typer.Option(help="Requests per second. Default: a closed loop of --clients.")] = None
    clients: Annotated[int, typer.Option(help="Clients of the closed loop.", min=1)] = 8
    text: Text = None
    json_path: Json = None

    def run(self) -> None:
        """Measure, and show the results."""
        with failures():
            require_pandas()
            mix = Mix(
                self.requests, self.rate, tuple(token_counts("--short", self.short)),
                tuple(token_counts("--long", self.long)), clients=None if self.rate else self.clients,
            )  # fmt: skip
            contestants = contestants_from_options(None, (), levels_of(self.level), self.url, self.label or (), 0, "")
            report = Report("serve", device_name(), self.json_path)
            with opened(contestants) as endpoints:
                named = [
                    (contestant.label, endpoint) for contestant, endpoint in zip(contestants, endpoints, strict=True)
                ]
                compare(named, mix, read_prompt_text(self.text) if self.text else None, report)
        for name in dict.fromkeys(case["label"] for case in report.cases):
            wide_console().print(table_of(name, COLUMNS, [case for case in report.cases if case["label"] == name]))
        if any(case["failures"] for case in report.cases):
            raise typer.Exit(1)


if __name__ == "__main__":
    run_alone(Load)
