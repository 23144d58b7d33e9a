# SPDX-License-Identifier: Apache-2.0
"""A mixed load of short and long prompts, in an open loop, or of so many clients in a closed one.

Open: they arrive as a Poisson process, whether the server keeps up or not. A request's first token is counted from when
it was to arrive, so that a client that starts late hides nothing. Closed: each client sends the next one as soon as its
last one is answered. Either way all servers get the same prompts in the same order, one server after the other.
Throughput is prompt and answer tokens of answered requests, over the time from the first arrival to the last answer; in
an open loop it compares where the load is more than stock can take.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_sparse_backend.measure.endpoint import Endpoint, Prompts, RequestError
from vllm_sparse_backend.measure.pairs import Pairs
from vllm_sparse_backend.measure.report import Report

COLUMNS = {
    "server": "server",
    "answered": "answered",
    "failures": "failed",
    "tokens_per_s": "tokens/s",
    "short_p50_s": "short: first token p50, s",
    "short_p99_s": "p99",
    "long_p50_s": "long: p50, s",
    "long_p99_s": "p99",
    "span_s": "took, s",
    "density": "density",
}


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    is_long: bool


@dataclass(frozen=True)
class Mix:
    """What arrives: ``rate`` requests a second on average, of which ``long_share`` are long."""

    num_requests: int
    rate: float
    short_lengths: tuple[int, ...]
    long_lengths: tuple[int, ...]
    long_share: float = 0.25
    output_tokens: int = 64
    seed: int = 0
    clients: int | None = None
    """So many, in a closed loop, where ``rate`` says nothing; None for an open one."""

    def __str__(self) -> str:
        return "mixed load" if self.clients is None else f"mixed load of {self.clients} clients"

    def arrivals(self) -> list[Arrival]:
        """The same for the same seed. At least one is long and one short, where there are two."""
        chosen, now, found = random.Random(self.seed), 0.0, []
        num_long = min(max(1, round(self.num_requests * self.long_share)), max(1, self.num_requests - 1))
        is_long = [True] * num_long + [False] * (self.num_requests - num_long)
        chosen.shuffle(is_long)
        for long in is_long:
            length = chosen.choice(self.long_lengths if long else self.short_lengths)
            found.append(Arrival(now, length, self.output_tokens, long))
            now += chosen.expovariate(self.rate)
        return found


@dataclass(frozen=True)
class Served:
    """One request: seconds since the first arrival; ``error`` instead of times where it failed."""

    arrival: Arrival
    first_token_s: float | None
    """After it was to arrive."""
    done_at_s: float
    error: str | None = None


def play(server: Endpoint, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]) -> list[Served]:
    """Send each request when it is due, a thread each, and wait for all."""
    served: list[Served | None] = [None] * len(arrivals)
    began = time.perf_counter()

    def one(i: int) -> None:
        served[i] = _serve(server, arrivals[i], prompts[i], began)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(arrivals))]
    for arrival, thread in zip(arrivals, threads, strict=True):
        time.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
        thread.start()
    for thread in threads:
        thread.join()
    return [one for one in served if one is not None]


def play_closed(
    server: Endpoint, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]], clients: int
) -> list[Served]:
    """Let so many clients take one request after the other, each when its last one is answered, whenever due."""
    served: list[Served | None] = [None] * len(arrivals)
    began, numbers = time.perf_counter(), iter(range(len(arrivals)))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            arrival = replace(arrivals[i], at_s=time.perf_counter() - began)
            served[i] = _serve(server, arrival, prompts[i], began)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [one for one in served if one is not None]


def _serve(server: Endpoint, arrival: Arrival, prompt: Sequence[int], began: float) -> Served:
    sent = time.perf_counter() - began
    try:
        answer = server.ask(prompt, arrival.output_tokens)
    except RequestError as error:
        return Served(arrival, None, time.perf_counter() - began, str(error))
    return Served(arrival, sent - arrival.at_s + answer.first_token_s, time.perf_counter() - began)


def quantile(values: Sequence[float], q: float) -> float | None:
    """With linear interpolation between the two nearest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(server: str, label: str, served: Sequence[Served]) -> dict[str, Any]:
    """Of answered requests alone; failed ones are counted beside them."""
    answered = [one for one in served if one.first_token_s is not None]
    failed = [one for one in served if one.error is not None]
    span = max((one.done_at_s for one in answered), default=0.0)
    tokens = sum(one.arrival.prompt_tokens + one.arrival.output_tokens for one in answered)
    case: dict[str, Any] = {
        "part": "load", "label": label, "server": server, "answered": len(answered), "failures": len(failed),
        "said": [one.error for one in failed][:10], "span_s": span, "tokens_per_s": tokens / span if span else None,
    }  # fmt: skip
    for name, is_long in (("short", False), ("long", True)):
        firsts = [one.first_token_s for one in answered if one.arrival.is_long == is_long and one.first_token_s]
        case |= {f"{name}_p50_s": quantile(firsts, 0.5), f"{name}_p99_s": quantile(firsts, 0.99)}
    case["requests"] = [
        {"at_s": one.arrival.at_s, "prompt_tokens": one.arrival.prompt_tokens, "first_token_s": one.first_token_s}
        for one in served
    ]
    return case


def saturating_rate(mix_lengths: Sequence[tuple[float, int]], first_s: dict[int, float], factor: float = 1.3) -> float:
    """Requests a second that are ``factor`` times what a server can take that needs ``first_s[tokens]`` for each.

    ``mix_lengths`` are (share, tokens); a length that was not measured counts as the next longer one, or, past them,
    in proportion.
    """
    measured = sorted(first_s)
    busy = 0.0
    for share, tokens in mix_lengths:
        near = next((n for n in measured if n >= tokens), measured[-1])
        busy += share * first_s[near] * max(1.0, tokens / near)
    return factor / busy


def run_load(
    stock: Endpoint,
    ours: Mapping[str, Endpoint],
    mix: Mix,
    prompts: Prompts,
    report: Report,
    on_case: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Play the load to stock and then, by label, to each other; ratios only where no request of the two failed."""
    arrivals = mix.arrivals()
    texts = [prompts.take(arrival.prompt_tokens) for arrival in arrivals]

    def case_of(server: Endpoint, label: str) -> dict[str, Any]:
        before = Pairs.of(server)
        if mix.clients is None:
            served = play(server, arrivals, texts)
        else:
            served = play_closed(server, arrivals, texts, mix.clients)
        counted = Pairs.of(server) - before
        how = {"rate": mix.rate} if mix.clients is None else {"clients": mix.clients}
        pairs = {"density": counted.density, "kept_pairs": counted.kept, "causal_pairs": counted.causal}
        return summary(server.name, label, served) | how | pairs

    of_stock = case_of(stock, "")
    cases = []
    for label, server in ours.items():
        pair = [of_stock | {"label": label}, case_of(server, label)]
        for case in pair:
            report.add_case(case)
            on_case(case)
        cases += pair
        _add_figures(report, f"vllm serve, {label}, {mix}", *pair)
    return cases


def _add_figures(report: Report, about: str, stock: dict[str, Any], ours: dict[str, Any]) -> None:
    if stock["failures"] or ours["failures"]:
        return
    for key, what in (("short_p99_s", "p99"), ("short_p50_s", "p50")):
        if stock[key] and ours[key]:
            name = f"{about}: {what} of short requests' first token, times sooner"
            report.add_figure(name, stock[key] / ours[key], "ratio", "higher")
    if stock["tokens_per_s"] and ours["tokens_per_s"]:
        ratio = ours["tokens_per_s"] / stock["tokens_per_s"]
        report.add_figure(f"{about}: throughput, times stock's", ratio, "ratio", "higher")
    if ours["density"] is not None:
        report.add_figure(f"{about}: density of its sparse rows", ours["density"], "share", "lower")
