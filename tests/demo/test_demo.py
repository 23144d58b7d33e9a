# SPDX-License-Identifier: Apache-2.0
"""The demo's last sentence, and the results with which it fails, without servers."""

from collections import Counter

import pytest

from vllm_sparse_backend.demo import run
from vllm_sparse_backend.evaluation.answer_scores import PromptScores
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport
from vllm_sparse_backend.evaluation.report import BenchError

SPARSE = MetricsReport(
    Counter(
        {
            ("rows", (("path", "sparse"), ("reason", ""))): 1,
            ("kept_pairs", (("layer", "0"),)): 25,
            ("causal_pairs", (("layer", "0"),)): 100,
        }
    )
)


def scores(ours: int) -> dict[str, PromptScores]:
    """Stock answers all questions, and the demo's server answers ``ours`` of them."""
    return {
        name: PromptScores(1.5, 0.0, 0, [[1 if i < right else 2] for i in range(run.FACTS)], {})
        for name, right in (("stock vLLM", run.FACTS), ("sparse-prefill", ours))
    }


def test_it_ends_with_what_was_shown() -> None:
    said = run.summary(scores(run.FACTS), SPARSE)
    assert said.count("24 of 24") == 2
    assert said.endswith(
        "Both servers answer all questions right. Past the first 1,024 tokens, sparse-prefill computed 25% of the "
        "(query, key) pairs. On a CPU, this is not faster than stock vLLM. README.md has the speed-ups on a GPU."
    )


def test_a_lost_answer_or_a_dense_prefill_fails() -> None:
    with pytest.raises(BenchError, match="An answer is wrong"):
        run.summary(scores(run.FACTS - 1), SPARSE)
    with pytest.raises(BenchError, match="no sparse prefill: density None"):
        run.summary(scores(run.FACTS), MetricsReport())
