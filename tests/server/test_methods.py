# SPDX-License-Identifier: Apache-2.0
"""One server whose profile gives each head of a layer another method, against the same model run outside of vLLM.

The run outside shares methods, references and plan with the server, and nothing of the way from a profile's head to the
rows of an index: vLLM's batches and cache, the head groups, the index that layers share, what layers keep for later
ones. (What the methods should select, their own tests say.)
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.server import scenario
from vllm_sparse_backend.demo.model import CONFIG
from vllm_sparse_backend.measure.scrape import Report, parse
from vllm_sparse_backend.measure.server import Server, sparse_args
from vllm_sparse_backend.settings.config import AUTO, SparsePrefillConfig
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_backend.settings.profile import Profile
from vllm_sparse_kernels.methods import METHODS, sparse_names

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compares log-probabilities in float32; kernels round otherwise"
    ),
]
pytest.importorskip("vllm")

NUM_LAYERS = CONFIG["num_hidden_layers"]
MIN_TOKENS = 256  # fewer than a chunk's, so that every chunk is sparse, the first but for its first part
PROMPT = scenario.prompt(2001, seed=11)
TOGETHER = {f"{length} together": (scenario.prompt(length, seed=length), 8) for length in (300, 901, 1444)}

MEAN_TOLERANCE = 2e-3
"""Of a token's log-probability. Rounding makes 1e-6, and more where it tips what a threshold decides about one block;
one head that runs another method, or the same with another threshold, makes 1e-2."""


def spec(name: str, **params: Any) -> dict[str, Any]:
    return {"method": name, **METHODS[name].demo, **params}


def share(cluster: int) -> dict[str, Any]:
    # Rows of a pivot's map have a mass of 1 each: half of the whole is, to the last bit, where a few tiles are enough.
    return spec("share_prefill", cluster=cluster, gamma=0.47)


# Eight heads a layer. Clusters reach over layers, and over groups of heads that are no neighbours.
LAYERS: dict[int, dict[str, Any]] = {
    0: {"heads": dict(enumerate(share(0) if name == "share_prefill" else spec(name) for name in sparse_names()))},
    1: {
        "heads": {
            "0,5": spec("dense"),
            2: share(1),
            3: spec("sale", int8_scores=True),
            "1,4": share(0),
            6: spec("sparge_attn", skip_margin=-1.0),
        },
        "default": spec("anchor_attention"),
    },
    2: {"heads": {"2-3": share(1), 4: share(-1), 6: spec("anchor_attention", theta=4.0), 7: spec("dense")}},
    3: {"default": spec("vertical_slash")},
}
PROFILE = {"format": 1, "model": "any", "default": share(0), "layers": LAYERS}


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
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("profile") / "mixed.yaml"
    path.write_text(Profile.model_validate(PROFILE).to_yaml())
    return {"profile": str(path), "min_tokens": MIN_TOKENS, "min_query_tokens": 1}


@pytest.fixture(scope="module")
def served(small_model: Path, settings: dict[str, Any]) -> Served:
    # A guard that checks every step and trips in none changes nothing.
    more = {"check_index": True, "guard": {"rate": 1.0, "bound": 1e6}}
    with Server(small_model, (*sparse_args(settings | more), *scenario.SERVER_ARGS)) as server:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        choice = server.post("/v1/completions", body | {"prompt_logprobs": 0})["choices"][0]
        logprobs = [choice["prompt_logprobs"][i][str(token)]["logprob"] for i, token in enumerate(PROMPT) if i]
        repeated = scenario.ask(server, PROMPT)
        alone = report_of(server)
        together = scenario.ask_together(server, TOGETHER)
        return Served(logprobs, choice["token_ids"][0], repeated, alone, together, report_of(server))


def report_of(server: Server) -> Report:
    return parse(server.get("/metrics"))


@pytest.fixture(scope="module")
def planned(small_model: Path, settings: dict[str, Any], served: Served) -> Planned:
    return run_outside(small_model, SparsePrefillConfig(**settings), served.repeated.cached_tokens)


def run_outside(folder: Path, config: SparsePrefillConfig, cached_tokens: int) -> Planned:
    from tests.server import planned_model

    plan = Plan.build(config, ModelShape.from_folder(folder))
    min_tokens = 0 if config.min_tokens == AUTO else config.min_tokens
    request = planned_model.Request(planned_model.load(folder), plan, min_tokens)
    logprobs = request.prefill(PROMPT, scenario.CHUNK_TOKENS)
    request.keep(cached_tokens)
    repeated = request.prefill(PROMPT[cached_tokens:], scenario.CHUNK_TOKENS)[-1]
    own = logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).flatten()
    return Planned(own, int(logprobs[-1].argmax()), float(repeated.max()), dict(request.kept_pairs))


def test_the_profile_has_every_method_and_mixed_layers() -> None:
    profile = Profile.model_validate(PROFILE)
    layers = [profile.methods_of(layer, CONFIG["num_attention_heads"]) for layer in range(NUM_LAYERS)]
    assert {type(method) for layer in layers for method in layer} == {entry.parameters for entry in METHODS.values()}
    assert [len({type(method) for method in layer}) for layer in layers] == [8, 5, 3, 1]


def test_every_head_runs_its_own_method(served: Served, planned: Planned) -> None:
    """Every position of a prompt in chunks: as outside of vLLM, and not as with dense heads."""
    difference = (torch.tensor(served.prompt_logprobs) - planned.prompt_logprobs).abs()
    assert float(difference.mean()) <= MEAN_TOLERANCE
    assert served.next_token == planned.next_token


def test_the_tolerance_tells_methods_apart(small_model: Path, settings: dict[str, Any], planned: Planned) -> None:
    dense = run_outside(small_model, SparsePrefillConfig(method="dense"), 0)
    assert float((dense.prompt_logprobs - planned.prompt_logprobs).abs().mean()) > 20 * MEAN_TOLERANCE


def test_after_a_cached_prefix_too(served: Served, planned: Planned) -> None:
    """Only the tail is prefilled again, by heads whose "last queries" and pivots are now the tail's own."""
    assert served.repeated.cached_tokens > 1500
    assert served.repeated.logprobs[0] == pytest.approx(planned.repeated_logprob, abs=MEAN_TOLERANCE)


def test_metrics_say_what_was_kept(served: Served, planned: Planned) -> None:
    assert set(served.alone.layers) == set(range(NUM_LAYERS))
    for layer, counts in served.alone.layers.items():
        assert counts.kept_pairs == pytest.approx(planned.kept_pairs[layer], rel=1e-3)


def test_requests_in_one_batch_are_answered(served: Served) -> None:
    for name, answer in served.together.items():
        assert len(answer.token_ids) == 8, name
        assert all(math.isfinite(logprob) for logprob in answer.logprobs), name
    assert served.report.rows_of("sparse") > served.alone.rows_of("sparse") > 0


def test_every_layer_left_something_out(served: Served) -> None:
    assert served.report.problem() is None
