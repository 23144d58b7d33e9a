# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM and this backend, served side by side on one card or already running, and asked the same."""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_sparse_backend.measure import latency, load
from vllm_sparse_backend.measure.endpoint import Endpoint, Prompts
from vllm_sparse_backend.measure.latency import Length
from vllm_sparse_backend.measure.pairs import Pairs
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.server import Server, ServerError, has_cuda, sparse_args
from vllm_sparse_backend.settings.auto import AUTO
from vllm_sparse_backend.settings.config import KEY, load_config
from vllm_sparse_backend.settings.crossover import load_crossover
from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.modelcheck import read_config
from vllm_sparse_backend.settings.profile import load_profile, name_of_profile

OnCase = Callable[[dict[str, Any]], None]

LENGTHS = (1024, 8192, 32768, 65536, 131072)
CHUNK_TOKENS = 8192
SPARE_TOKENS = 2048
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """One configuration of this backend: the object under ``sparse_prefill``."""

    values: Mapping[str, Any]
    name: str | None = None
    """In place of what the values say."""

    @staticmethod
    def parse(text: str, name: str | None = None, model: Path | None = None) -> "Settings":
        """From JSON, or the name or path of a profile; for a model, where its folder is here.

        Raises BenchError naming what is wrong: a server would find out when others have been asked for an hour.
        """
        try:
            values = _object_or_profile(text)
            config = load_config({KEY: values})
            load_crossover(config.crossover)
            if config.profile is not None and config.profile != AUTO:
                profile = load_profile(config.profile)
                if model is not None and model.is_dir():
                    profile.check_model(ModelShape.from_folder(model), config.profile)
        except (ValueError, ConfigurationError) as error:
            raise BenchError(f"--settings {text!r}: {error}") from None
        return Settings(values, name)

    def __str__(self) -> str:
        if self.name is not None:
            return self.name
        if not self.values:
            return "no configuration"
        params = self.values.get("params") or {}
        profile = self.values.get("profile")
        name = f"profile {name_of_profile(profile)}" if profile else str(self.values.get("method") or "default")
        guard = ["with guard"] if self.values.get("guard") is not None else []
        return " ".join([name, *(f"{field}={json.dumps(value)}" for field, value in params.items()), *guard])


def _object_or_profile(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        if text.lstrip().startswith("{"):
            raise
        return {"profile": text}
    if not isinstance(values, dict):
        raise ValueError(unexpected(values, "an object, or the name or path of a profile"))
    return values


@dataclass(frozen=True)
class Asking:
    """What is asked of each pair of servers."""

    lengths: tuple[Length, ...]
    output_tokens: int
    most_repeats: int
    mix: load.Mix | None
    rate: float | None
    """Requests a second of the mix; None for more than stock can take, from the times of the lengths."""
    text: str | None

    def __post_init__(self) -> None:
        if not self.lengths and self.mix is None:
            raise BenchError("nothing to ask: expected --lengths that fit the model, --cached, or a mixed load")
        open_loop = self.mix is not None and self.mix.clients is None
        if open_loop and self.rate is None and all(length.cached_tokens for length in self.lengths):
            raise BenchError("--rate: not given, expected it, --clients, or --lengths whose times it is made from")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its answer included."""
        prompts = [length.new_tokens + length.cached_tokens for length in self.lengths]
        if self.mix is not None:
            prompts += [*self.mix.short_lengths, *self.mix.long_lengths]
        return max(prompts) + self.output_tokens


def fitting(lengths: Sequence[int], model: Path, output_tokens: int) -> list[int]:
    """Those that the model has positions for."""
    most = max_positions(model)
    return [length for length in lengths if most is None or length + output_tokens <= most]


def max_positions(model: Path) -> int | None:
    """None where the model does not say."""
    if not model.exists():
        if str(model).startswith(("/", ".", "~")) or len(model.parts) > 2:
            raise BenchError(f"{model}: no such folder: expected a model's folder, or its name where vLLM finds it")
        return None  # a name that vLLM resolves
    try:
        config = read_config(model)
    except ConfigurationError as error:
        raise BenchError(str(error)) from None
    found = (config.get("text_config") or config).get("max_position_embeddings")
    return int(found) if found else None


def split_args(text: str) -> tuple[str, ...]:
    """What --server-args holds."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BenchError(f"--server-args: given {text!r}, expected arguments as a shell takes them: {error}") from None


def server_args(model: Path, longest: int, kv_tokens: int | None, extra: Sequence[str]) -> tuple[str, ...]:
    """Arguments of both servers; on a card, with as much cache as is asked for, so that two fit side by side."""
    if (most := max_positions(model)) is not None and longest > most:
        raise BenchError(f"{model} has {most:,} positions, and {longest:,} were asked for, answers included")
    args: tuple[str, ...] = ("--max-model-len", str(longest))
    if has_cuda():
        args += ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--gpu-memory-utilization", "0.3")
        args += ("--kv-cache-memory-bytes", str(kv_bytes(model, kv_tokens or longest + SPARE_TOKENS)))
    return (*args, *extra)


def kv_bytes(model: Path, tokens: int) -> int:
    """Of 16-bit keys and values of all layers."""
    try:
        shape = ModelShape.from_folder(model)
    except ConfigurationError as error:
        raise BenchError(f"{error}; a folder is needed to size the caches of two servers on one card") from None
    return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * tokens


def serve_and_compare(
    model: Path,
    settings: Sequence[Settings],
    levels: Sequence[int | str],
    args: Sequence[str],
    asking: Asking,
    report: Report,
    on_case: OnCase,
) -> None:
    """Start stock once and each configuration after the other beside it, and ask, at each level where some are named.

    Raises BenchError and ServerError.
    """
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        stock = Server(model, args)
        starting = pool.submit(stack.enter_context, stock)
        for one in settings:
            with _started(Server(model, (*args, *sparse_args(one.values))), starting.result) as ours:
                on_case({"started": str(one), "command": str(ours)})
                asked = of_levels(Endpoint.connect("ours", ours.url), _label(one, settings, levels), levels)
                compare(Endpoint.connect("stock", stock.url), asked, asking, report, on_case)


def serve_apart(
    model: Path,
    settings: Sequence[Settings],
    levels: Sequence[int | str],
    args: Sequence[str],
    asking: Asking,
    report: Report,
    on_case: OnCase,
) -> None:
    """The same where a card has no room for two: stock, then each configuration, alone. No mixed load.

    Raises BenchError and ServerError.
    """

    def ask(server: Endpoint, asked: Mapping[str, Endpoint]) -> dict[Length, list[latency.Taken]]:
        prompts = Prompts.of(server, asking.text)  # as the others get them
        answers = (asking.output_tokens, asking.most_repeats)
        return dict(latency.ask_in_turn(list(asked.values()), asking.lengths, prompts, *answers))

    with _started(Server(model, args), lambda: None) as server:
        stock = Endpoint.connect("stock", server.url)
        of_stock = ask(stock, {"stock": stock})
    for one in settings:
        with _started(Server(model, (*args, *sparse_args(one.values))), lambda: None) as server:
            on_case({"started": str(one), "command": str(server)})
            ours = Endpoint.connect("ours", server.url)
            asked = of_levels(ours, _label(one, settings, levels), levels)
            cases = []
            for length, taken in ask(ours, asked).items():
                by_label = dict(zip(asked, taken, strict=True))
                cases += latency.report_cases(length, of_stock[length][0], by_label, report, on_case)
            for label in asked:
                _add_density(label, [case for case in cases if case["label"] == label], report, on_case)


def _label(one: Settings, settings: Sequence[Settings], levels: Sequence[int | str]) -> str | None:
    """What levels of a configuration are labelled with besides: nothing where there is no other."""
    return None if levels and len(settings) == 1 and one.name is None else str(one)


@contextmanager
def _started(server: Server, others: Callable[[], object]) -> Iterator[Server]:
    """The server, once it and the others are up."""
    try:
        with server:
            others()
            yield server
    except ServerError as error:
        raise BenchError(str(error)) from error


def compare(stock: Endpoint, ours: Mapping[str, Endpoint], asking: Asking, report: Report, on_case: OnCase) -> None:
    """Latencies, then the mixed load, of stock and, by label, of each of ours."""
    prompts = Prompts.of(stock, asking.text)
    lengths, answers = asking.lengths, (asking.output_tokens, asking.most_repeats)
    cases = latency.compare(stock, ours, lengths, prompts, *answers, report, on_case)
    if asking.mix is not None:
        mix = asking.mix
        if asking.rate is None and mix.clients is None:
            mix = _saturating(mix, cases)
        cases += load.run_load(stock, ours, mix, prompts, report, on_case)
    for label in ours:
        _add_density(label, [case for case in cases if case["label"] == label], report, on_case)


def of_levels(server: Endpoint, label: str | None, levels: Sequence[int | str]) -> dict[str, Endpoint]:
    """The server at each level, labelled by it, or as it is where none is named. ``label`` goes before, if given."""
    if not levels:
        return {label or server.model: server}
    return {" ".join([*([label] if label else []), str(level)]): server.at_level(level) for level in levels}


def _saturating(mix: load.Mix, cases: Sequence[Mapping[str, Any]]) -> load.Mix:
    first_s = {c["new_tokens"]: c["stock_first_s"] for c in cases if c["stock_first_s"] and not c["cached_tokens"]}
    if not first_s:
        raise BenchError("--rate: not given, and no length was answered that it could be made from")
    lengths = [
        (share / len(of), tokens)
        for share, of in ((1 - mix.long_share, mix.short_lengths), (mix.long_share, mix.long_lengths))
        for tokens in of
    ]
    rate = load.saturating_rate(lengths, first_s)
    return load.Mix(**{**vars(mix), "rate": rate})


def _add_density(label: str, cases: Sequence[Mapping[str, Any]], report: Report, on_case: OnCase) -> None:
    """Of all sparse rows that were counted: a request of each length, and the mixed load."""
    counted = sum((Pairs(case["kept_pairs"], case["causal_pairs"]) for case in cases), Pairs())
    if (density := counted.density) is not None:
        report.add_figure(f"vllm serve, {label}: density of its sparse rows", density, "share", "lower")
    report.add_case(case := {"part": "density", "label": label, "density": density})
    on_case(case)


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None  # whoever connects says so


def device_name(*urls: str) -> str:
    """Of the machine that serves: its card, or its number of CPUs; of servers that run elsewhere, their addresses."""
    if any(_host(url) not in LOOPBACK for url in urls):
        return ", ".join(urls)
    if has_cuda():
        import torch

        return str(torch.cuda.get_device_name())
    return f"CPU, {os.cpu_count()} cores"
