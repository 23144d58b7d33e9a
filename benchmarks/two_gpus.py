# SPDX-License-Identifier: Apache-2.0
"""Compare two GPUs of one host with one GPU: tensor, pipeline and data parallelism, and a disaggregated pair.

    python -m benchmarks.two_gpus MODEL OUT [--second SMALL_MODEL] [--profile best.yaml] [--budget-s 600]

The program needs no supervision. It writes ``figures.json`` (in the format of docs/results), ``cases.json`` (the
times and answers of every request) and a log for each server to OUT, and updates them after every measurement. If a run
stops early, the same command continues it and skips the measurements that ``cases.json`` already has.

The most important step comes first. Each step has its own time limit, and is skipped if too little of the budget is
left:

* ``one``: stock vLLM and this backend on a single GPU: MODEL on the first card and, at the same time, SMALL_MODEL on
  the second. The two servers of a ratio run on the same card, and are measured one after the other.
* ``tensor``: MODEL with tensor parallelism of 2, stock and this backend; then levels, guard and counters by rank, and
  200 requests with aborts and a cache that is too small for all of them.
* ``pipeline``: MODEL with pipeline parallelism of 2, stock and this backend.
* ``others``: a prefill server on the first card with a stock decode server on the second, compared with single servers;
  data parallelism of 2 behind two API server processes. With SMALL_MODEL, all servers start together.

The pair uses vLLM's ``NixlConnector`` and deploy/salting_proxy.py if the package ``nixl`` is installed. Otherwise it
uses vLLM's ``ExampleConnector`` with a shared folder. That connector does not distinguish levels, so only the
server's default level is compared.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.counters import Served
from benchmarks.figures import Report
from benchmarks.shape import kv_bytes
from benchmarks.soak import Asking, Checked, lines, served_by, soak_and_check
from tests.helpers.folders import profile_file
from vllm_sparse_backend.cli import switch
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.cli.common import Text, failures, split, token_counts
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.metrics import FRESH_METRICS_PATH, METRICS, WORKER_METHOD
from vllm_sparse_backend.config.model_shape import ModelShape, name_of_path
from vllm_sparse_backend.evaluation.answer_run import AnswerWorkload, ask_all, summaries
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError
from vllm_sparse_backend.evaluation.compared_servers import Contestant
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.serve_bench import Length, alternate_requests
from vllm_sparse_backend.evaluation.vllm_server import (
    Server,
    ServerError,
    Settings,
    device_name,
    has_cuda,
    max_positions,
    reserve_port,
    root_cause,
    sparse_args,
    split_args,
)

PROXY = Path(__file__).parents[1] / "deploy/salting_proxy.py"
PAGE_TOKENS = 128
STOCK, DEFAULT, BEST, CHECKED = "stock", "default", "best", "checked"
ONE, TENSOR, PIPELINE, DATA, PAIR = "TP 1", "TP 2", "PP 2", "DP 2", "pair"

SPARE_TOKENS = 2048
OVERHEAD_BYTES = 4 << 30
"""Memory of a server besides weights and cache: activations, graphs, the arena, NCCL and the CUDA context."""

NO_PLUGINS = {"VLLM_PLUGINS": "none"}
FACTS = 24
ANSWER_TOKENS = 8
"""Tokens of the answers that are compared token by token."""

LEVELS = ("exact", "on", "fast", 0.9)
"""Levels of the requests to the servers whose levels are checked. Their profile defines ``fast``."""

LIMITS = {"one": (480.0, 120.0), "tensor": (480.0, 140.0), "pipeline": (480.0, 140.0), "others": (300.0, 130.0)}
"""Maximum seconds of each step, and the seconds that must be left to start it: servers take up to two minutes."""

RANKS_APART = 0.01
"""Largest difference between the ranks' densities. In a widened model, each rank has copies of the same heads."""

SAMPLE_TRIES = 20
REQUEST_TIMEOUT_S = 120.0
LOAD_S = 120.0
LOAD_OUTPUT_TOKENS = 256
"""Maximum length of answers under load. Answers need new pages while the cache is full, so requests are preempted."""


class StepTimeoutError(RuntimeError):
    """A step took longer than its time limit."""


def label_of(model: Path, setting: str, layout: str) -> str:
    """Return the name of a server in figures and cases."""
    return f"{name_of_path(str(model))}, {setting}, {layout}"


@dataclass(frozen=True, eq=False)
class Spec:
    """A server. ``setting`` and ``layout`` name it in figures. ``settings`` is None for stock vLLM."""

    model: Path
    setting: str
    layout: str
    cards: tuple[int, ...]
    settings: Mapping[str, Any] | None
    args: tuple[str, ...]
    max_tokens: int
    """Tokens of its longest request, including the answer."""
    cache_tokens: int
    """Tokens that its cache holds."""
    cache_parts: int = 1
    """Number of cards that share its cache, by tensor or pipeline parallelism."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return label_of(self.model, self.setting, self.layout)

    def server(self, logs: Path, timeout_s: float) -> Server:
        cache_bytes = kv_bytes(self.model, self.cache_tokens) // self.cache_parts
        args = [
            "--max-model-len", str(self.max_tokens), "--max-num-batched-tokens", "8192",
            "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(cache_bytes), *self.args,
        ]  # fmt: skip
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(visible_card, self.cards)), **self.env}
        if self.settings is None:
            env = {**NO_PLUGINS, **env}
        else:
            args += sparse_args(self.settings)
        log_path = logs / f"{self.label.replace(', ', '-').replace(' ', '')}.log"
        return Server(self.model, args, env=env, log_path=log_path, ready_timeout_s=timeout_s)


def visible_card(number: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a card, numbered as in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number] if visible else str(number)


class LockedReport(Report):
    """A report that several threads add to. Each figure names the number of cards that it was measured on."""

    def __init__(self, out: Path) -> None:
        super().__init__("two_gpus", device_name(), out / "cases.json", out / "figures.json")
        self._lock = threading.RLock()
        self._card = self.device

    def add_case(self, case: Mapping[str, Any]) -> None:
        with self._lock:
            super().add_case(case)

    def add_cards_figure(
        self,
        cards: int,
        name: str,
        value: float,
        unit: str,
        better: Literal["higher", "lower"],
        bar: float | None = None,
    ) -> None:
        with self._lock:
            self.device = self._card if cards == 1 else f"{cards} × {self._card}"
            self.add_figure(name, value, unit, better, bar)
            self.device = self._card

    def cases_of(self, part: str, **fields: object) -> list[dict[str, Any]]:
        with self._lock:
            return [
                case
                for case in self.cases
                if case["part"] == part and all(case.get(name) == value for name, value in fields.items())
            ]


@dataclass
class Running:
    """The servers of a step that are ready, by specification."""

    servers: dict[Spec, Server]

    def find(self, setting: str, layout: str, model: Path | None = None) -> tuple[Spec, Server] | None:
        for spec, server in self.servers.items():
            if (spec.setting, spec.layout) == (setting, layout) and model in (None, spec.model):
                return spec, server
        return None


class Lab:
    """Starts servers within the remaining time, and keeps their results."""

    def __init__(self, out: Path, budget_s: float) -> None:
        self.logs = out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.report = LockedReport(out)
        cases = out / "cases.json"
        if cases.exists():
            held = json.loads(cases.read_text(encoding="utf-8"))["cases"]
            # Failed requests are sent again.
            self.report.cases.extend(
                case for case in held if case["part"] not in ("problem", "step") and not case.get("error")
            )
        self.deadline = time.monotonic() + budget_s
        self._started: list[Server] = []

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def problem(self, what: str, reason: object) -> None:
        """Record why a measurement is missing."""
        self.report.add_case({"part": "problem", "what": what, "reason": str(reason)})
        print(f"{time.strftime('%T')} {what}: {reason}", flush=True)

    @contextmanager
    def limit(self, limit_s: float) -> Iterator[None]:
        """Raise StepTimeoutError after ``limit_s`` seconds. All servers are stopped at the end, whatever happens."""

        def over(*_: object) -> None:
            self.kill_servers()  # ends pending requests with an error
            raise StepTimeoutError(f"took longer than {limit_s:.0f} s")

        signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.stop_servers()

    def stop_servers(self) -> None:
        servers, self._started = self._started, []
        if servers:
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(Server.stop, servers))

    def end(self) -> None:
        """End this process and its servers immediately. Servers outlive their parent."""
        self.kill_servers()
        os._exit(143)

    def kill_servers(self) -> None:
        for server in self._started:
            server.kill()
        self.stop_servers()

    def start(self, specs: Sequence[Spec]) -> Running:
        """Start servers in parallel. If a server does not start, record the engine's error."""
        servers = [spec.server(self.logs, self.left_s) for spec in specs]
        self._started += servers
        running: dict[Spec, Server] = {}

        def enter(pair: tuple[Spec, Server]) -> None:
            spec, server = pair
            try:
                server.__enter__()
                running[spec] = server
            except ServerError as error:
                log = server.log_path.read_text(errors="replace") if server.log_path.exists() else ""
                self.problem(f"{spec.label}: the server did not start", root_cause(log) or str(error)[-2000:])

        began = time.monotonic()
        with ThreadPoolExecutor(max(len(servers), 1)) as pool:
            list(pool.map(enter, zip(specs, servers, strict=True)))
        print(f"{time.strftime('%T')} {len(running)} servers ready after {time.monotonic() - began:.0f} s", flush=True)
        return Running({spec: running[spec] for spec in specs if spec in running})


def tokens_of(url: str, model: str, prompt: Sequence[int], level: object = None) -> list[int]:
    """Return the token ids of a greedy answer. Raises RequestError if the server does not answer."""
    body: dict[str, Any] = {"model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    if level is not None:
        body["vllm_xargs"] = {"sparse_prefill": level}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise RequestError(f"{url}, {len(prompt)} tokens at level {level}: answered {error.code}: {text}") from None
    except OSError as error:
        raise RequestError(f"{url}, {len(prompt)} tokens at level {level}: {error}") from None


def tokens_again(server: Server, prompt: Sequence[int], level: object = None) -> list[int]:
    """Return the second answer to a prompt of whole pages plus one token.

    The server finds the pages in its cache and computes only the last token, densely, as a decode server does.
    """
    tokens_of(server.url, server.model, prompt, level)
    return tokens_of(server.url, server.model, prompt, level)


def names_among(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the comma-separated names of an option. Raises BenchError if one is unknown."""
    names = split(text)
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"{option}: given {unknown[0]!r}, expected names from {', '.join(known)}")
    return names


def equal_share(pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Return the share of pairs of equal answers."""
    return sum(first == second for first, second in pairs) / len(pairs)


def samples_by_rank(server: Server) -> dict[int, MetricsReport]:
    """Return each worker's counts, by rank. The server needs ``VLLM_SERVER_DEV_MODE=1``.

    Raises BenchError if the workers' counts do not arrive.
    """
    for _ in range(SAMPLE_TRIES):
        workers = server.post("/collective_rpc", {"method": WORKER_METHOD, "args": [True]})["results"]
        if not any(worker["behind"] for worker in workers):
            break
        time.sleep(0.5)
    else:
        raise BenchError(f"{server}: workers' counts are incomplete after {SAMPLE_TRIES} tries")
    reports = {}
    for worker in workers:
        report = MetricsReport()
        for name, labels, value in worker["samples"]:
            report.samples[name, tuple(zip(METRICS[name].labels, labels))] += int(value)
        reports[worker["rank"]] = report
    return reports


def counted(server: Server) -> MetricsReport:
    return parse_metrics(server.get(FRESH_METRICS_PATH))


@dataclass(frozen=True, kw_only=True)
class TwoGpus:
    """Compare two GPUs of one host with one GPU."""

    model: Annotated[Path, typer.Argument(help="Folder of a model of 8B size that can answer questions.")]
    out: Annotated[Path, typer.Argument(help="Folder for results and logs; an earlier run is continued.")]
    second: Annotated[Path | None, typer.Option(help="A smaller model, for the second card and data parallelism.")] = (
        None
    )
    profile: Annotated[Path | None, typer.Option(help="Profile of MODEL from `profile best`, also measured.")] = None
    budget_s: Annotated[float, typer.Option(help="Maximum seconds for all steps together.")] = 600.0
    steps: Annotated[str, typer.Option(help="Steps, comma-separated: one, tensor, pipeline, others.")] = (
        "one,tensor,pipeline,others"
    )
    layouts: Annotated[str, typer.Option(help="Layouts that the step `others` measures: pair, data.")] = "pair,data"
    lengths: Annotated[str, typer.Option(help="Lengths of timed prompts in tokens, comma-separated.")] = "32768,131072"
    answer_lengths: Annotated[str, typer.Option(help="Lengths of prompts with questions, comma-separated.")] = "32768"
    prompts: Annotated[int, typer.Option(help="Prompts with questions per length.", min=1)] = 4
    repeats: Annotated[int, typer.Option(help="Timed requests per length.", min=1)] = 2
    output_tokens: Annotated[int, typer.Option(help="Tokens of timed answers, for TPOT.", min=2)] = 64
    requests: Annotated[int, typer.Option(help="Requests of the load test.", min=1)] = 200
    clients: Annotated[int, typer.Option(help="Concurrent requests of the load test.", min=1)] = 24
    checked_min_tokens: Annotated[int, typer.Option(help="min_tokens of the servers whose levels are checked.")] = 2048
    text: Text = None
    server_args: Annotated[str, typer.Option(help="Additional arguments for all servers.")] = ""

    def run(self) -> None:
        """Run the steps, and print the failures."""
        steps: dict[str, Callable[[Lab], None]] = {
            "one": self.one,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "others": self.others,
        }
        with failures():
            chosen = names_among("--steps", self.steps, steps)
            names_among("--layouts", self.layouts, ("pair", "data"))
            if self.profile is not None:
                Settings.parse(str(self.profile), self.model)
            lab = Lab(self.out.absolute(), self.budget_s)
            signal.signal(signal.SIGTERM, lambda *_: lab.end())
        for name in chosen:
            limit_s, least_s = LIMITS[name]
            if lab.left_s < least_s:
                lab.problem(f"step {name}", f"skipped: {lab.left_s:.0f} s are left, expected at least {least_s:.0f} s")
                continue
            began = time.monotonic()
            try:
                with lab.limit(min(limit_s, lab.left_s)):
                    steps[name](lab)
            except (StepTimeoutError, BenchError, ServerError, RequestError, ConfigurationError) as error:
                lab.problem(f"step {name}", error)
            lab.report.add_case({"part": "step", "name": name, "seconds": round(time.monotonic() - began, 1)})
            print(f"{time.strftime('%T')} step {name}: {time.monotonic() - began:.0f} s", flush=True)
        if problems := lab.report.cases_of("problem"):
            print("\n".join(f"{case['what']}: {case['reason']}" for case in problems))
            raise typer.Exit(1)

    # --- servers ---

    def timed_lengths(self, model: Path) -> list[int]:
        """Return the lengths of timed prompts that the model's positions allow."""
        most = max_positions(model)
        lengths = token_counts("--lengths", self.lengths)
        return [length for length in lengths if most is None or length + self.output_tokens <= most]

    def timed_spec(self, model: Path, setting: str, layout: str, cards: tuple[int, ...]) -> Spec:
        """Return a server for TTFT, TPOT and answers."""
        lengths = [*self.timed_lengths(model), *token_counts("--answer-lengths", self.answer_lengths)]
        settings = {STOCK: None, DEFAULT: {}, BEST: {"profile": str(self.profile)}}[setting]
        parallel = {
            ONE: (),
            TENSOR: ("--tensor-parallel-size", "2"),
            PIPELINE: ("--pipeline-parallel-size", "2"),
        }[layout]
        tokens = max(lengths) + self.output_tokens
        args = (*parallel, *split_args(self.server_args))
        return Spec(model, setting, layout, cards, settings, args, tokens, tokens + SPARE_TOKENS, len(cards))

    def settings_of(self, model: Path) -> tuple[str, ...]:
        best = (BEST,) if self.profile is not None and model == self.model else ()
        return (STOCK, DEFAULT, *best)

    def checked_settings(self, **more: object) -> dict[str, Any]:
        """Return settings with several levels, for servers whose counters and levels are checked."""
        folder = self.out.absolute() / "profiles"
        folder.mkdir(exist_ok=True)
        profile = profile_file(
            folder,
            min_tokens=self.checked_min_tokens,
            min_query_tokens=64,
            level="high",
            default={"method": "top_p"},
            levels={"fast": {"default": {"method": "a_shape"}}},
        )
        return {"profile": profile, **more}

    def checked_spec(self, model: Path, layout: str, cards: tuple[int, ...], **changes: Any) -> Spec:
        """Return a server for short requests at several levels."""
        tokens = 8 * self.checked_min_tokens
        values: dict[str, Any] = {
            "setting": CHECKED,
            "settings": self.checked_settings(),
            "args": (),
            "max_tokens": tokens + PAGE_TOKENS,
            "cache_tokens": tokens * 5 // 2,
        }
        values |= changes
        values["args"] = (*values["args"], *split_args(self.server_args))
        return Spec(model=model, layout=layout, cards=cards, **values)

    # --- measurements ---

    def measure_speed(self, lab: Lab, servers: Sequence[tuple[Spec, Server]], cards: int) -> None:
        """Measure TTFT and TPOT of servers alternately. The first server is the baseline of ratios."""
        specs = [spec for spec, _ in servers]
        model = specs[0].model
        todo = [
            length
            for length in self.timed_lengths(model)
            if any(not lab.report.cases_of("speed", label=spec.label, tokens=length) for spec in specs)
        ]
        if not todo:
            return
        endpoints = [Endpoint.connect(spec.label, server.url) for spec, server in servers]
        lengths = [Length(length) for length in todo]
        rounds = alternate_requests(
            endpoints, lengths, Prompts.of(endpoints[0]), self.output_tokens, self.repeats, lambda: None
        )
        for length, results in rounds:
            for spec, result in zip(specs, results, strict=True):
                case = {
                    "part": "speed", "label": spec.label, "tokens": length.new_tokens, "ttft_s": result.first_s,
                    "tpot_ms": result.token_ms, "density": result.pairs.density, "said": result.failures,
                }  # fmt: skip
                lab.report.add_case(case)
                self.add_speed(lab, spec, length.new_tokens, cards)

    def add_speed(self, lab: Lab, spec: Spec, tokens: int, cards: int) -> None:
        """Add a server's figures for a length, its speed-up over stock, and the ratio of that to one GPU's speed-up."""
        (case,) = lab.report.cases_of("speed", label=spec.label, tokens=tokens)[-1:]
        about = f"{spec.label}, {tokens:,} tokens"
        if case["said"]:
            lab.problem(about, f"failed: {case['said'][0]}")
        for key, name, unit in (("ttft_s", "TTFT", "s"), ("tpot_ms", "TPOT", "ms")):
            if case[key] is not None:
                lab.report.add_cards_figure(cards, f"{about}: {name}", case[key], unit, "lower")
        gain = self.gain(lab, spec, spec.layout, tokens)
        if gain is None or spec.setting == STOCK:
            return
        lab.report.add_cards_figure(cards, f"{about}: TTFT, speed-up over stock", gain, "ratio", "higher")
        if (density := case["density"]) is not None:
            lab.report.add_cards_figure(cards, f"{about}: density of its sparse rows", density, "share", "lower")
        single_gain = self.gain(lab, spec, ONE, tokens)
        if single_gain is not None and spec.layout != ONE:
            name = f"{about}: TTFT, speed-up over stock ÷ {ONE}'s"
            bar = 0.95 if spec.layout in (TENSOR, PIPELINE) else None
            lab.report.add_cards_figure(cards, name, gain / single_gain, "ratio", "higher", bar)

    def gain(self, lab: Lab, spec: Spec, layout: str, tokens: int) -> float | None:
        """Return the TTFT speed-up of a server's setting over stock, both with ``layout``; None if not measured."""
        labels = [label_of(spec.model, setting, layout) for setting in (STOCK, spec.setting)]
        stock, ours = (lab.report.cases_of("speed", label=label, tokens=tokens) for label in labels)
        if not stock or not ours or not stock[-1]["ttft_s"] or not ours[-1]["ttft_s"]:
            return None
        return float(stock[-1]["ttft_s"] / ours[-1]["ttft_s"])

    def measure_answers(
        self, lab: Lab, workload: AnswerWorkload, servers: Sequence[tuple[Spec, Server]], cards: int
    ) -> None:
        """Ask the questions, and compare answers and perplexity with those on a single GPU."""
        for spec, server in servers:
            endpoint = Endpoint.connect(spec.label, server.url)

            def ready(endpoint: Endpoint = endpoint) -> AbstractContextManager[Endpoint]:
                return nullcontext(endpoint)

            contestant = Contestant(spec.label, name_of_path(str(spec.model)), spec.label, ready)
            ask_all([contestant], workload, workload.key(spec.model.name), lab.report)
            single = label_of(spec.model, spec.setting, ONE)
            labels = list(dict.fromkeys((single, spec.label)))
            rows = summaries(list(lab.report.cases), labels, workload.lengths)
            for row in (row for row in rows if row["label"] == spec.label):
                self.add_answers(lab, row, single, cards)

    def add_answers(self, lab: Lab, row: Mapping[str, Any], single: str, cards: int) -> None:
        about = f"{row['label']}, {row['tokens']:,} tokens"
        if row["failed"]:
            lab.problem(about, f"{row['failed']} requests with questions failed")
        if row["share"] is None:
            return
        add = lab.report.add_cards_figure
        add(cards, f"{about}: right answers of {row['asked']}", row["right"], "answers", "higher")
        add(cards, f"{about}: perplexity", row["perplexity"], "ratio", "lower")
        if row["density"] is not None:
            add(cards, f"{about}: density over questions", row["density"], "share", "lower")
        if row["label"] != single and row["of_first"] is not None:
            error = row["standard_error"] / row["share"] if row["share"] and row["standard_error"] else 0.0
            bar = float(f"{1 - error:.4f}")
            add(cards, f"{about}: right answers ÷ {ONE}'s", row["of_first"], "ratio", "higher", bar)
            change = 1 + (row["perplexity_change"] or 0.0) / 100
            add(cards, f"{about}: perplexity ÷ {ONE}'s", change, "ratio", "lower", 1.01)

    def workload(self) -> AnswerWorkload:
        """Return the questions, tokenized by the first server that receives them."""
        lengths = token_counts("--answer-lengths", self.answer_lengths)
        facts = min(FACTS, min(lengths) // 120)
        return AnswerWorkload.from_text(self.text, lengths, self.prompts, facts)

    def is_measured(self, lab: Lab, spec: Spec) -> bool:
        """Return whether an earlier run completed a server's measurements."""
        speeds = [lab.report.cases_of("speed", label=spec.label, tokens=n) for n in self.timed_lengths(spec.model)]
        lengths = token_counts("--answer-lengths", self.answer_lengths)
        answers = [
            case
            for case in lab.report.cases_of("prompt", label=spec.label)
            if not case["error"] and case["tokens"] in lengths
        ]
        return all(speeds) and len(answers) >= len(lengths) * self.prompts

    # --- step: one GPU ---

    def one(self, lab: Lab) -> None:
        """Measure each model on its own card, both at the same time."""
        models = [(self.model, 0)] + ([] if self.second is None else [(self.second, 1)])
        jobs = []
        for model, card in models:
            specs = [self.timed_spec(model, setting, ONE, (card,)) for setting in self.settings_of(model)]
            if any(not self.is_measured(lab, spec) for spec in specs):
                jobs.append((model, self.that_fit(lab, specs)))
        running = lab.start([spec for _, specs in jobs for spec in specs])

        def measure(job: tuple[Path, list[Spec]]) -> None:
            servers = [(spec, running.servers[spec]) for spec in job[1] if spec in running.servers]
            if servers:
                self.measure_speed(lab, servers, 1)
                self.measure_answers(lab, self.workload(), servers, 1)

        with ThreadPoolExecutor(max(len(jobs), 1)) as pool:
            for result in [pool.submit(measure, job) for job in jobs]:
                result.result()

    def that_fit(self, lab: Lab, specs: list[Spec]) -> list[Spec]:
        """Return the servers that fit on a card together. The two servers of a ratio must run on the same card."""
        if not has_cuda():
            return specs
        import torch

        room = torch.cuda.get_device_properties(specs[0].cards[0]).total_memory
        chosen: list[Spec] = []
        for spec in specs:
            weights = sum(path.stat().st_size for path in spec.model.glob("*.safetensors"))
            room -= weights + kv_bytes(spec.model, spec.cache_tokens) + OVERHEAD_BYTES
            if room >= 0:
                chosen.append(spec)
            else:
                lab.problem(
                    spec.label, f"not measured: its card lacks {-room / 2**30:.0f} GiB for it next to the other servers"
                )
        return chosen

    # --- step: tensor parallelism ---

    def tensor(self, lab: Lab) -> None:
        """Measure tensor parallelism of two: speed, answers, then counters, levels and load on a separate server."""
        if self.second is not None and (heads := ModelShape.from_folder(self.second).num_heads) % 2:
            lab.problem(f"{self.second.name}, {TENSOR}", f"skipped: its {heads} heads cannot be divided by 2")
        specs = [self.timed_spec(self.model, setting, TENSOR, (0, 1)) for setting in self.settings_of(self.model)]
        checked = self.checked_spec(
            self.model, TENSOR, (0, 1), cache_parts=2, args=("--tensor-parallel-size", "2"),
            env={"VLLM_SERVER_DEV_MODE": "1"},
            settings=self.checked_settings(guard={"rate": 0.25, "bound": 1e6}),
        )  # fmt: skip
        running = lab.start([*specs, checked])
        servers = [(spec, running.servers[spec]) for spec in specs if spec in running.servers]
        if servers:
            self.measure_speed(lab, servers, 2)
            self.measure_answers(lab, self.workload(), servers, 2)
        if checked in running.servers:
            stock = running.find(STOCK, TENSOR)
            self.check_levels(lab, checked, running.servers[checked], None if stock is None else stock[1])
            self.check_ranks(lab, checked, running.servers[checked])
            self.check_load(lab, checked, running.servers[checked], self.requests)

    def check_prompts(self, url: str) -> list[list[int]]:
        """Return prompts below and above ``min_tokens``, and of several chunks. Each has whole pages plus one token."""
        prompts = Prompts.of(Endpoint.connect("server", url))
        least = self.checked_min_tokens
        return [prompts.take(length + 1) for length in (least // 2, 2 * least, 4 * least, 7 * least)]

    def check_levels(self, lab: Lab, spec: Spec, server: Server, stock: Server | None) -> None:
        """Compare exact answers with stock vLLM's, and check that every level runs."""
        pairs = []
        for prompt in self.check_prompts(server.url):
            answers = {str(level): tokens_of(server.url, server.model, prompt, level) for level in LEVELS}
            if stock is not None:
                pairs.append((answers["exact"], tokens_of(stock.url, stock.model, prompt)))
        if pairs:
            name = f"{spec.label}: share of exact answers equal to stock's"
            lab.report.add_cards_figure(2, name, equal_share(pairs), "share", "higher", 1)

    def check_ranks(self, lab: Lab, spec: Spec, server: Server) -> None:
        """Compare the workers' counts with each other, and their sums with /metrics."""
        page, ranks = counted(server), samples_by_rank(server)
        add = lab.report.add_cards_figure
        for rank, report in ranks.items():
            add(2, f"{spec.label}: density of rank {rank}", report.pairs.density or 0.0, "share", "lower")
        densities = [report.pairs.density or 0.0 for report in ranks.values()]
        apart = max(densities) - min(densities)
        add(2, f"{spec.label}: largest difference of the ranks' densities", apart, "share", "lower", RANKS_APART)
        causal = {report.pairs.causal for report in ranks.values()}
        add(2, f"{spec.label}: ranks whose pairs differ", len(causal) - 1, "ranks", "lower", 0)
        levels = {"default", "fast", "p"}
        lacking = sum(
            len(levels - {level for level, kept in report.by("kept_pairs", "level").items() if kept})
            for report in ranks.values()
        )
        add(2, f"{spec.label}: levels that a rank did not run", lacking, "levels", "lower", 0)
        unguarded = sum(not report.by("guard_checks").total() for report in ranks.values())
        add(2, f"{spec.label}: ranks without the guard's checks", unguarded, "ranks", "lower", 0)
        differing = 0
        for name in ("kept_pairs", "causal_pairs", "tiles", "guard_checks"):
            sums: Counter[Any] = sum((report.by(name, "layer", "level") for report in ranks.values()), Counter())
            differing += sums != +page.by(name, "layer", "level")
        add(2, f"{spec.label}: metrics that differ from the workers' sum", differing, "metrics", "lower", 0)

    def check_load(self, lab: Lab, spec: Spec, server: Server, num_requests: int) -> Checked:
        """Send requests of all lengths and levels, abort some, and compare the counters with the requests sent."""
        endpoint = Endpoint.connect(spec.label, server.url)
        asking = Asking(
            min(lab.left_s, LOAD_S), self.clients, 16, spec.max_tokens - LOAD_OUTPUT_TOKENS, (None, "exact", "fast"),
            most_output_tokens=LOAD_OUTPUT_TOKENS, most_requests=num_requests,
        )  # fmt: skip
        assert spec.settings is not None
        served: Served = served_by(endpoint, spec.settings, spec.model, 8192)
        done = soak_and_check(endpoint, asking, Prompts.of(endpoint), None, served)
        outcome, add = done.outcome, lab.report.add_cards_figure
        about = f"{spec.label}, {outcome.num_requests} requests of {self.clients} clients"
        lab.report.add_case(
            {"part": "load", "label": spec.label, "said": lines(asking, done), "problems": done.problems}
        )
        add(2, f"{about}: failed", len(outcome.errors), "requests", "lower", 0)
        add(2, f"{about}: aborted", outcome.broken_off, "requests", "higher")
        preempted = done.after.preemptions - done.before.preemptions
        bar = 1 if spec.layout == TENSOR else None
        add(2, f"{about}: preempted", preempted, "requests", "higher", bar)
        if done.audit is not None:
            name = f"{about}: counters that differ from what was sent"
            add(2, name, len(done.audit.differences), "counters", "lower", 0)
        for problem in done.problems:
            lab.problem(about, problem)
        return done

    # --- step: pipeline parallelism ---

    def pipeline(self, lab: Lab) -> None:
        """Measure pipeline parallelism of two: speed and answers."""
        specs = [self.timed_spec(self.model, setting, PIPELINE, (0, 1)) for setting in self.settings_of(self.model)]
        running = lab.start(specs)
        servers = [(spec, running.servers[spec]) for spec in specs if spec in running.servers]
        if servers:
            self.measure_speed(lab, servers, 2)
            self.measure_answers(lab, self.workload(), servers, 2)

    # --- step: the pair and data parallelism ---

    def others(self, lab: Lab) -> None:
        """Measure layouts that share the cards. Their servers start together, and are measured one after the other."""
        small = self.second or self.model
        data = self.checked_spec(
            small, DATA, (0, 1),
            # Without cached prefixes, both engines compute the same chunks, so their answers must be equal.
            args=("--data-parallel-size", "2", "--api-server-count", "2", "--no-enable-prefix-caching"),
            settings=self.checked_settings(switch=True, guard={"rate": 0.25, "bound": 1e6}),
        )  # fmt: skip
        with ExitStack() as stack:
            pair = Pair.plan(self, lab.logs, stack)
            specs_by_layout = {"pair": pair.specs, "data": [data]}
            checks: dict[str, Callable[[Running], object]] = {
                "pair": lambda running: pair.check(lab, running, stack),
                "data": lambda running: self.check_data(lab, data, running.servers[data]),
            }
            for layouts in self.together():
                running = lab.start([spec for layout in layouts for spec in specs_by_layout[layout]])
                for layout in layouts:
                    if not all(spec in running.servers for spec in specs_by_layout[layout]):
                        continue  # start() has recorded the reason
                    try:
                        checks[layout](running)
                    except (BenchError, ServerError, RequestError, ConfigurationError) as error:
                        lab.problem(layout, error)
                lab.stop_servers()

    def together(self) -> list[list[str]]:
        """Return groups of layouts. The servers of a group fit on two cards, and groups run one after the other."""
        layouts = names_among("--layouts", self.layouts, ("pair", "data"))
        return [layouts] if self.second is not None else [[layout] for layout in layouts]

    def check_data(self, lab: Lab, spec: Spec, server: Server) -> None:
        """Check levels, the switch and the counters with two engines behind two API server processes."""
        done = self.check_load(lab, spec, server, max(self.requests // 4, 8))
        add = lab.report.add_cards_figure
        idle = sum(not count for count in done.after.report.by("causal_pairs", "engine").values())
        add(2, f"{spec.label}: engines without sparse rows", idle, "engines", "lower", 0)
        pages = [counted(server) for _ in range(6)]  # each connection reaches one of the API server processes
        names = ("rows", "kept_pairs", "causal_pairs", "tiles")
        differing = sum(any(page.by(name) != pages[0].by(name) for name in names) for page in pages)
        add(2, f"{spec.label}: pages of /metrics that differ", differing, "pages", "lower", 0)
        prompts = self.check_prompts(server.url)
        exact = [tokens_of(server.url, server.model, prompt, "exact") for prompt in prompts]
        switch.ask(server.url, switch.To.EXACT)
        try:
            before = counted(server)
            switched = [tokens_of(server.url, server.model, prompt) for prompt in prompts * 2]
            sparse = counted(server).rows_of("sparse") - before.rows_of("sparse")
        finally:
            switch.ask(server.url, switch.To.ON)
        add(2, f"{spec.label}: sparse rows while switched to exact", sparse, "rows", "lower", 0)
        share = equal_share(list(zip(switched, exact * 2, strict=True)))
        add(2, f"{spec.label}: share of switched answers equal to exact answers", share, "share", "higher", 1)
        before = counted(server)
        for prompt in self.check_prompts(server.url):
            tokens_of(server.url, server.model, prompt)
        back = counted(server).rows_of("sparse") - before.rows_of("sparse")
        add(2, f"{spec.label}: sparse rows after switching back", back, "rows", "higher", 1)


@dataclass(frozen=True)
class Pair:
    """A prefill server, a stock decode server, and single servers that must give the same answers."""

    options: TwoGpus
    prefill: Spec
    decode: Spec
    single: Spec
    stock: Spec
    uses_nixl: bool

    @property
    def specs(self) -> list[Spec]:
        return [self.prefill, self.decode, self.single, self.stock]

    @staticmethod
    def plan(options: TwoGpus, logs: Path, stack: ExitStack) -> "Pair":
        """Choose the connector, and reserve the ports that it needs until ``stack`` closes."""
        uses_nixl = importlib.util.find_spec("nixl") is not None
        settings, pages = options.checked_settings(), ("--block-size", str(PAGE_TOKENS))

        def spec(setting: str, card: int, values: Mapping[str, Any] | None, role: str | None = None) -> Spec:
            env: dict[str, str] = {}
            transfer: dict[str, Any] = {
                "kv_role": role,
                "kv_connector": "NixlConnector" if uses_nixl else "ExampleConnector",
            }
            # ExampleConnector writes only the blocks of a prompt's first chunk.
            chunk: tuple[str, ...] = ()
            if uses_nixl:
                transfer |= {"kv_connector_extra_config": {"enforce_handshake_compat": False}}
                transfer |= {} if has_cuda() else {"kv_buffer_device": "cpu"}
                side_channel = stack.enter_context(reserve_port())
                env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
                env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel.getsockname()[1])
            else:
                transfer |= {"kv_connector_extra_config": {"shared_storage_path": str(logs.parent / "blocks")}}
                chunk = ("--max-num-batched-tokens", str(8 * options.checked_min_tokens))
            connected = () if role is None else ("--kv-transfer-config", json.dumps(transfer))
            return options.checked_spec(
                options.model,
                PAIR,
                (card,),
                setting=setting,
                settings=values,
                args=(*pages, *chunk, *connected),
                env=env,
            )

        return Pair(
            options,
            spec("prefill", 0, settings, "kv_producer"),
            spec("decode", 1, None, "kv_consumer"),
            spec(CHECKED, 0, settings),
            spec(STOCK, 1, None),
            uses_nixl,
        )

    def check(self, lab: Lab, running: Running, stack: ExitStack) -> None:
        """Compare the pair's answers with those of single servers, at every level and in mixed order."""
        prefill, decode, single, stock = (running.servers[spec] for spec in self.specs)
        url = stack.enter_context(proxy(decode.url, prefill.url)) if self.uses_nixl else None
        if url is None:
            lab.problem(PAIR, "nixl is not installed: only the default level is compared, by ExampleConnector")
        exact: list[tuple[list[int], list[int]]] = []
        sparse: list[tuple[list[int], list[int]]] = []
        mixed = 0
        for prompt in self.options.check_prompts(single.url):
            if url is None:
                # This connector looks up a prompt without its last token, which must not be the first token of a page.
                prompt = [*prompt, prompt[-1]]
                answers: dict[object, list[int]] = {"on": by_shared_folder(prefill, decode, prompt)}
            else:
                answers = {level: tokens_of(url, decode.model, prompt, level) for level in LEVELS}
                # Ask again, now that the decode server has blocks of sparse requests.
                exact.append((tokens_of(url, decode.model, prompt, "exact"), answers["exact"]))
            for level, answer in answers.items():
                if level == "exact" or len(prompt) <= self.options.checked_min_tokens:
                    exact.append((answer, tokens_again(stock, prompt)))
                else:
                    sparse.append((answer, tokens_again(single, prompt, level)))
                    mixed += answer != answers.get("exact", answer)
        add, about = lab.report.add_cards_figure, f"{self.prefill.model.name}, {PAIR}"
        name = f"{about}: share of {len(exact)} exact answers equal to a stock server's"
        add(2, name, equal_share(exact), "share", "higher", 1)
        name = f"{about}: share of {len(sparse)} sparse answers equal to a single server's"
        add(2, name, equal_share(sparse), "share", "higher", 1)
        add(2, f"{about}: sparse answers that differ from exact answers", mixed, "answers", "higher")
        lab.report.add_case({"part": "pair", "exact": exact, "sparse": sparse, "nixl": self.uses_nixl})


@contextmanager
def proxy(decode_url: str, prefill_url: str) -> Iterator[str]:
    """Run deploy/salting_proxy.py, and return its URL."""
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        command = [sys.executable, str(PROXY), "--decode", decode_url, "--prefill", prefill_url, "--port", str(port)]
        process = subprocess.Popen(command)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(100):
                try:
                    Endpoint.connect("proxy", url)
                    break
                except BenchError:
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def by_shared_folder(prefill: Server, decode: Server, prompt: Sequence[int]) -> list[int]:
    """Return the decode server's answer to a prompt whose blocks the prefill server wrote into the shared folder."""
    prefill.post("/v1/completions", {"model": prefill.model, "prompt": list(prompt), "max_tokens": 1})
    return tokens_of(decode.url, decode.model, prompt)


if __name__ == "__main__":
    run_alone(TwoGpus)
