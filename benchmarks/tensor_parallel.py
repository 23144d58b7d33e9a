# SPDX-License-Identifier: Apache-2.0
"""Compares tensor parallelism on two cards with one card: answers and speed-up.

    python -m benchmarks.tensor_parallel ANSWERING SHAPE --text FOLDER [--results docs/results/production.json]

ANSWERING is a model that answers questions within its prompts. This backend serves it on one card and on two. Two cards
sum the heads in a different order, so tokens may differ, and the comparison counts right answers. Stock vLLM and this
backend serve SHAPE with dummy weights on one card and on two. The compared quantity is the TTFT speed-up over stock
with the same number of cards. All servers start at the same time, and are measured one after the other.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.figures import Report
from benchmarks.shape import kv_bytes
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.vllm_server import Server, Settings, device_name, sparse_args

CLI = [sys.executable, "-m", "vllm_sparse_backend"]
CARDS = (1, 2)
SPARE_TOKENS = 2048


@dataclass(frozen=True)
class Wanted:
    """A server on the first cards; ``settings`` is None for stock vLLM."""

    model: Path
    cards: int
    settings: Settings | None
    tokens: int
    """Tokens of its longest request, including the answer."""
    more: tuple[str, ...] = ()

    def server(self) -> Server:
        args = [
            "--tensor-parallel-size", str(self.cards), "--max-model-len", str(self.tokens), "--max-num-batched-tokens",
            "8192", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes",
            str(kv_bytes(self.model, self.tokens + SPARE_TOKENS) // self.cards), *self.more,
        ]  # fmt: skip
        if self.settings is not None:
            args += sparse_args(self.settings.values)
        return Server(self.model, args, env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.cards)))})


def run(command: Sequence[str], timeout_s: float) -> None:
    """Run one of our own commands, which reports its own errors."""
    print(time.strftime("%T"), *command[len(CLI) :], flush=True)
    if (code := subprocess.run(command, timeout=timeout_s, check=False).returncode) != 0:
        print(f"exit code {code}", flush=True)


def cases_of(path: Path) -> list[dict[str, Any]]:
    """Return the cases of a command; empty if it failed before its first case."""
    return list(json.loads(path.read_text(encoding="utf-8"))["cases"]) if path.exists() else []


def compare_answers(urls: dict[int, str], text: Path, lengths: str, prompts: int, folder: Path, report: Report) -> None:
    from vllm_sparse_backend.evaluation.answer_run import summaries

    answers_path, servers = folder / "answers.json", []
    for cards, url in urls.items():
        servers += ["--url", url, "--label", f"TP {cards}"]
    options = ["--lengths", lengths, "--count", str(prompts), "--text", str(text), "--json", str(answers_path)]
    run([*CLI, "eval", "answers", *servers, *options], 180)
    labels = [f"TP {cards}" for cards in urls]
    rows = summaries(cases_of(answers_path), labels, [int(n) for n in lengths.split(",")])
    for row in rows:
        report.add_case({key: row[key] for key in ("label", "tokens", "answers", "perplexity", "density", "failed")})
        about = f"{row['label']}, {row['tokens']:,} tokens: right answers of {row['asked']}"
        if row["asked"]:
            report.add_figure(about, row["right"], "answers", "higher")
    for single, pair in zip(rows[::2], rows[1::2], strict=True):
        about = f"TP 2, {pair['tokens']:,} tokens: right answers ÷ TP 1's"
        if single["right"] and not single["failed"] + pair["failed"]:
            report.add_figure(about, pair["right"] / single["right"], "ratio", "higher", 1)


def compare_speed(
    urls: dict[tuple[int, bool], str], settings: Settings, length: int, folder: Path, report: Report
) -> None:
    sooner: dict[int, float] = {}
    for cards in CARDS:
        serve_path = folder / f"serve-{cards}.json"
        labels = ["--label", "stock", "--label", f"{settings}, TP {cards}"]
        where = ["--url", urls[cards, False], "--url", urls[cards, True], *labels]
        options = ["--lengths", str(length), "--output-tokens", "8", "--repeats", "3"]
        run([*CLI, "bench", "serve", *where, *options, "--json", str(serve_path)], 120)
        for case in cases_of(serve_path):
            report.add_case(case)
            if case["part"] == "latency" and "ttft_speed_up" in case:
                sooner[cards] = case["ttft_speed_up"]
                about = f"{settings}, TP {cards}, {length:,} tokens: TTFT, speed-up over stock, TP {cards}"
                report.add_figure(about, case["ttft_speed_up"], "ratio", "higher")
    if len(sooner) == len(CARDS):
        about = f"{settings}, TP 2, {length:,} tokens: TTFT, speed-up over stock ÷ TP 1's"
        report.add_figure(about, sooner[2] / sooner[1], "ratio", "higher", 0.9)


def _end(servers: Iterable[Server]) -> None:
    """End all servers immediately. Servers outlive their parent, and some may still be starting."""
    for server in servers:
        server.stop()
    os._exit(143)


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Compare tensor parallelism on two cards with one card."""

    answering: Annotated[Path, typer.Argument(help="Model folder whose answers are compared.")]
    shape: Annotated[Path, typer.Argument(help="Model folder to time, with dummy weights.")]
    text: Annotated[
        Path, typer.Option(help="Text file, or folder of *.py and *.md, into which questions are inserted.")
    ]
    answers_settings: Annotated[str, typer.Option(help="Settings for the answers, as JSON or a profile.")] = (
        '{"min_tokens": 2048, "min_query_tokens": 1}'
    )
    speed_settings: Annotated[str, typer.Option(help="Settings for the speed.")] = '{"method": "a_shape"}'
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts with questions, comma-separated.")] = (
        "32000,130000"
    )
    prompts: Annotated[int, typer.Option(help="Prompts of each length.", min=1)] = 2
    length: Annotated[int, typer.Option(help="Tokens of the timed prompts.")] = 131072
    json_path: Annotated[Path | None, typer.Option("--json", help="JSON file for all results.")] = None
    results: Annotated[Path | None, typer.Option(help="List of figures to merge this run's into.")] = None

    def run(self) -> None:
        """Measure, and show the results."""
        longest = max(int(n) for n in self.lengths.split(","))
        speed, answers = Settings.parse(self.speed_settings), Settings.parse(self.answers_settings)
        wanted = {("answers", cards, True): Wanted(self.answering, cards, answers, longest + 1) for cards in CARDS}
        for cards in CARDS:
            for ours in (False, True):
                settings = speed if ours else None
                wanted["speed", cards, ours] = Wanted(
                    self.shape, cards, settings, self.length + 16, ("--load-format", "dummy")
                )
        command = (
            f"python -m benchmarks.tensor_parallel {self.answering.name} {self.shape.name} --text {self.text.name}"
        )
        command += f" --lengths {self.lengths} --prompts {self.prompts} --length {self.length}"
        report = Report("tensor parallelism", f"2 × {device_name()}", self.json_path, self.results, command)
        with ExitStack() as stack, ThreadPoolExecutor(len(wanted)) as pool, TemporaryDirectory() as folder:
            servers = {name: request.server() for name, request in wanted.items()}
            signal.signal(signal.SIGTERM, lambda *_: _end(servers.values()))
            starting = {name: pool.submit(stack.enter_context, server) for name, server in servers.items()}

            def urls_of(what: str) -> dict[tuple[int, bool], str]:
                """Return the URLs of these servers once all are ready. Raises BenchError if one is not."""
                for (settings, cards, ours), future in starting.items():
                    if settings == what and (error := future.exception()) is not None:
                        raise BenchError(f"{what}, TP {cards}, {'ours' if ours else 'stock'}: {error}")
                return {
                    (cards, ours): servers[settings, cards, ours].url
                    for settings, cards, ours in servers
                    if settings == what
                }

            failed = []
            for part in ("answers", "speed"):
                try:
                    urls = urls_of(part)
                    print(time.strftime("%T"), f"servers for {part} are up", flush=True)
                    if part == "answers":
                        compare_answers(
                            {cards: urls[cards, True] for cards in CARDS},
                            self.text,
                            self.lengths,
                            self.prompts,
                            Path(folder),
                            report,
                        )
                    else:
                        compare_speed(urls, speed, self.length, Path(folder), report)
                except (BenchError, subprocess.TimeoutExpired) as error:
                    failed.append(str(error))
                    print(error, flush=True)
        if failed:
            raise typer.Exit(1)


if __name__ == "__main__":
    run_alone(TensorParallel)
