# SPDX-License-Identifier: Apache-2.0
"""Requests for one server after another, whose tokens and log-probabilities can be compared.

Prompts are token ids drawn with a fixed seed. Their lengths do not align with chunks (512), pages or tiles.
"""

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from tests.helpers.server_levels import MIN_TOKENS
from tests.helpers.servers import Server
from tests.helpers.tiny_models import CONFIG, VOCAB_SIZE
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.metrics import FRESH_METRICS_PATH
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, Pairs, parse_metrics

DEADLINE_S = 300.0
"""Seconds after which tests no longer wait for a server, on a machine of any load."""
CHUNK_TOKENS = 512
SERVER_ARGS = (
    *("--max-model-len", "8192", "--enable-prompt-tokens-details"),
    *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
)
CONCURRENT_LENGTHS = (1, 63, 300, 777, 1000, 1301)
PAGE_TOKENS = 128


def overcommit_args() -> tuple[str, ...]:
    """Return arguments with which requests start without room for all of their prompts, and preempt each other.

    Otherwise the number of preemptions depends on when requests arrive. Some releases of vLLM have no such argument.
    """
    from vllm.config import SchedulerConfig

    has_argument = "scheduler_reserve_full_isl" in SchedulerConfig.__dataclass_fields__
    return ("--no-scheduler-reserve-full-isl",) if has_argument else ()


class Servers(NamedTuple):
    stock: Server
    ours: Server
    """The server with every level of ``levels``; its default level is ``high``."""
    untouched: MetricsReport
    """Our server's counters before any test sent requests."""


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


def fresh_page(server: Server) -> str:
    """Return a page of /metrics with counts that all engines gave after the call.

    An engine on a busy machine may be late: a page then has its earlier counts, and ``up`` 0, so it is read again.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        page = server.get(FRESH_METRICS_PATH)
        if all(parse_metrics(page).by("up", "engine").values()):
            return page
        assert time.monotonic() < deadline, f"an engine gave no counts within {DEADLINE_S:.0f} s"
        time.sleep(0.5)


def layers_of(report: MetricsReport) -> dict[int, Pairs]:
    """Return the pairs of each layer."""
    kept, causal = report.by("kept_pairs", "layer"), report.by("causal_pairs", "layer")
    return {int(layer): Pairs(kept[layer], causal[layer]) for layer in causal}


def counted(server: Server, before: MetricsReport | None = None) -> MetricsReport:
    """Return the counters of rows and layers on /metrics, minus those in ``before``."""
    report = parse_metrics(fresh_page(server))
    return report if before is None else report - before


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [0, *(generator.randrange(2, VOCAB_SIZE) for _ in range(length - 1))]


CHUNKS = prompt(1501, seed=1)
CACHED = {
    f"prefix: {name}": n // PAGE_TOKENS * PAGE_TOKENS for name, n in (("same prompt", 1501), ("other tail", 1000))
}
"""Tokens of these prompts that are found in the cache by requests that may read the blocks of earlier requests."""


def tail_changed(token_ids: list[int]) -> list[int]:
    half = len(token_ids) // 2
    return token_ids[: len(token_ids) - half] + prompt(half + 1, seed=half)[1:]


def ask(server: Server, token_ids: list[int], max_tokens: int = 8, level: object = None, **more: Any) -> Answer:
    body: dict[str, Any] = {"model": server.model, "prompt": token_ids, "max_tokens": max_tokens, "logprobs": 0}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    if level is not None:
        body["vllm_xargs"] = {"sparse_prefill": level}
    answer = server.post("/v1/completions", body)
    choice, details = answer["choices"][0], answer["usage"]["prompt_tokens_details"] or {}
    assert len(choice["token_ids"]) == max_tokens
    logprobs = choice["logprobs"]["token_logprobs"]
    return Answer(tuple(choice["token_ids"]), tuple(logprobs), details.get("cached_tokens") or 0)


def assert_same(answer: Answer, expected: Answer, tolerance: float = 2e-5) -> None:
    """Stock vLLM differs from itself by up to 2.4e-6 if the same prompts are batched differently."""
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=tolerance)


def assert_counts(server: Server, seed: int) -> None:
    """Send known requests one at a time. Their counts must be those that follow from chunks and the causal mask."""
    short, long = prompt(90, seed), prompt(1301, seed)
    for token_ids, level, kind, num_rows, first_sparse in (
        (short, "high", ("dense", Fallback.TOO_SHORT.value), 1, 90),
        (long, "exact", ("dense", Fallback.REQUESTED.value), 3, 1301),
        (long, "high", ("sparse", ""), 3, MIN_TOKENS),
        (long, "high", ("sparse", ""), 1, 1280),  # all full blocks are cached
    ):
        before = counted(server)
        ask(server, token_ids, level=level)
        report = counted(server, before)
        assert report.rows == {kind: num_rows, ("decode", ""): 7}
        queries = range(first_sparse, len(token_ids))
        causal = CONFIG["num_attention_heads"] * sum(position + 1 for position in queries)
        expected = dict.fromkeys(range(CONFIG["num_hidden_layers"]), causal)
        assert {layer: pairs.causal for layer, pairs in layers_of(report).items()} == (expected if queries else {})


def ask_together(server: Server, requests: Mapping[str, tuple[Any, ...]]) -> dict[str, Answer]:
    """Send all requests at once: (prompt, max_tokens, optional level) by name. Return the answers by name."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return dict(zip(requests, pool.map(lambda request: ask(server, *request), requests.values()), strict=True))


def run(server: Server, level: object = None, beside: object = None) -> dict[str, Answer]:
    """Return answers by name, in an order in which the prefix cache has hits where the names say so.

    ``level`` is the level of the requests. ``beside`` is the level of further requests with the same beginnings, sent
    together with the concurrent requests.
    """
    shared = prompt(1000, seed=2)
    alone = {
        "chunks": CHUNKS,
        "prefix: same prompt": CHUNKS,
        "prefix: first tail": shared + prompt(401, seed=3)[1:],
        "prefix: other tail": shared + prompt(634, seed=4)[1:],
    }
    # The first request decodes long enough to share steps with the chunks of the others.
    mixed = {
        "mixed: decode": (prompt(70, seed=5), 64),
        "mixed: prefill 901": (prompt(901, seed=6), 8),
        "mixed: prefill 701": (prompt(701, seed=7), 8),
    }
    concurrent = {f"concurrent: {length}": (prompt(length, seed=100 + length), 8) for length in CONCURRENT_LENGTHS}
    answers = {name: ask(server, token_ids, level=level) for name, token_ids in alone.items()}
    for group in (mixed, concurrent):
        requests = {name: (*request, level) for name, request in group.items()}
        copies = {f"beside {name}": (tail_changed(ids), n, beside) for name, (ids, n) in group.items()}
        answers |= ask_together(server, requests if beside is None else requests | copies)
    return answers
