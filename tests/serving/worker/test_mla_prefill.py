# SPDX-License-Identifier: Apache-2.0
"""The prefill backend for multi-head latent attention in vLLM's own layers: which rows run sparse, in which call."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="needs a vLLM with MLA on a CPU")

from vllm.config import set_current_vllm_config

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers import mla_layers
from tests.helpers.tiny_models import MLA_CONFIG
from tests.helpers.vllm_objects import make_model
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.mla import describe
from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import compile_monitor
from vllm_sparse_backend.serving.worker.rows import Requests
from vllm_sparse_kernels.mla import MlaPrefill

MIN_TOKENS = 80
SINK, LOCAL = 24, 50
A_SHAPE = {"method": "a_shape", "params": {"sink_tokens": SINK, "local_tokens": LOCAL}, "min_query_tokens": 1}
CHUNK_TOKENS = 64

# Rows of (context, new tokens): beginning within min_tokens, with and without context, and after it, with context of
# more than a chunk.
MIXED = [(0, 150), (0, 30), (96, 70), (16, 8), (80, 60), (200, 45)]


@pytest.fixture
def make_layers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function: settings → two layers that share a builder, with chunks of 64 tokens."""
    monkeypatch.setattr(
        mla_layers.MLACommonMetadataBuilder,
        "determine_chunked_prefill_workspace_size",
        staticmethod(lambda _: CHUNK_TOKENS),
    )
    monkeypatch.setattr(compat, "is_stock_mla_layer", lambda layer: True)
    model = make_model(tmp_path / "model", **MLA_CONFIG)

    def make(settings: Any = None, **options: Any) -> Any:
        config = mla_layers.make_mla_config(model, A_SHAPE | {"min_tokens": MIN_TOKENS} | (settings or {}))
        return mla_layers.MlaLayers(config, **options)

    return make


def a_shape_past(min_tokens: int, dense_rows: tuple[int, ...] = ()) -> Callable[..., torch.Tensor]:
    """A-shape for rows that begin at ``min_tokens`` or later, except in ``dense_rows``."""

    def keeps(row: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        kept = (keys < SINK) | (keys > queries - LOCAL)
        return kept | bool(queries[0] < min_tokens) | (row in dense_rows)

    return keeps


def kept_pairs(step: Any, keeps: Callable[..., torch.Tensor], min_tokens: int, rows: range | list[int]) -> int:
    total = 0
    for row in rows:
        context, length = step.lengths[row]
        queries = torch.arange(max(context, min_tokens), context + length)[:, None]
        keys = torch.arange(context + length)
        total += int((keeps(row, queries, keys) & (keys <= queries)).sum())
    return total * mla_layers.HEADS


@pytest.mark.parametrize("lengths", [MIXED, MIXED[::-1], [(80, 150)], [(200, 45)], [(80, 2), (79, 2), (0, 81)]])
def test_each_query_attends_to_what_its_position_says(make_layers: Any, lengths: Any) -> None:
    """A-shape keeps absolute positions, so chunks do not show in the output."""
    layers = make_layers()
    step = layers.make_step(lengths)
    torch.testing.assert_close(layers.run(step), layers.expected(step, a_shape_past(MIN_TOKENS)), atol=2e-5, rtol=1e-4)


def test_decodes_come_before_the_rows_that_prefill(make_layers: Any) -> None:
    layers = make_layers()
    step = layers.make_step([(63, 1), (90, 1), (0, 30), (96, 70)])
    output, expected = layers.run(step), layers.expected(step, a_shape_past(MIN_TOKENS))
    assert output[:2].isnan().all()
    torch.testing.assert_close(output[2:], expected[2:], atol=2e-5, rtol=1e-4)


def test_steps_without_sparse_rows_are_bit_for_bit_stock_s(make_layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_layers({"min_tokens": 1000})
    step = layers.make_step(MIXED)
    ours = layers.run(step)
    monkeypatch.setattr(layers.builder, "_prefill_backend", layers.builder._prefill_backend.stock)
    assert torch.equal(ours, layers.run(step))


def test_exact_requests_next_to_sparse_ones(make_layers: Any, at_step: Any) -> None:
    layers = make_layers()
    step = layers.make_step(MIXED)
    at_step(["exact" if row % 2 == 0 else "on" for row in range(len(MIXED))])
    expected = layers.expected(step, a_shape_past(MIN_TOKENS, dense_rows=(0, 2, 4)))
    torch.testing.assert_close(layers.run(step), expected, atol=2e-5, rtol=1e-4)


def test_requests_with_a_p_of_their_own(make_layers: Any, at_step: Any) -> None:
    layers = make_layers({"method": "top_p", "params": {"kept_mass": 0.3}, "min_tokens": 0})
    step = layers.make_step([(130, 200), (0, 250)])
    dense = layers.expected(step)
    at_step([RequestLevel("p", 1.0), RequestLevel("p", 1.0)])
    torch.testing.assert_close(layers.run(step), dense, atol=2e-5, rtol=1e-4)
    at_step(["on", RequestLevel("p", 1.0)])
    output = layers.run(step)
    torch.testing.assert_close(output[200:], dense[200:], atol=2e-5, rtol=1e-4)
    assert (output[:200] - dense[:200]).abs().max() > 0.1


def test_a_request_with_an_unknown_row_makes_the_step_dense(make_layers: Any, at_step: Any) -> None:
    layers = make_layers()
    step = layers.make_step([(80, 150), (96, 70)])
    at_step(["exact", "on"])
    worker = layers.worker
    worker.requests.step.req_ids = tuple
    torch.testing.assert_close(layers.run(step), layers.expected(step), atol=2e-5, rtol=1e-4)
    counts = {labels: value for (name, labels), value in worker.recorder.samples().items() if name == "rows"}
    assert counts == {("dense", Fallback.UNNAMED.value, "on"): 2}


def test_rows_and_pairs_are_counted(make_layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_layers()
    step = layers.make_step(MIXED)
    layers.run(step)
    monkeypatch.setattr(Requests, "step", None)  # a dummy run
    layers.run(step, 1)
    samples = layers.worker.recorder.samples()
    counts = {(name, *labels): value for (name, labels), value in samples.items()}
    sparse = [row for row, (context, _) in enumerate(MIXED) if context >= MIN_TOKENS]
    assert counts["rows", "sparse", "", "on"] == len(sparse) == 3
    assert counts["rows", "dense", Fallback.TOO_SHORT.value, "on"] == 3
    everything = a_shape_past(10**6)
    assert counts["causal_pairs", "0", "on"] == kept_pairs(step, everything, MIN_TOKENS, sparse)
    assert counts["kept_pairs", "0", "on"] == kept_pairs(step, a_shape_past(0), MIN_TOKENS, sparse)
    assert ("kept_pairs", "1", "on") not in counts


def test_listed_layers_and_draft_layers_run_dense(make_layers: Any) -> None:
    """The layers of a group share a backend. Layer 2 is past the model's last, as a draft model's."""
    layers = make_layers({"dense_layers": [0]}, numbers=(0, 1, 2))
    assert [*layers.worker.mla.numbers.values()] == [1]
    step = layers.make_step(MIXED)
    for number, expected in enumerate([None, a_shape_past(MIN_TOKENS), None]):
        output = layers.run(step, number)
        torch.testing.assert_close(output, layers.expected(step, expected), atol=2e-5, rtol=1e-4)


def test_a_pipeline_stage_whose_layers_all_stay_dense_counts_no_rows(
    make_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/metrics takes the rows from the first stage that counts some, so a stage without sparse layers must not."""
    make_config = mla_layers.make_mla_config

    def of_two_stages(*args: Any) -> Any:
        config = make_config(*args)
        config.parallel_config.pipeline_parallel_size = 2
        return config

    monkeypatch.setattr(mla_layers, "make_mla_config", of_two_stages)
    layers = make_layers({"dense_layers": [0]}, numbers=(0,))
    layers.run(layers.make_step(MIXED))
    assert layers.worker.recorder.samples() == {}


def test_layers_with_another_scale_than_the_first_run_dense(make_layers: Any) -> None:
    layers = make_layers(scales=(mla_layers.SCALE, 2 * mla_layers.SCALE))
    assert [*layers.worker.mla.numbers.values()] == [0]
    assert layers.worker.attention_names == {0: "mla", 1: "dense"}


def test_a_draft_model_s_step_stays_dense_and_is_not_counted(make_layers: Any) -> None:
    layers = make_layers()
    build, step = layers.builder.build, layers.make_step(MIXED)
    layers.builder.build = lambda prefix, common: build(prefix, common, fast_build=True)
    torch.testing.assert_close(layers.run(step), layers.expected(step), atol=2e-5, rtol=1e-4)
    assert layers.worker.recorder.samples() == {}


def test_a_draft_model_of_model_runner_v2_stays_dense_and_is_not_counted(make_layers: Any, at_step: Any) -> None:
    """That runner builds a draft model's metadata without ``fast_build``, by a builder of the draft's layers only, and
    in the step of the served model, whose rows may be others."""
    layers = make_layers(numbers=(0, 1, 2))
    shared = layers.builder
    with set_current_vllm_config(layers.config):
        draft = mla_layers.MLACommonMetadataBuilder(
            shared.kv_cache_spec, layers.names[2:], layers.config, shared.device
        )
    at_step(["on"] * len(MIXED))
    step = layers.make_step(MIXED)
    torch.testing.assert_close(layers.run(step), layers.expected(step, a_shape_past(MIN_TOKENS)), atol=2e-5, rtol=1e-4)
    counted = layers.worker.recorder.samples()
    layers.builder = draft
    for lengths in (MIXED, [(0, 150)] * (len(MIXED) + 1)):
        other = layers.make_step(lengths)
        torch.testing.assert_close(layers.run(other, 2), layers.expected(other), atol=2e-5, rtol=1e-4)
        assert draft._prefill_backend._step is None
    assert layers.worker.recorder.samples() == counted


def test_nothing_of_a_step_is_left_for_the_next(make_layers: Any) -> None:
    """A step with sparse rows, then one of a decode only, then a dense one."""
    layers = make_layers()
    layers.run(layers.make_step(MIXED))
    layers.builder.build(0, mla_layers.make_common([(64, 1)]))
    short = layers.make_step([(0, 30), (16, 8)])
    torch.testing.assert_close(layers.run(short), layers.expected(short), atol=2e-5, rtol=1e-4)


def test_all_layers_share_the_memory(make_layers: Any) -> None:
    layers = make_layers(numbers=(0, 1, 2))
    backends = [layer.prefill_backend for layer in layers.layers] + [layers.builder._prefill_backend]
    assert len({id(backend.shared.kernels) for backend in backends}) == 1
    assert backends[0].shared.kernels.max_query_tokens == layers.config.scheduler_config.max_num_batched_tokens
    assert backends[0].shared.kernels.max_key_tokens >= CHUNK_TOKENS


@pytest.mark.parametrize(
    ("method", "expected"), [("a_shape", {"a_shape(sink_tokens=1024, local_tokens=4096)"}), ("top_p", {1.0, 0.5})]
)
def test_memory_and_warm_up_are_for_what_requests_may_ask(
    make_layers: Any, monkeypatch: pytest.MonkeyPatch, method: str, expected: set[Any]
) -> None:
    """Requests may ask for any p if the server's method is ``top_p``."""
    methods = set()

    def record(self: MlaPrefill, call: Any, *tensors: Any, **options: Any) -> None:
        assert compile_monitor.listener().warming_up
        methods.add((describe(call.method) if method == "a_shape" else call.method.kept_mass, call.is_causal))

    layers = make_layers({"method": method, "params": {}})
    monkeypatch.setattr(MlaPrefill, "attend", record)
    monkeypatch.setattr(compat, "IS_CPU", False)
    worker = layers.worker.mla
    worker.kernels = None
    worker.reserve_memory()
    assert not compile_monitor.listener().warming_up
    assert methods == set(product(expected, (True, False)))
    assert (worker.kernels._selection is None) == (method == "a_shape")


@pytest.mark.parametrize("warns", [False, True])
def test_a_server_whose_chunks_all_begin_within_min_tokens_warns(
    make_layers: Any, lines: list[str], warns: bool
) -> None:
    """The last chunk of 2,048 tokens of a prompt of 16,384 begins after 14,336."""
    make_layers({"min_tokens": 14_336 + warns})
    assert any(f"for rows that begin after {14_336 + warns} tokens and have at least 1 new" in line for line in lines)
    assert any("at most 16384 tokens, so none of their chunks of 2048 tokens begins" in line for line in lines) == warns


def test_models_whose_layers_prefill_in_another_way_are_refused(
    make_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "is_stock_mla_layer", lambda layer: False)
    with pytest.raises(ConfigurationError, match="given a model with the attention layers Simple"):
        make_layers()


def test_what_the_kernels_refuse_and_dense_rows_elsewhere_are_refused(
    make_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MlaPrefill, "refusal", staticmethod(lambda device: f"the device is {device}"))
    with pytest.raises(ConfigurationError, match="mla_prefill_backend sparse-prefill: the device is cpu"):
        make_layers()
    stock = compat.stock_mla_prefill
    monkeypatch.setattr(
        compat,
        "stock_mla_prefill",
        lambda config: type("Other", (stock(config),), {"get_name": lambda *_: "FLASHINFER"}),
    )
    with pytest.raises(ConfigurationError, match="dense rows on FLASHINFER here, expected FLASH_ATTN or CPU_SDPA_MLA"):
        make_layers()
