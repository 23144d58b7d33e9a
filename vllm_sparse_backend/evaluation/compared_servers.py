# SPDX-License-Identifier: Apache-2.0
"""Servers that get the same requests: started one after the other, or already running."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_sparse_backend.config.crossover_table import load_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import KEY
from vllm_sparse_backend.config.metrics import PREFIX
from vllm_sparse_backend.config.model_shape import ModelShape, name_of_path
from vllm_sparse_backend.config.profile import load_profile, name_of_profile
from vllm_sparse_backend.config.settings import load_config
from vllm_sparse_backend.evaluation.client import Endpoint
from vllm_sparse_backend.evaluation.report import BenchError, CaseReport, read_results
from vllm_sparse_backend.evaluation.vllm_server import Server, sparse_args
from vllm_sparse_backend.identity import digest
from vllm_sparse_backend.progress import Progress

STOCK = "stock"
"""Label of the server without this backend."""


@dataclass(frozen=True)
class Settings:
    """One configuration of this backend: the object under ``sparse_prefill``."""

    values: dict[str, Any]

    @staticmethod
    def parse(text: str, model: Path | None = None) -> "Settings":
        """Parse JSON, or the name or path of a profile, and check it against the model's folder if that is local.

        Raises BenchError for wrong settings. Otherwise a server would fail only after an hour of measuring other
        servers.
        """
        try:
            values = json.loads(text) if text.lstrip().startswith("{") else {"profile": text}
            config = load_config({KEY: values})
            load_crossover(config.crossover)
            if config.profile is not None:
                profile = load_profile(config.profile)
                if model is not None:
                    profile.check_model(ModelShape.from_folder(model), config.profile)
        except (ValueError, ConfigurationError) as error:
            raise BenchError(f"--settings {text!r}: {error}") from None
        return Settings(values)

    def __str__(self) -> str:
        if not self.values:
            return "no configuration"
        params = self.values.get("params") or {}
        profile = self.values.get("profile")
        name = f"profile {name_of_profile(profile)}" if profile else self.values.get("method") or "default"
        return " ".join([name, *(f"{field}={json.dumps(value)}" for field, value in params.items())])

    @property
    def identity(self) -> str:
        """The settings in full, with a hash of their profile, because a profile may be rebuilt under the same name."""
        text = json.dumps(self.values)
        if (profile := self.values.get("profile")) is None:
            return text
        return f"{text}, {digest(load_profile(profile).to_yaml())}"


@dataclass(frozen=True)
class Contestant:
    """A server, or one of its levels. ``open`` starts or finds the server; all levels of a server share ``open``."""

    label: str
    model: str
    """The model's name, without a folder's path."""
    what: str
    """Its full address or settings, which the label may abbreviate."""
    open: Callable[[], AbstractContextManager[Endpoint]]
    is_running: bool = False
    """Whether it is already running; otherwise ``open`` starts it."""
    level: float | str | None = None
    """The level of its requests; None for the server's default."""

    def at(self, levels: Sequence[float | str]) -> "list[Contestant]":
        """Return the server at each of these levels; the server itself if there are none."""
        at = [
            replace(self, label=f"{self.label} {level}", what=f"{self.what}, level {level}", level=level)
            for level in levels
        ]
        return at or [self]

    @staticmethod
    def running(url: str, levels: Sequence[float | str]) -> "list[Contestant]":
        """Connect to a running server, and return it at each of the levels if it runs this backend.

        Raises BenchError if no server answers at ``url``.
        """
        endpoint = Endpoint.connect(url, url)
        server = Contestant(
            endpoint.url, Path(endpoint.model).name, endpoint.url, lambda: nullcontext(endpoint), is_running=True
        )
        return server.at(levels) if PREFIX in endpoint.metrics() else [server]

    @staticmethod
    def served(label: str, model: Path, args: Sequence[str], what: str) -> "Contestant":
        @contextmanager
        def start() -> Iterator[Endpoint]:
            with Server(model, args) as server:
                yield Endpoint.connect(label, server.url)

        return Contestant(label, name_of_path(str(model)), what, start)


def once_each(contestants: Iterable[Contestant]) -> list[Contestant]:
    """Return each server, or level of a server, once. Several texts may name the same: URLs, numbers, JSON."""
    return list({contestant.label: contestant for contestant in contestants}.values())


def groups(contestants: Sequence[Contestant]) -> list[list[Contestant]]:
    """Return those that are open at the same time: all running servers, or one server that is started."""
    by_server = groupby(contestants, key=lambda contestant: contestant.is_running or contestant.open)
    return [list(group) for _, group in by_server]


@contextmanager
def opened(contestants: Sequence[Contestant], progress: Progress) -> Iterator[list[Endpoint]]:
    """Open all servers of a group at the same time, each only once. A start takes a minute."""
    first = contestants[0]
    if not first.is_running:
        progress.print(f"starting {'stock vLLM' if first.label == STOCK else f'sparse-prefill ({first.what})'}")
    with ExitStack() as stack:
        servers = {
            start: stack.enter_context(start())
            for start in dict.fromkeys(contestant.open for contestant in contestants)
        }
        yield [
            servers[contestant.open]
            if contestant.level is None
            else servers[contestant.open].at_level(contestant.level)
            for contestant in contestants
        ]


def split_server_args(text: str) -> tuple[str, ...]:
    """Split the value of --server-args as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BenchError(f"--server-args: given {text!r}, expected arguments in shell syntax: {error}") from None


def servers_to_start(
    model: Path, settings: Sequence[Settings], max_len: int, extra: str = "", levels: Sequence[float | str] = ()
) -> list[Contestant]:
    """Return stock vLLM and each setting at each level, for this process to start, for requests of ``max_len`` tokens.

    ``extra`` has further arguments for all servers.
    """
    args = ("--max-model-len", str(max_len), *split_server_args(extra))
    contestants = [Contestant.served(STOCK, model, args, STOCK)]
    names = [str(setting) for setting in settings]
    for name, setting in zip(names, settings):
        label = name if names.count(name) == 1 else json.dumps(setting.values)
        ours = Contestant.served(label, model, (*args, *sparse_args(setting.values)), setting.identity)
        contestants += ours.at(levels)
    return once_each(contestants)


def resume(report: CaseReport, options: Mapping[str, Any], contestants: Sequence[Contestant]) -> None:
    """Add the cases of an earlier run in the report's file, except those with failed requests.

    ``options`` are those of the requests. Raises BenchError if the file has another run's options.
    """
    servers = {f"server {contestant.label}": contestant.what for contestant in contestants}
    report.options = {**options, "model": contestants[0].model, "device": report.device, **servers}
    if report.json_path is not None and report.json_path.exists():
        results = read_results(report.json_path, report.options)
        report.options = {**results["options"], **report.options}
        report.cases.extend(case for case in results["cases"] if not case.get("error"))
