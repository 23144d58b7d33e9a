"""Answers inside a prompt of 8,192 tokens: every method through a real server against stock, by the bundled model.

The model was trained to find facts again, and does with dense attention. So an answer that is wrong here was lost by
what a method left out, or by what this backend made of it.
"""

import json
from typing import Any

import pytest
import torch

from vllm_sparse_backend.bench.report import Report
from vllm_sparse_backend.bench.serve import Settings
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluate import asking
from vllm_sparse_backend.evaluate.answers import Templates
from vllm_sparse_kernels.select import METHODS

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not BUNDLED.exists(), reason=f"{BUNDLED} is not in this checkout: benchmarks/needle trains it"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="starts nine servers for what `sparse-prefill eval` measures"),
]
pytest.importorskip("vllm")

TOKENS, FACTS = 8192, 80
POINTS = 2
"""Answers in a hundred that a method may lose."""
MIN_TOKENS = {"min_tokens": 1024, "min_query_tokens": 1}
PARAMS: dict[str, dict[str, Any]] = {name: {} for name in METHODS if name != "dense"}
"""As they ship, but where this model or this length asks for something else."""
STARVED = {"method": "a_shape", "params": {"sink_tokens": 128, "local_tokens": 512}}


def settings_of(name: str) -> dict[str, Any]:
    return {"method": name, "params": PARAMS[name], **MIN_TOKENS}


def label_of(settings: dict[str, Any]) -> str:
    return str(Settings(settings))


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """By label: answers right of those asked, and the density, of one prompt."""
    chosen = [Settings.parse(json.dumps(one)) for one in (*map(settings_of, PARAMS), STARVED | MIN_TOKENS)]
    contestants = asking.started(BUNDLED, chosen, stock=True, longest=TOKENS, extra="")
    asked = asking.Asking.about(None, [TOKENS], 1, facts=FACTS, seed=0, first_token=None, templates=Templates())
    report = Report("answers", "CPU")
    asking.ask_all(contestants, asked, "", report, 1, lambda case: None)
    assert [case["error"] for case in report.cases if case["part"] == "prompt"] == [None] * len(contestants)
    return {row["label"]: row for row in asking.summaries(report.cases, [one.label for one in contestants], [TOKENS])}


def test_dense_attention_finds_the_facts(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["stock"]["asked"] == FACTS
    assert rows["stock"]["share"] >= 0.97


@pytest.mark.parametrize("name", PARAMS)
def test_a_method_answers_as_dense_attention_does(rows: dict[str, dict[str, Any]], name: str) -> None:
    row = rows[label_of(settings_of(name))]
    assert 100 * row["share"] >= 100 * rows["stock"]["share"] - POINTS
    assert 0 < row["density"] < 1


def test_a_starved_method_falls_below(rows: dict[str, dict[str, Any]]) -> None:
    """So the test above can fail."""
    assert 100 * rows[label_of(STARVED)]["share"] < 100 * rows["stock"]["share"] - 10 * POINTS
