# SPDX-License-Identifier: Apache-2.0
"""Layers that run sparse: with several groups of layers, draft models, and backends that vLLM derives from ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers import vllm_objects
from tests.helpers.crossover_cases import entry, written
from tests.helpers.folders import profile_file
from tests.helpers.vllm_objects import (
    layer_name,
    make_builder,
    make_common,
    make_config,
    make_layers,
    make_model,
    make_step,
    recorder_of,
)
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.metrics import METRICS
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.layers import plain_impls, served_layers
from vllm_sparse_backend.serving.worker.metadata import SparsePrefillMetadata, SparsePrefillMetadataBuilder
from vllm_sparse_backend.serving.worker.owner import Worker
from vllm_sparse_backend.serving.worker.rows import Requests, Step

MIN_TOKENS = 100
LONG = [(50, 1), (0, 200)]
Configure = Callable[..., Any]


@pytest.fixture
def config(configured: Configure) -> Any:
    """A configuration in which rows run sparse early."""
    return configured(method="dense", min_tokens=MIN_TOKENS, min_query_tokens=1)


def stays_dense(builder: SparsePrefillMetadataBuilder) -> bool:
    return builder.sparse_group is None and type(builder.build(0, make_common(LONG))) is compat.DenseMetadata


class TestGroups:
    def test_windowed_layers_have_a_builder_that_passes_everything_on(self, config: Any, lines: list[str]) -> None:
        windowed, full = make_layers(config, [0, 2], per_layer_sliding_window=64), make_layers(config, [1, 3])
        assert stays_dense(make_builder(config, windowed))
        assert f"sparse-prefill: layers 0,2 prefill dense: {Fallback.SLIDING_WINDOW.explain}" in lines
        builder = make_builder(config, windowed + full)  # a group may have both
        assert builder.sparse_group.numbers == (1, 3)
        step = make_step(windowed[0], [(150, 1), (0, 200), (3, 90)])
        metadata = builder.build(0, step.common)
        assert type(metadata) is SparsePrefillMetadata
        assert torch.equal(step.forward(windowed[0], metadata), step.by_dense_backend(windowed[0], builder))

    def test_no_layer_at_all_is_an_error_but_a_warning_in_a_pipeline_as_other_stages_have_other_layers(
        self, configured: Configure, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = configured()
        layers = make_layers(config, range(4), per_layer_sliding_window=64)
        with pytest.raises(ConfigurationError, match=r"can prefill sparsely \(sliding_window: "):
            make_builder(config, layers)
        monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
        assert stays_dense(make_builder(config, layers))
        assert any("no layer of this model can prefill sparsely" in line for line in lines)

    def test_layers_that_the_plan_leaves_out(self, configured: Configure, lines: list[str]) -> None:
        """Layers left out by the configuration, or because their heads differ from the model's config."""
        config = configured(method="dense", min_tokens=MIN_TOKENS, min_query_tokens=1, dense_layers=[0, 2])
        layers = make_layers(config, range(3)) + make_layers(config, [3], num_heads=8)
        first, second, third = (make_builder(config, part) for part in (layers[:1], layers[1:3], layers[3:]))
        assert stays_dense(first)
        assert second.sparse_group.numbers == (1,)
        assert stays_dense(third)
        assert f"sparse-prefill: layers 2 prefill dense: {Fallback.DENSE_LAYER.explain}" in lines
        assert f"sparse-prefill: layers 3 prefill dense: {Fallback.OTHER_HEADS.explain}" in lines
        assert sum(line.startswith("sparse-prefill: sparse prefill with method dense, for rows") for line in lines) == 1

    @pytest.mark.parametrize(
        ("batched", "threshold", "chunk"),
        [(1024, 0, 1024), (8192, 512, 512), (8192, 0, None), (1279, 0, None), (1278, 0, 1278)],
    )
    def test_chunks_too_small_to_go_sparse_are_told(
        self, configured: Configure, monkeypatch: pytest.MonkeyPatch, lines: list[str], batched: int, threshold: int,
        chunk: int | None,
    ) -> None:  # fmt: skip
        """Including chunks that are too small next to the largest number of decodes."""
        config = configured(method="dense", min_tokens=MIN_TOKENS, min_query_tokens=1024)
        monkeypatch.setattr(config.scheduler_config, "max_num_seqs", 256)
        monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", batched)
        monkeypatch.setattr(config.scheduler_config, "long_prefill_token_threshold", threshold)
        make_builder(config, make_layers(config, [0]))
        warnings = [line for line in lines if "a step has at most" in line]
        assert [f"a step has at most {chunk} new tokens" in line for line in warnings] == [True] * (chunk is not None)

    @pytest.mark.parametrize(("batched", "is_told"), [(99, True), (100, False), (200, False)])
    def test_steps_with_too_few_pairs_to_go_sparse_are_told(
        self, configured: Configure, monkeypatch: pytest.MonkeyPatch, lines: list[str], tmp_path: Any, batched: int,
        is_told: bool,
    ) -> None:  # fmt: skip
        """Requests have at most 200 tokens, and the pairs of 100 tokens after 100 pay."""
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        table = tmp_path / "table.json"
        table.write_text(
            written(entry(100, 20, device="cpu", engine="portable", method="dense", min_pairs=15_050, **shape))
        )
        config = configured(method="dense", crossover=str(table), min_tokens="auto", min_query_tokens="auto")
        monkeypatch.setattr(config.scheduler_config, "max_num_seqs", 1)
        monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", batched)
        monkeypatch.setattr(config.model_config, "max_model_len", 200)
        make_builder(config, make_layers(config, [0]))
        warnings = [line for line in lines if "pairs with earlier keys, but rows with fewer" in line]
        assert len(warnings) == is_told

    def test_a_profiles_number_is_kept_on_a_server_whose_steps_are_smaller(
        self, configured: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        (table := tmp_path / "table.json").write_text(
            written(entry(100, 110, device="cpu", engine="portable", method="dense"))
        )
        profile = profile_file(tmp_path, default={"method": "dense"}, min_query_tokens=120)
        config = configured(profile=profile, crossover=str(table))
        monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", 125)
        monkeypatch.setattr(config.scheduler_config, "max_num_seqs", 10)
        builder = make_builder(config, make_layers(config, [0]))
        assert builder.sparse_group.row_classifier.lengths["on"].min_query_tokens == 120

    def test_each_rank_takes_its_own_heads_and_the_first_tells_the_plan(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        layers = {"0-3": {"heads": {"0-2": {"method": "dense"}}}}
        profile = profile_file(tmp_path, default={"method": "a_shape"}, layers=layers)
        config = make_config(make_model(tmp_path / "model"), {"profile": profile})
        monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 2)
        expected = [[((0, 1), "Dense")], [((0,), "Dense"), ((1,), "AShape")]]
        for rank, groups in enumerate(expected):
            config.compilation_config.static_forward_context.clear()
            monkeypatch.setattr(compat, "tensor_parallel_rank", lambda rank=rank: rank)
            (layer,) = layers = make_layers(config, [0])
            worker = Worker(config)
            lines.clear()
            make_builder(config, layers)
            assert layer.impl.worker is worker
            assert [(group.heads, type(group.method).__name__) for group in layer.impl.layer.plan.groups] == groups
            assert bool(lines) == (rank == 0)


class TestDrafts:
    def test_layers_of_a_draft_model_have_no_part_in_the_plan(self, config: Any) -> None:
        """Their numbers are past the model's own (EAGLE), or equal under another name (a separate model)."""
        served = make_layers(config, range(4))
        names = layer_name(4), "draft_model.model.layers.0.self_attn.attn"
        drafts = [vllm_objects.make_layer(config, name) for name in names]
        builders = make_builder(config, served + drafts), make_builder(config, drafts)
        assert builders[0].sparse_group.numbers == (0, 1, 2, 3)
        assert stays_dense(builders[1])
        assert [bool(layer.impl.levels) for layer in served + drafts] == [True] * 4 + [False] * 2

    def test_a_drafts_builder_with_the_drafts_configuration(self, config: Any, tmp_path: Any) -> None:
        """No profile of the served model fits the draft's shape."""
        make_layers(config, range(4))
        (draft,) = make_layers(config, [4])
        other = make_config(make_model(tmp_path, num_hidden_layers=1, num_attention_heads=2), backend=None)
        other.compilation_config = config.compilation_config
        assert stays_dense(make_builder(other, [draft], SparsePrefillMetadataBuilder))

    def test_only_this_pipeline_stages_numbers_are_the_models(
        self, configured: Configure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = configured()
        make_layers(config, [2, 3])
        vllm_objects.make_layer(config, "mtp.layers.0.self_attn.attn")
        vllm_objects.make_layer(config, "model.layers.2.block.1.attn")  # two numbers, neither of them the plan's
        monkeypatch.setattr(type(config.model_config), "get_layers_start_end_indices", lambda *_: (2, 4))
        plain = plain_impls(config)
        assert served_layers(config, plain) == {2: plain[layer_name(2)], 3: plain[layer_name(3)]}


class TestDerived:
    """Backends that vLLM derives from the chosen backend."""

    def test_chunked_attention(self, config: Any) -> None:
        """Its builder cuts requests into chunks, so lengths in its batches are not those of the requests."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention

        with set_current_vllm_config(config):
            chunked = ChunkedLocalAttention(
                4, 32, 32**-0.5, 128, num_kv_heads=2, cache_config=config.cache_config, prefix=layer_name(0)
            )
        assert isinstance(chunked.impl, SparsePrefillImpl)
        builder = make_builder(config, make_layers(config, [1]))
        chunked_builder = make_builder(config, [chunked])
        assert issubclass(type(chunked_builder), SparsePrefillMetadataBuilder)
        assert builder.sparse_group.numbers == (1,)
        assert chunked_builder.sparse_group is None
        metadata = chunked_builder.build(0, make_common([(200, 60), (0, 300)]))
        assert type(metadata) is compat.DenseMetadata
        assert metadata.seq_lens.tolist() == [128, 4, 128, 128, 44]

    def test_layers_that_share_a_cache_and_prefill_fast(self, config: Any) -> None:
        """Their builder keeps only the tokens that are sampled from, so positions are not contiguous."""
        from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

        from vllm_sparse_backend.serving.worker.backend import SparsePrefillBackend

        layers = make_layers(config, [0, 1])
        cls = create_fast_prefill_custom_backend("FastPrefill", SparsePrefillBackend).get_builder_cls()
        builder = make_builder(config, layers[1:], cls)
        assert builder.sparse_group is None
        common = make_common([(0, 400)], logits_indices_padded=torch.tensor([200, 250, 399]), num_logits_indices=3)
        common.max_logits_per_req = 3
        metadata = builder.build(0, common)
        assert metadata.query_start_loc.tolist() == [0, 3]
        assert getattr(metadata, "sparse", None) is None
        assert make_builder(config, layers[:1]).sparse_group.numbers == (0,)


class TestCounting:
    @staticmethod
    def rows(builder: SparsePrefillMetadataBuilder) -> dict[str, float]:
        samples = recorder_of(builder).samples().items()
        return {" ".join(labels[:2]).strip(): count for (name, labels), count in samples if name == "rows"}

    def test_rows_count_once_however_many_groups_see_them(self, config: Any) -> None:
        groups = [make_layers(config, [0], per_layer_sliding_window=64), *(make_layers(config, [i]) for i in (1, 2, 3))]
        builders = [make_builder(config, layers) for layers in groups]
        assert len({id(recorder_of(builder)) for builder in builders[1:]}) == 1
        common = make_common([(50, 1), (60, 1), (0, 200), (0, 30), (0, 0)])
        for builder in builders:
            builder.build(0, common)
        assert self.rows(builders[1]) == {"decode": 2, "sparse": 1, "dense too_short": 1}

    def test_dummy_runs_and_requests_of_vllms_warm_up_count_nothing(
        self, built: Configure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (layer,), builder = built(0)
        step, decodes = make_step(layer, [(50, 1), (0, 200)]), make_common([(50, 1)])
        for made_up in (None, Step({}, {"_warmup_0_": 1})):
            monkeypatch.setattr(Requests, "step", made_up)
            builder.build(0, decodes)
            step.forward(layer, builder.build(0, step.common))
        assert recorder_of(builder).samples() == {}

    def test_every_pipeline_stage_counts_rows_and_its_own_layers(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The page takes the rows from a single stage (tests/serving/frontend/test_metrics_endpoint.py)."""
        monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
        for stage in range(2):
            config.compilation_config.static_forward_context.clear()
            indices = "get_layers_start_end_indices"
            monkeypatch.setattr(type(config.model_config), indices, lambda *_, s=stage: (s, s + 1))
            (layer,) = layers = make_layers(config, [stage])
            worker = Worker(config)
            builder = make_builder(config, layers)
            step = make_step(layer, [(50, 1), (0, 200)])
            step.forward(layer, builder.build(0, step.common))
            answer = worker.new_samples()
            samples = {(name, *labels): value for name, labels, value in answer["samples"]}
            assert {name for name, *_ in samples} <= set(METRICS)
            assert samples["arena_overflows",] == samples["compilations", "serving"] == 0
            assert samples["layers", "torch"] == 1
            again = {(name, *labels): value for name, labels, value in worker.new_samples()["samples"]}
            assert again == {
                key: value if key[0] in ("layers", "streaming_heads") else 0 for key, value in samples.items()
            }
            assert samples["causal_pairs", str(stage), ON] > 0
            assert samples["rows", "sparse", "", ON] == samples["rows", "decode", "", ""] == 1
            assert not {("causal_pairs", str(1 - stage), ON), ("layers", "dense")} & {*samples}
