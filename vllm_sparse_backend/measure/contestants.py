# SPDX-License-Identifier: Apache-2.0
"""Servers that are asked the same: started, one or several at a time, or running; what one run leaves the next asks."""

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Protocol

from vllm_sparse_backend.measure.endpoint import Endpoint
from vllm_sparse_backend.measure.pairs import Pairs
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.scrape import parse
from vllm_sparse_backend.measure.serve import SPARE_TOKENS, Settings, kv_bytes, max_positions, split_args
from vllm_sparse_backend.measure.server import Server, ServerError, has_cuda, sparse_args
from vllm_sparse_backend.settings.auto import AUTO
from vllm_sparse_backend.settings.metrics import PREFIX
from vllm_sparse_backend.settings.profile import load_profile

Case = dict[str, Any]
OnCase = Callable[[Case], None]
At = tuple[Hashable, ...]
"""Which request of a job: values of the job's ``fields``."""
Ask = Callable[[Endpoint, At], Case]

MEMORY = 0.9
"""Share of a card that servers beside each other have together."""


class Job(Protocol):
    """Requests that every server is asked."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Of a case: those that tell one request from another."""

    @property
    def wanted(self) -> Sequence[At]: ...

    def sample(self, endpoint: Endpoint) -> object:
        """Equal for servers that make the same prompts."""

    def build(self, endpoint: Endpoint) -> Ask:
        """Asks a server one of the requests.

        A request that fails, or is not answered whole, has its ``error`` in the case, and no answer; ``error`` is None
        otherwise. Raises BenchError where the prompts cannot be made at all.
        """


_started: set[Server] = set()
"""Those that this process has started, and not yet stopped."""


@dataclass(frozen=True)
class Contestant:
    """One server to ask, or a level of it; ``open`` starts it, or finds it running. Its levels share one ``open``."""

    label: str
    model: str
    """Its name, without a folder's path."""
    what: str
    """Its address or its settings, whole: what a label leaves out."""
    open: Callable[[], AbstractContextManager[Endpoint]] = field(compare=False)
    level: int | str | None = None
    """What its requests ask for; None if nothing."""

    def at(self, levels: Sequence[int | str]) -> "list[Contestant]":
        """The server at each of the levels; itself where none is named."""
        at = [
            replace(self, label=f"{self.label} {level}", what=f"{self.what}, level {level}", level=level)
            for level in levels
        ]
        return at or [self]

    @staticmethod
    def running(label: str | None, url: str, levels: Sequence[int | str] = ()) -> "list[Contestant]":
        """A server at each of the levels, if it is one of this backend."""
        endpoint = Endpoint.connect(label or url, url)
        found = Contestant(
            label or endpoint.model, Path(endpoint.model).name, endpoint.url, lambda: nullcontext(endpoint)
        )
        return found.at(levels) if PREFIX in endpoint.metrics() else [found]

    @staticmethod
    def served(label: str, model: Path, args: Sequence[str], what: str) -> "Contestant":
        @contextmanager
        def start() -> Iterator[Endpoint]:
            # A long prompt needs more than the cache that a server on a CPU gets otherwise.
            env = {name: os.environ[name] for name in ("VLLM_CPU_KVCACHE_SPACE",) if name in os.environ}
            server = Server(model, args, env=env)
            _started.add(server)
            try:
                with server:
                    yield Endpoint.connect(label, server.url)
            except ServerError as error:
                raise BenchError(f"{label}: {error}") from error
            finally:
                _started.discard(server)

        return Contestant(label, model.name, what, start)


def started(
    model: Path,
    settings: Sequence[Settings],
    stock: bool,
    longest: int,
    extra: str,
    jobs: int = 1,
    concurrency: int = 1,
    levels: Sequence[int | str] = (),
) -> list[Contestant]:
    """Stock, and each of the settings at each of the levels, served on this machine, ``jobs`` servers at a time.

    Beside others on a card, each has its share of the memory, and a cache for as many requests as it is asked at a
    time: vLLM, which sizes a cache by what is free, would count what others take and give back. ``extra`` goes before.
    """
    if (most := max_positions(model)) is not None and longest >= most:
        raise BenchError(
            f"{model} has {most:,} positions, expected prompts to be shorter, and {longest:,} were asked for"
        )
    args: tuple[str, ...] = ("--max-model-len", str(longest + 1))
    if jobs > 1 and has_cuda():
        cache = kv_bytes(model, concurrency * (longest + SPARE_TOKENS))
        args += ("--gpu-memory-utilization", f"{MEMORY / jobs:.3f}", "--kv-cache-memory-bytes", str(cache))
    args += split_args(extra)
    labels, whole = [str(one) for one in settings], [json.dumps(dict(one.values)) for one in settings]
    # Those that differ in more than their parameters have their whole text for a name.
    labels = [text if labels.count(name) > 1 else name for name, text in zip(labels, whole)]
    found = [Contestant.served("stock", model, args, "stock")] if stock else []
    for name, text, one in zip(labels, whole, settings):
        what = text + _content_of(one)
        found += Contestant.served(name, model, (*args, *sparse_args(one.values)), what).at(levels)
    return found


def _content_of(settings: Settings) -> str:
    """What a profile says, in short: one that was made anew under its name is another one."""
    profile = settings.values.get("profile")
    if profile is None or profile == AUTO:
        return ""
    return f", {hashlib.sha256(load_profile(profile).to_yaml().encode()).hexdigest()[:16]}"


def resume(report: Report, path: Path | None, key: str, contestants: Sequence[Contestant]) -> None:
    """Take over what a file from an earlier run holds, less failed requests. Raises BenchError if it is of others."""
    if path is None or not path.exists():
        return
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
        held = {case["label"]: case["what"] for case in cases}
        keys = {case["key"] for case in cases}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of `eval {report.bench}`: {error!r}") from None
    if keys - {key}:
        raise BenchError(f"{path}: holds answers to other prompts, or of other servers: name another file for these")
    for one in contestants:
        if (what := held.get(one.label, one.what)) != one.what:
            raise BenchError(f"{path}: holds {one.label} as {what}, now it is {one.what}: name another file")
    report.cases.extend(case for case in cases if not case.get("error"))


def ask_all(
    contestants: Sequence[Contestant],
    job: Job,
    key: str,
    report: Report,
    concurrency: int,
    on_case: OnCase,
    jobs: int = 1,
) -> None:
    """A case for each contestant and request that the report does not hold yet; ``jobs`` servers at a time.

    Raises BenchError, and stops the servers that it started.
    """
    if len({one.label for one in contestants}) < len(contestants):
        raise BenchError(f"labels {', '.join(one.label for one in contestants)}: expected each of them once")
    todo: dict[str, list[At]] = {}
    for one in contestants:
        held = {tuple(case.get(name) for name in job.fields) for case in report.cases if case["label"] == one.label}
        todo[one.label] = [at for at in job.wanted if at not in held]
    made, adding, over = _Made(job), Lock(), Event()

    def add(case: Case) -> None:
        with adding:
            if over.is_set():
                return  # of a server that was stopped
            report.add_case(case)
            if case["part"] == "prompt":
                on_case(case)

    def ask(server: Sequence[Contestant]) -> None:
        with server[0].open() as endpoint:
            for one in server:
                at_level = endpoint if one.level is None else endpoint.at_level(one.level)
                base = {"key": key, "label": one.label, "what": one.what}
                _ask_server(at_level, made.ask_for(one, endpoint), todo[one.label], job.fields, base, add, concurrency)

    waiting = [one for one in contestants if todo[one.label]]
    _each([[*server] for _, server in groupby(waiting, key=lambda one: one.open)], ask, jobs, over)


class _Made:
    """The prompts of a job, made with the first server that is ready, and the same for all."""

    def __init__(self, job: Job) -> None:
        self._job, self._lock = job, Lock()
        self._ask: Ask | None = None
        self._sample: object = None

    def ask_for(self, one: Contestant, endpoint: Endpoint) -> Ask:
        with self._lock:
            if self._ask is None:
                self._ask, self._sample = self._job.build(endpoint), self._job.sample(endpoint)
            elif self._job.sample(endpoint) != self._sample:
                raise BenchError(f"{one.label}: its tokenizer is another than the first server's: prompts would differ")
            return self._ask


def _each(
    servers: Sequence[Sequence[Contestant]], ask: Callable[[Sequence[Contestant]], None], jobs: int, over: Event
) -> None:
    """``ask`` for each, ``jobs`` at a time, in their order. What one of them raises ends all; then it is ``over``.

    Threads are daemons, and servers are stopped from here: who breaks off does not wait for prompts of minutes.
    """
    waiting, failed = iter(servers), list[BaseException]()

    def work() -> None:
        while not over.is_set() and (one := next(waiting, None)) is not None:
            try:
                ask(one)
            except BaseException as error:
                failed.append(error)
                over.set()

    threads = [Thread(target=work, daemon=True) for _ in range(min(jobs, len(servers)))]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not over.wait(0.1):
            pass
    finally:
        over.set()
        for server in [*_started]:
            server.stop()
    if failed:
        raise failed[0]


def _ask_server(
    endpoint: Endpoint,
    ask: Ask,
    todo: Sequence[At],
    fields: Sequence[str],
    base: Mapping[str, Any],
    add: OnCase,
    concurrency: int,
) -> None:
    """A case for each of the requests, and one for the density of all and why rows were dense; each with ``base``."""
    before = endpoint.metrics()
    pool = ThreadPoolExecutor(concurrency)
    try:
        for at, case in zip(todo, pool.map(lambda at: ask(endpoint, at), todo)):
            add({"part": "prompt", **base, **dict(zip(fields, at)), **case})
    finally:
        # Who breaks off does not wait for prompts of minutes: they end with the server.
        pool.shutdown(wait=False, cancel_futures=True)
    after = endpoint.metrics()
    if PREFIX in before and PREFIX in after:  # it counts pairs
        counted = Pairs.on_page(after) - Pairs.on_page(before)
        rows = parse(after).rows - parse(before).rows
        dense = {reason: count for (path, reason), count in rows.items() if path == "dense"}
        pairs = {"density": counted.density, "kept_pairs": counted.kept, "causal_pairs": counted.causal}
        add({"part": "density", **base, **dict.fromkeys(fields), **pairs, "dense_rows": dense})


def densities(cases: Sequence[Case]) -> dict[str, float | None]:
    """By label, of all runs that a file holds; of the last one where some did not write how many pairs there were."""
    runs: dict[str, list[Case]] = {}
    for case in cases:
        if case["part"] == "density":
            runs.setdefault(case["label"], []).append(case)
    return {label: _density(of) for label, of in runs.items()}


def _density(runs: Sequence[Case]) -> float | None:
    if not all("causal_pairs" in run for run in runs):
        density: float | None = runs[-1]["density"]
        return density
    return sum((Pairs(run["kept_pairs"], run["causal_pairs"]) for run in runs), Pairs()).density
