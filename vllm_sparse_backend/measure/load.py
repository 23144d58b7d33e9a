# SPDX-License-Identifier: Apache-2.0
"""A mixed load of short and long prompts, sent by vLLM's own `vllm bench serve`.

In an open loop they arrive as a Poisson process, whether the server keeps up or not; in a closed one so many clients
send the next as soon as their last is answered. Either way all servers get the same prompts in the same order, one
server after the other. Throughput is prompt and answer tokens of answered requests, over the time from the first
request to the last answer; in an open loop it compares where the load is more than stock can take.
"""

import importlib.util
import json
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from vllm_sparse_backend.measure.client import Endpoint, Prompts
from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.measure.scrape import Pairs
from vllm_sparse_backend.measure.server import environment, vllm_command

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
    """What arrives: ``rate`` requests a second on average, of which ``long_share`` are long."""

    num_requests: int
    rate: float | None
    """None for more than stock can take, from the times of single requests."""
    short_lengths: tuple[int, ...]
    long_lengths: tuple[int, ...]
    long_share: float = 0.25
    output_tokens: int = 64
    seed: int = 0
    clients: int | None = None
    """So many, in a closed loop, where ``rate`` says nothing; None for an open one."""

    def lengths(self) -> list[tuple[int, bool]]:
        """Of prompts, and whether they are of the long ones; at least one is long and one short, where there are two.

        The same for the same seed.
        """
        chosen = random.Random(self.seed)
        num_long = min(max(1, round(self.num_requests * self.long_share)), max(1, self.num_requests - 1))
        is_long = [True] * num_long + [False] * (self.num_requests - num_long)
        chosen.shuffle(is_long)
        return [(chosen.choice(self.long_lengths if long else self.short_lengths), long) for long in is_long]

    def saturating(self, first_s: Mapping[int, float | None], factor: float = 1.3) -> "Mix":
        """At ``factor`` times what a server takes that needs ``first_s[tokens]`` for each prompt, unless told how."""
        if self.rate is not None or self.clients is not None:
            return self
        if None in (taken := {n: first_s.get(n) for n in (*self.short_lengths, *self.long_lengths)}).values():
            raise BenchError("--rate: not given, and not all lengths were answered that it is made from")
        shares = ((1 - self.long_share, self.short_lengths), (self.long_share, self.long_lengths))
        busy = sum(share / len(of) * (taken[tokens] or 0) for share, of in shares for tokens in of)
        return replace(self, rate=factor / busy)


def run_load(servers: Sequence[Endpoint], mix: Mix, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Send the load to one after the other; a case of each."""
    lengths = mix.lengths()
    texts = [servers[0].detokenize(prompts.take(tokens)) for tokens, _ in lengths]
    for server in servers:
        before = Pairs.on_page(server.metrics())
        case = summary(send(server, mix, texts), [long for _, long in lengths], mix.output_tokens)
        how = {"rate": mix.rate} if mix.clients is None else {"clients": mix.clients}
        yield case | how | (Pairs.on_page(server.metrics()) - before).figures


def require_pandas() -> None:
    """Before anything is measured."""
    if importlib.util.find_spec("pandas") is None:
        raise BenchError(
            "a mixed load is sent by `vllm bench serve`, which needs pandas for it: "
            "pip install 'vllm-sparse-backend[measure]', or leave the load out with --requests 0"
        )


def send(server: Endpoint, mix: Mix, texts: Sequence[str]) -> dict[str, Any]:
    """What `vllm bench serve` writes of a load. Raises BenchError where it fails, with the end of what it said."""
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
    """Of `vllm bench serve`. The tokenizer is the folder's that the server loaded, where it is of this machine."""
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
    """Of answered requests alone; failed ones, and those that got fewer tokens, are counted beside them."""
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
    """With linear interpolation between the two nearest; None of nothing."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]
