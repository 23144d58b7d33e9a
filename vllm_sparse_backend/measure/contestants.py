# SPDX-License-Identifier: Apache-2.0
"""Servers that are asked the same: started one after the other, or running; what one run leaves the next asks."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from vllm_sparse_backend.measure.client import Endpoint
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.scrape import Pairs, parse
from vllm_sparse_backend.measure.server import CPU_CACHE, Server, Settings, max_positions, sparse_args, split_args
from vllm_sparse_backend.settings.auto import AUTO
from vllm_sparse_backend.settings.metrics import PREFIX
from vllm_sparse_backend.settings.model_shape import name_of_path
from vllm_sparse_backend.settings.profile import load_profile
from vllm_sparse_backend.settings.reasons import Fallback

Case = dict[str, Any]
At = tuple[int, int]
"""Which request: tokens of its prompt, and its number."""


class Asked(Protocol):
    """What every server is asked: ``asking.Asking``."""

    @property
    def wanted(self) -> list[At]: ...

    def make(self, endpoint: Endpoint) -> bool: ...

    def ask(self, endpoint: Endpoint, at: At) -> Case: ...


def at_of(case: Mapping[str, Any]) -> At:
    return case["tokens"], case["prompt"]


@dataclass(frozen=True)
class Contestant:
    """One server to ask, or a level of it; ``open`` starts it, or finds it running. Its levels share one ``open``."""

    label: str
    model: str
    """Its name, without a folder's path."""
    what: str
    """Its address or its settings, whole: what a label leaves out."""
    open: Callable[[], AbstractContextManager[Endpoint]]
    is_running: bool = False
    """Else it has to be started."""
    level: float | str | None = None
    """What its requests ask for; None if nothing."""

    def at(self, levels: Sequence[float | str]) -> "list[Contestant]":
        """The server at each of the levels; itself where none is named."""
        at = [
            replace(self, label=f"{self.label} {level}", what=f"{self.what}, level {level}", level=level)
            for level in levels
        ]
        return at or [self]

    @staticmethod
    def running(label: str, url: str, levels: Sequence[float | str] = ()) -> "list[Contestant]":
        """A server at each of the levels, if it is one of this backend."""
        endpoint = Endpoint.connect(label or url, url)
        found = Contestant(
            label or endpoint.model, Path(endpoint.model).name, endpoint.url, lambda: nullcontext(endpoint), True
        )
        return found.at(levels) if PREFIX in endpoint.metrics() else [found]

    @staticmethod
    def served(label: str, model: Path, args: Sequence[str], what: str) -> "Contestant":
        @contextmanager
        def start() -> Iterator[Endpoint]:
            # A long prompt needs more than the cache that a server on a CPU gets otherwise.
            env = {name: os.environ[name] for name in (CPU_CACHE,) if name in os.environ}
            with Server(model, args, env=env) as server:
                yield Endpoint.connect(label, server.url)

        return Contestant(label, name_of_path(str(model)), what, start)


@contextmanager
def opened(contestants: Sequence[Contestant]) -> Iterator[list[Endpoint]]:
    """All of them at once, each server once."""
    with ExitStack() as stack:
        servers = {start: stack.enter_context(start()) for start in dict.fromkeys(one.open for one in contestants)}
        yield [servers[one.open] if one.level is None else servers[one.open].at_level(one.level) for one in contestants]


def asked_for(
    model: Path | None, settings: Sequence[str], levels: Sequence[float | str], urls: Sequence[str],
    labels: Sequence[str], max_len: int, server_args: str,
) -> list[Contestant]:  # fmt: skip
    """Stock and each of the settings, to be started for ``model``; or the servers at ``urls``. Raises BenchError."""
    if (model is None) == (not urls):
        raise BenchError("expected a MODEL to serve, or --url of running servers")
    if labels and len(labels) != len(urls):
        raise BenchError(f"--label: given {len(labels)}, expected one for each of {len(urls)} --url")
    if model is not None:
        chosen = [Settings.parse(one, model) for one in settings or ["{}"]]
        return started(model, chosen, max_len, server_args, levels)
    if useless := [name for name, value in (("--settings", settings), ("--server-args", server_args)) if value]:
        raise BenchError(f"{', '.join(useless)}: given with running servers, expected only with a MODEL to serve")
    names_of = labels or [""] * len(urls)
    return [one for name, at in zip(names_of, urls) for one in Contestant.running(name, at, levels)]


def started(
    model: Path, settings: Sequence[Settings], max_len: int, extra: str = "", levels: Sequence[float | str] = ()
) -> list[Contestant]:
    """Stock, and each of the settings at each of the levels, served on this machine for requests of ``max_len`` tokens.

    ``extra``: more arguments for all of them.
    """
    if (most := max_positions(model)) is not None and max_len > most:
        raise BenchError(f"{model} has {most:,} positions, and {max_len:,} were asked for, answers included")
    args = ("--max-model-len", str(max_len), *split_args(extra))
    labels, whole = [str(one) for one in settings], [json.dumps(dict(one.values)) for one in settings]
    # Those that differ in more than their parameters have their whole text for a name.
    labels = [text if labels.count(name) > 1 else name for name, text in zip(labels, whole)]
    found = [Contestant.served("stock", model, args, "stock")]
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


def held(cases: Sequence[Case], contestants: Sequence[Contestant], asking: Asked) -> int:
    """How many of the requests a report has."""
    labels, wanted = {one.label for one in contestants}, set(asking.wanted)
    return sum(case["part"] == "prompt" and case["label"] in labels and at_of(case) in wanted for case in cases)


def ask_all(contestants: Sequence[Contestant], asking: Asked, key: str, report: Report, concurrency: int = 1) -> None:
    """A case for each contestant and request that the report does not hold yet. Raises BenchError, or ServerError."""
    if len({one.label for one in contestants}) < len(contestants):
        raise BenchError(f"labels {', '.join(one.label for one in contestants)}: expected each of them once")
    there = {(case["label"], at_of(case)) for case in report.cases if case["part"] == "prompt"}
    todo = {one.label: [at for at in asking.wanted if (one.label, at) not in there] for one in contestants}
    waiting = [one for one in contestants if todo[one.label]]
    for _, group in groupby(waiting, key=lambda one: one.open):
        with opened(levels := list(group)) as endpoints:
            # Prompts are made with the first server that is ready, and the same for all.
            if not asking.make(endpoints[0]):
                whose = "its tokenizer is another than the first server's"
                raise BenchError(f"{levels[0].label}: {whose}: prompts would differ")
            for one, endpoint in zip(levels, endpoints, strict=True):
                base = {"key": key, "label": one.label, "what": one.what, "model": one.model}
                _ask_server(endpoint, asking, todo[one.label], base, report.add_case, concurrency)


def _ask_server(
    endpoint: Endpoint,
    asking: Asked,
    todo: Sequence[At],
    base: Mapping[str, Any],
    add: Callable[[Case], None],
    concurrency: int,
) -> None:
    """A case for each of the requests, and one for the density of all and why rows were dense; each with ``base``."""
    before = endpoint.metrics()
    pool = ThreadPoolExecutor(concurrency)
    try:
        for at, case in zip(todo, pool.map(lambda at: asking.ask(endpoint, at), todo)):
            add({"part": "prompt", **base, "tokens": at[0], "prompt": at[1], **case})
    finally:
        # Who breaks off does not wait for prompts of minutes: they end with the server.
        pool.shutdown(wait=False, cancel_futures=True)
    after = endpoint.metrics()
    if PREFIX in before and PREFIX in after:  # it counts pairs
        now, then = parse(after), parse(before)
        dense = {reason: count for (path, reason), count in (now.rows - then.rows).items() if path == "dense"}
        figures = (now.pairs - then.pairs).figures
        add({"part": "density", **base, "tokens": None, "prompt": None, **figures, "dense_rows": dense})


def densities(cases: Sequence[Case]) -> dict[str, float | None]:
    """By label, of all runs that a file holds."""
    counted = [case for case in cases if case["part"] == "density"]
    labels = dict.fromkeys(case["label"] for case in counted)
    return {label: Pairs.of_cases(case for case in counted if case["label"] == label).density for label in labels}


def failures(cases: Sequence[Case]) -> list[str]:
    """A line for each failed request, and for each server of this backend that ran nothing sparse."""
    asked = [case for case in cases if case["part"] == "prompt"]
    lines = [
        f"failed, and not counted: {case['label']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}: "
        f"{case['error']}"
        for case in asked
        if case["error"]
    ]
    for label, density in densities(cases).items():
        if density is None:
            lines.append(f"{label}: no request ran sparse: {_why_dense([c for c in cases if c['label'] == label])}")
    return lines


def _why_dense(cases: Sequence[Case]) -> str:
    """What a server counted its rows as; where there were none, why there were none."""
    rows = sum((Counter(case["dense_rows"]) for case in cases if case["part"] == "density"), Counter[str]())
    if rows:
        explained = {one.value: one.explain for one in Fallback}
        return "; ".join(f"{explained.get(why, why)} (dense rows: {count:,})" for why, count in rows.items())
    failed = all(case["error"] for case in cases if case["part"] == "prompt")
    return "all of its requests failed" if failed else "the server's log says why"
