# SPDX-License-Identifier: Apache-2.0
"""An engine with several workers, and several engines behind the same address: answers and counts equal those of one
worker.

On a CPU, with gloo between the processes. Two workers add up heads in another order, which changes log-probabilities by
up to 1e-5; tokens are equal. Pipeline parallelism is missing, because the runner of vLLM's CPU build (0.32) has no
tensors to receive the first stage's output, and fails.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Answer, Servers
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport
from vllm_sparse_backend.evaluation.vllm_server import Server, has_cuda, sparse_args

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.skipif(has_cuda(), reason="two workers on one card: vLLM wants a card for each"),
]

ALL_LAYOUTS = bool(os.environ.get("ALL_LAYOUTS"))
"""Whether to test data parallelism: two engines and two API servers take three minutes to start on two cores."""
LOGPROB_TOLERANCE = 5e-5
LEVELS = ("exact", "high", "fast", "everything")


class Layout(NamedTuple):
    """The parallelism of a server."""

    args: tuple[str, ...]
    engines: int
    ranks: int
    """Workers of an engine."""


LAYOUTS = {
    "tensor parallel": Layout(("--tensor-parallel-size", "2"), engines=1, ranks=2),
    "data parallel": Layout(("--data-parallel-size", "2", "--api-server-count", "2"), engines=2, ranks=1),
}


class Divided(NamedTuple):
    """A server with several workers, its answers, and the counts during them."""

    layout: Layout
    server: Server
    answers: dict[str, Answer]
    report: MetricsReport


def ask_in_turn(server: Server) -> tuple[dict[str, Answer], MetricsReport]:
    """Return each level's answers to prompts of several chunks, and the counts. Requests run one at a time.

    No two prompts have a common beginning: an engine with a cached prefix prefills other chunks than an engine without
    it.
    """
    before = scenario.counted(server)
    answers = {
        f"{level}, {length} tokens": scenario.ask(server, scenario.prompt(length, seed=500 + seed), level=level)
        for seed, (length, level) in enumerate(itertools.product((63, 901, 1501), LEVELS))
    }
    return answers, scenario.counted(server, before)


@pytest.fixture(scope="module")
def single(servers: Servers) -> tuple[dict[str, Answer], MetricsReport]:
    """A server with a single worker."""
    return ask_in_turn(servers.ours)


@pytest.fixture(
    scope="module",
    params=[
        "tensor parallel",
        pytest.param("data parallel", marks=pytest.mark.skipif(not ALL_LAYOUTS, reason="ALL_LAYOUTS=1 runs it")),
    ],
)
def divided(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Divided]:
    layout = LAYOUTS[request.param]
    settings = server_levels.write(tmp_path_factory.mktemp("divided"), *server_levels.ALL)
    args = (*sparse_args(settings), *scenario.SERVER_ARGS, *layout.args)
    with Server(small_model, args) as server:
        yield Divided(layout, server, *ask_in_turn(server))


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in expected.items():
        assert answers[name].token_ids == answer.token_ids, name
        assert answers[name].logprobs == pytest.approx(answer.logprobs, abs=LOGPROB_TOLERANCE), name


def test_answers_of_every_level_are_those_of_one_worker(
    divided: Divided, single: tuple[dict[str, Answer], MetricsReport]
) -> None:
    assert_same(divided.answers, single[0])


def test_counts_are_those_of_one_worker(divided: Divided, single: tuple[dict[str, Answer], MetricsReport]) -> None:
    """Rows are counted once for any number of workers; pairs are summed over the heads and layers of all workers."""
    for name, labels in (
        ("rows", ("path", "reason", "level")),
        ("causal_pairs", ("layer", "level")),
    ):
        assert divided.report.by(name, *labels) == single[1].by(name, *labels), name
    kept, expected = (report.by("kept_pairs", "layer", "level") for report in (divided.report, single[1]))
    assert dict(kept) == pytest.approx(dict(expected), rel=1e-3)
