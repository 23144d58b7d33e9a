# SPDX-License-Identifier: Apache-2.0
"""A level that gives each head of a layer another method, against the same model run outside of vLLM.

The run outside shares methods, references and plan with the server, and nothing of the way from a profile's head to the
rows of an index: vLLM's batches and cache, the head groups, the index that layers share, what layers keep for later
ones. (What the methods should select, their own tests say.)
"""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benchmarks.tiny import CONFIG
from tests.server import levels, scenario
from tests.server.scenario import Servers
from vllm_sparse_backend.measure.scrape import Report
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_backend.settings.profile import Profile
from vllm_sparse_kernels.methods import METHODS

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compares log-probabilities in float32; kernels round otherwise"
    ),
]

NUM_LAYERS = CONFIG["num_hidden_layers"]
LEVEL = {"vllm_xargs": {"sparse_prefill": "mixed"}}
PROMPT = scenario.prompt(2001, seed=11)
TOGETHER = {
    f"{length} together": (scenario.prompt(length, seed=200 + length), 8, "mixed") for length in (300, 901, 1444)
}

MEAN_TOLERANCE = 2e-3
"""Of a token's log-probability. Rounding makes 1e-6, and more where it tips what a threshold decides about one block;
one head that runs another method, or the same with another threshold, makes 1e-2."""


class Served(NamedTuple):
    prompt_logprobs: list[float]  # of each token of the prompt but the first
    next_token: int
    repeated: scenario.Answer
    alone: Report
    together: dict[str, scenario.Answer]
    report: Report


class Planned(NamedTuple):
    """The same outside of vLLM, as long as a request is alone: then its chunks are known."""

    prompt_logprobs: torch.Tensor
    next_token: int
    repeated_logprob: float
    kept_pairs: dict[int, int]


@pytest.fixture(scope="module")
def served(servers: Servers) -> Served:
    """By a server whose guard checks every step and trips in none, which changes nothing."""
    server, before = servers.ours, scenario.counted(servers.ours)
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    choice = server.post("/v1/completions", body | LEVEL | {"prompt_logprobs": 0})["choices"][0]
    logprobs = [choice["prompt_logprobs"][i][str(token)]["logprob"] for i, token in enumerate(PROMPT) if i]
    repeated = scenario.ask(server, PROMPT, level="mixed")
    alone = scenario.counted(server, before)
    together = scenario.ask_together(server, TOGETHER)
    return Served(logprobs, choice["token_ids"][0], repeated, alone, together, scenario.counted(server, before))


@pytest.fixture(scope="module")
def planned(small_model: Path, tmp_path_factory: pytest.TempPathFactory, served: Served) -> Planned:
    settings = levels.write(tmp_path_factory.mktemp("profile"), "mixed")
    return run_outside(small_model, SparsePrefillConfig(**settings), levels.MIN_TOKENS, served.repeated.cached_tokens)


def run_outside(folder: Path, config: SparsePrefillConfig, min_tokens: int, cached_tokens: int) -> Planned:
    from tests.server import planned_model

    plan = Plan.build(config, ModelShape.from_folder(folder))
    request = planned_model.Request(planned_model.load(folder), plan, min_tokens)
    logprobs = request.prefill(PROMPT, scenario.CHUNK_TOKENS)
    request.keep(cached_tokens)
    repeated = request.prefill(PROMPT[cached_tokens:], scenario.CHUNK_TOKENS)[-1]
    own = logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).flatten()
    return Planned(own, int(logprobs[-1].argmax()), float(repeated.max()), dict(request.kept_pairs))


def test_the_level_has_every_method_and_mixed_layers() -> None:
    profile = Profile.model_validate({"format": 1, "model": "any", **levels.MIXED})
    layers = [profile.methods_of(layer, CONFIG["num_attention_heads"]) for layer in range(NUM_LAYERS)]
    assert {type(method) for layer in layers for method in layer} == {entry.parameters for entry in METHODS.values()}
    last = {one["method"] for one in levels.BESIDE[3]} | {"vertical_slash"}
    assert [len({type(method) for method in layer}) for layer in layers] == [len(levels.BESIDE[0]), 5, 3, len(last)]


def test_every_head_runs_its_own_method(served: Served, planned: Planned, small_model: Path) -> None:
    """Every position of a prompt in chunks: as outside of vLLM, and not as with dense heads."""
    difference = (torch.tensor(served.prompt_logprobs) - planned.prompt_logprobs).abs()
    assert float(difference.mean()) <= MEAN_TOLERANCE
    assert served.next_token == planned.next_token
    dense = run_outside(small_model, SparsePrefillConfig(method="dense"), 0, 0)
    assert float((dense.prompt_logprobs - planned.prompt_logprobs).abs().mean()) > 20 * MEAN_TOLERANCE


def test_after_a_cached_prefix_too(served: Served, planned: Planned) -> None:
    """Only the tail is prefilled again, by heads whose "last queries" and pivots are now the tail's own."""
    assert served.repeated.cached_tokens > 1500
    assert served.repeated.logprobs[0] == pytest.approx(planned.repeated_logprob, abs=MEAN_TOLERANCE)


def test_metrics_say_what_was_kept(served: Served, planned: Planned) -> None:
    assert set(served.alone.layers) == set(range(NUM_LAYERS))
    for layer, counts in served.alone.layers.items():
        assert counts.kept_pairs == pytest.approx(planned.kept_pairs[layer], rel=1e-3)
    assert served.report.problem() is None


def test_requests_in_one_batch_are_answered(served: Served) -> None:
    for name, answer in served.together.items():
        assert len(answer.token_ids) == 8, name
        assert all(math.isfinite(logprob) for logprob in answer.logprobs), name
    assert served.report.rows_of("sparse") > served.alone.rows_of("sparse") > 0
