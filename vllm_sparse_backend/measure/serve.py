# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM and this backend, served side by side on one card or already running, and asked the same."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_sparse_backend.measure.client import Endpoint, Prompts
from vllm_sparse_backend.measure.latency import Length, Taken, ask_in_turn, report_cases
from vllm_sparse_backend.measure.load import Mix, require_pandas, run_load
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.scrape import Pairs
from vllm_sparse_backend.measure.server import Server, Settings, max_positions, sparse_args

LENGTHS = (1024, 8192, 32768, 65536, 131072)
REQUESTS = 48
"""Of the mixed load, by default."""
LONG_TOKENS = 32768
"""Those of its long prompts at least, by default."""


@dataclass(frozen=True)
class Asking:
    """What is asked of each pair of servers."""

    lengths: tuple[Length, ...]
    output_tokens: int
    most_repeats: int
    mix: Mix | None
    text: str | None

    def __post_init__(self) -> None:
        if not self.lengths and self.mix is None:
            raise BenchError("nothing to ask: expected --lengths that fit the model, --cached, or a mixed load")
        open_loop = self.mix is not None and self.mix.clients is None and self.mix.rate is None
        if open_loop and all(length.cached_tokens for length in self.lengths):
            raise BenchError("--rate: not given, expected it, --clients, or --lengths whose times it is made from")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its answer included."""
        prompts = [length.new_tokens + length.cached_tokens for length in self.lengths]
        if self.mix is not None:
            prompts += [*self.mix.short_lengths, *self.mix.long_lengths]
        return max(prompts) + self.output_tokens

    def in_turn(self, servers: Sequence[Endpoint], prompts: Prompts) -> Iterator[tuple[Length, list[Taken]]]:
        return ask_in_turn(servers, self.lengths, prompts, self.output_tokens, self.most_repeats)


def fitting(model: Path | None, output_tokens: int) -> list[int]:
    """Of the usual lengths those that the model has positions for."""
    most = None if model is None else max_positions(model)
    return [length for length in LENGTHS if most is None or length + output_tokens <= most]


def mix_of(
    requests: int | None,
    rate: float | None,
    clients: int | None,
    shorts: Sequence[int],
    longs: Sequence[int],
    output_tokens: int,
) -> tuple[Mix | None, str]:
    """The mixed load, if any, and why there is none. Raises BenchError where it was asked for, and cannot be."""
    if rate is not None and not rate > 0:
        raise BenchError(f"--rate: given {rate:g}, expected a number above 0")
    if rate is not None and clients is not None:
        raise BenchError("--rate, --clients: given both, expected one: clients ask when their last request is answered")
    if requests == 0:
        if rate is not None or clients is not None:
            raise BenchError("--rate, --clients: given with --requests 0, expected a mixed load to send so")
        return None, ""
    if not longs:
        why = f"the model has no positions for a prompt of {LONG_TOKENS:,} tokens and its answer"
        asked_for = {"--requests": requests, "--rate": rate, "--clients": clients}
        if given := [f"{name} {value}" for name, value in asked_for.items() if value is not None]:
            raise BenchError(f"{', '.join(given)}: {why}, expected --long with lengths that it has them for")
        return None, f"No mixed load: {why}; --long says how long else its long prompts are"
    require_pandas()
    mix = Mix(requests or REQUESTS, rate, tuple(shorts), tuple(longs), output_tokens=output_tokens, clients=clients)
    return mix, ""


@dataclass(frozen=True)
class Servers:
    """Stock's and those of each configuration, to be started: asked at each level where some are named."""

    model: Path
    settings: Sequence[Settings]
    levels: Sequence[int | str]
    args: Sequence[str]

    def side_by_side(self, asking: Asking, report: Report) -> None:
        """Stock once, and each configuration after the other beside it."""
        with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
            starting = pool.submit(stack.enter_context, self.started(None, report))
            for one in self.settings:
                with self.started(one, report) as ours:
                    compare(starting.result(), self.asked(ours, one), asking, report)

    def apart(self, asking: Asking, report: Report) -> None:
        """The same where a card has no room for two: each alone. No mixed load."""

        def ask(servers: Sequence[Endpoint]) -> dict[Length, list[Taken]]:
            return dict(asking.in_turn(servers, Prompts.of(servers[0], asking.text)))  # prompts as the others get them

        with self.started(None, report) as stock:
            of_stock = ask([stock])
        for one in self.settings:
            with self.started(one, report) as ours:
                asked, cases = self.asked(ours, one), []
                for length, taken in ask([*asked.values()]).items():
                    by_label = dict(zip(asked, taken, strict=True))
                    cases += report_cases(length, of_stock[length][0], by_label, report)
                _add_densities(asked, cases, report)

    def asked(self, server: Endpoint, one: Settings) -> dict[str, Endpoint]:
        """By label, in which levels stand alone where there is no other configuration."""
        alone = self.levels and len(self.settings) == 1 and one.name is None
        return of_levels(server, None if alone else str(one), self.levels)

    @contextmanager
    def started(self, one: Settings | None, report: Report) -> Iterator[Endpoint]:
        """Stock's server, or one of ours. Raises BenchError, or ServerError."""
        with Server(self.model, self.args if one is None else (*self.args, *sparse_args(one.values))) as server:
            if one is not None:
                report.on_case({"started": str(one), "command": str(server)})
            yield Endpoint.connect("stock" if one is None else "ours", server.url)


def compare(stock: Endpoint, ours: Mapping[str, Endpoint], asking: Asking, report: Report) -> None:
    """Latencies, then the mixed load, of stock and, by label, of each of ours."""
    prompts = Prompts.of(stock, asking.text)
    cases: list[dict[str, Any]] = []
    for length, (of_stock, *of_ours) in asking.in_turn([stock, *ours.values()], prompts):
        cases += report_cases(length, of_stock, dict(zip(ours, of_ours, strict=True)), report)
    if (mix := asking.mix) is not None:
        if mix.rate is None and mix.clients is None:
            mix = mix.saturating(
                {c["new_tokens"]: c["stock_first_s"] for c in cases if c["stock_first_s"] and not c["cached_tokens"]}
            )
        cases += run_load(stock, ours, mix, prompts, report)
    _add_densities(ours, cases, report)


def of_levels(server: Endpoint, label: str | None, levels: Sequence[int | str]) -> dict[str, Endpoint]:
    """The server at each level, labelled by it, or as it is where none is named. ``label`` goes before, if given."""
    if not levels:
        return {label or server.model: server}
    return {" ".join([*([label] if label else []), str(level)]): server.at_level(level) for level in levels}


def _add_densities(labels: Iterable[str], cases: Sequence[Mapping[str, Any]], report: Report) -> None:
    """Of all sparse rows that were counted: a request of each length, and the mixed load."""
    for label in labels:
        density = Pairs.of_cases(case for case in cases if case["label"] == label).density
        report.add_case({"part": "density", "label": label, "density": density})
