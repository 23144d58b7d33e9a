# SPDX-License-Identifier: Apache-2.0
"""An engine with two tensor-parallel workers: answers and counts equal those of one worker.

On a CPU, with gloo between the processes. Two workers add up heads in another order, which changes log-probabilities by
up to 1e-5; tokens are equal. Pipeline parallelism is missing, because the runner of vLLM's CPU build (0.32) has no
tensors to receive the first stage's output, and fails.
"""

import itertools
from pathlib import Path

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Answer, Servers
from tests.helpers.servers import Server
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport
from vllm_sparse_backend.evaluation.vllm_server import has_cuda, sparse_args

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.skipif(has_cuda(), reason="two workers on one card: vLLM wants a card for each"),
]

LOGPROB_TOLERANCE = 5e-5
LEVELS = ("exact", "high", "fast", "everything")


def ask_in_turn(server: Server) -> tuple[dict[str, Answer], MetricsReport]:
    """Return each level's answers to prompts of several chunks, and the counts. Requests run one at a time.

    No two prompts have a common beginning: an engine with a cached prefix prefills other chunks than an engine without
    it.
    """
    before = scenario.counted(server)
    answers = {
        f"{level}, {length} tokens": scenario.ask(server, scenario.prompt(length, seed=500 + seed), level=level)
        for seed, (length, level) in enumerate(itertools.product((63, 901), LEVELS))
    }
    return answers, scenario.counted(server, before)


def test_answers_and_counts_are_those_of_one_worker(servers: Servers, small_model: Path, tmp_path: Path) -> None:
    """Rows are counted once for any number of workers; pairs are summed over the heads of all workers."""
    settings = server_levels.write(tmp_path, *server_levels.ALL)
    args = (*sparse_args(settings), *scenario.SERVER_ARGS, "--tensor-parallel-size", "2")
    with Server(small_model, args) as server:
        answers, report = ask_in_turn(server)
    expected_answers, expected = ask_in_turn(servers.ours)
    for name, answer in expected_answers.items():
        assert answers[name].token_ids == answer.token_ids, name
        assert answers[name].logprobs == pytest.approx(answer.logprobs, abs=LOGPROB_TOLERANCE), name
    for name, labels in (("rows", ("path", "reason", "level")), ("causal_pairs", ("layer", "level"))):
        assert report.by(name, *labels) == expected.by(name, *labels), name
    kept = dict(report.by("kept_pairs", "layer", "level"))
    assert kept == pytest.approx(dict(expected.by("kept_pairs", "layer", "level")), rel=1e-3)
