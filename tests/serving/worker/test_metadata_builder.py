# SPDX-License-Identifier: Apache-2.0
"""The path of each row of a batch: sparse, dense or decode."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.crossover_cases import entry, written
from tests.helpers.vllm_objects import make_common
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.counters import DECODE_ROW, DENSE, SPARSE, RowKind
from vllm_sparse_backend.serving.worker.metadata import SparsePrefillMetadataBuilder
from vllm_sparse_backend.serving.worker.rows import count_decodes

MIN_TOKENS, MIN_QUERY_TOKENS = 100, 20
DECODES, SPARSES = DECODE_ROW, RowKind(SPARSE)
PADDING = RowKind("padding")


def dense(reason: Fallback) -> RowKind:
    return RowKind(DENSE, reason)


@pytest.fixture
def builder(built: Callable[..., Any]) -> SparsePrefillMetadataBuilder:
    return built(*range(4), min_query_tokens=MIN_QUERY_TOKENS)[1]


def kinds(
    builder: SparsePrefillMetadataBuilder, lengths: list[tuple[int, int]], common_prefix_len: int = 0, **changes: Any
) -> list[RowKind]:
    rows = builder.sparse_group.row_classifier.rows_of_step(
        make_common(lengths, **changes), common_prefix_len, builder.reorder_batch_threshold
    )
    return [row.kind for row in rows]


class TestClassification:
    def test_each_row_by_its_own_lengths(self, builder: SparsePrefillMetadataBuilder) -> None:
        short, short_query = dense(Fallback.TOO_SHORT), dense(Fallback.SHORT_QUERY)
        expected = {
            (500, 1): DECODES, (0, 1): DECODES, (0, 2): short, (0, 99): short, (0, 100): short, (98, 2): short,
            (98, 3): short_query, (0, 119): short_query, (0, 120): SPARSES, (4000, 19): short_query,
            (4000, 20): SPARSES, (90, 30): SPARSES, (90, 29): short_query,
        }  # fmt: skip
        assert kinds(builder, list(expected)) == list(expected.values())

    def test_where_sparse_never_pays_every_row_says_so(self, built: Callable[..., Any], tmp_path: Path) -> None:
        """There is not even an arena then. A number set by the operator takes precedence."""
        table = tmp_path / "table.json"
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        never = entry(None, None, device="cpu", engine="portable", method="dense", **shape)
        table.write_text(written(never))
        layers, builder = built(*range(4), crossover=str(table), min_tokens="auto", min_query_tokens="auto")
        assert kinds(builder, [(0, 5000), (9, 1)]) == [dense(Fallback.NEVER_FASTER), DECODES]
        assert type(builder.build(0, make_common([(0, 5000)]))) is compat.DenseMetadata
        assert layers[0].impl.worker.memory is None
        _, builder = built(*range(4), crossover=str(table), min_tokens=2000)
        assert kinds(builder, [(0, 5000), (0, 2000)]) == [SPARSES, dense(Fallback.TOO_SHORT)]

    def test_rows_that_decode_are_no_prefill_at_any_length(self, builder: SparsePrefillMetadataBuilder) -> None:
        """A preempted request computes its own output again: vLLM marks the rows that are past their prompt."""
        got = kinds(builder, [(300, 50), (300, 50)], is_prefilling=torch.tensor([False, True]))
        assert got == [DECODES, SPARSES]
        assert kinds(builder, [(300, 50), (300, 1)], is_prefilling=None) == [SPARSES, DECODES]

    @pytest.mark.parametrize("is_prefilling", [None, torch.tensor([True, True])], ids=["unknown", "rows without pads"])
    def test_rows_that_fill_up_a_batch(
        self, builder: SparsePrefillMetadataBuilder, is_prefilling: torch.Tensor | None
    ) -> None:
        got = kinds(builder, [(0, 200), (200, 1), (0, 0), (0, 0)], is_prefilling=is_prefilling)
        assert got == [SPARSES, DECODES, PADDING, PADDING]
        assert count_decodes(make_common([(200, 1), (0, 0)], is_prefilling=is_prefilling)) == 1

    def test_drafts_under_speculation_are_decodes(
        self, builder: SparsePrefillMetadataBuilder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(builder, "reorder_batch_threshold", 24)
        assert kinds(builder, [(300, 24), (300, 25), (300, 1)]) == [DECODES, SPARSES, DECODES]
        assert kinds(builder, [(300, 24), (300, 2)]) == []
        assert count_decodes(make_common([(300, 24), (300, 2), (0, 0)])) == 2

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"causal": False}, Fallback.NON_CAUSAL),
            ({"causal": torch.tensor([0, 1, 1], dtype=torch.int32)}, Fallback.NON_CAUSAL),
            ({"common_prefix_len": 256}, Fallback.CASCADE),
        ],
    )
    def test_rows_that_attend_otherwise(
        self, builder: SparsePrefillMetadataBuilder, changes: Any, reason: Fallback
    ) -> None:
        got = kinds(builder, [(300, 200), (300, 300), (400, 1)], **changes)
        assert got == [dense(reason), dense(reason), DECODES]

    def test_lengths_on_the_device_are_not_asked_for(self, builder: SparsePrefillMetadataBuilder) -> None:
        """Only the upper bound decides. Without it, and on a device, lengths are unknown."""
        common = make_common([(0, 200)], seq_lens=torch.zeros(1, dtype=torch.int32, device="meta"))
        classifier = builder.sparse_group.row_classifier
        assert [row.kind for row in classifier.rows_of_step(common, 0, max_decode_tokens=1)] == [SPARSES]
        with pytest.raises(RuntimeError, match="no sequence lengths on the host"):
            classifier.rows_of_step(dataclasses.replace(common, seq_lens_cpu_upper_bound=None), 0, max_decode_tokens=1)


class TestMetadata:
    LENGTHS = ((40, 1), (60, 1), (50, 70), (0, 130), (0, 30), (70, 90), (7, 1), (0, 20))

    def test_without_a_sparse_row_it_is_the_delegates_own(self, builder: SparsePrefillMetadataBuilder) -> None:
        for lengths in ([(40, 1), (300, 1)], [(0, 99)], [(90, 1), (0, 80), (0, 1)]):
            common = make_common(lengths)
            metadata = builder.build(0, common)
            assert type(metadata) is compat.DenseMetadata
            expected = compat.DenseBuilder.build(builder, 0, common)
            same = [f.name for f in dataclasses.fields(expected) if f.name != "scheduler_metadata"]
            assert all(getattr(metadata, name) is getattr(expected, name) for name in same)

    @pytest.mark.parametrize("num_rows", [1, 64])
    def test_decodes_alone_take_one_number_from_a_tensor(
        self, builder: SparsePrefillMetadataBuilder, monkeypatch: pytest.MonkeyPatch, num_rows: int
    ) -> None:
        """Any further operation of torch would lengthen the step of every generated token."""
        monkeypatch.setattr(compat.DenseBuilder, "build", lambda *args: None)
        common = make_common([(300, 1)] * num_rows)
        operations: list[str] = []

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                operations.append(str(function))
                return function(*args, **(kwargs or {}))

        with Counting():
            builder.build(0, common)
        assert operations == ["aten.select.int", "aten._local_scalar_dense.default"]

    @pytest.mark.full
    @given(lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=12))
    @settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_each_token_belongs_to_one_part(
        self, builder: SparsePrefillMetadataBuilder, lengths: list[tuple[int, int]]
    ) -> None:
        """No position below min_tokens is sparse."""
        lengths = [*lengths, (0, 200)]
        sparse = builder.build(0, make_common(lengths)).sparse
        tokens = [t for run in sparse.dense_runs for t in range(run.tokens.start, run.tokens.stop)]
        for slab in sparse.slabs:
            assert min(slab.rows.context_lens) >= MIN_TOKENS
            assert min(slab.rows.query_lens) >= MIN_QUERY_TOKENS
            for start, query_len in zip(slab.rows.query_starts, slab.rows.query_lens):
                tokens += range(start, start + query_len)
        assert sorted(tokens) == list(range(sum(query_len for _, query_len in lengths)))

    def test_what_numbers_the_whole_batch_does_not_come_along(self, builder: SparsePrefillMetadataBuilder) -> None:
        common = make_common(self.LENGTHS, positions=torch.arange(343), mm_req_doc_ranges={4: [(3, 9)]})
        common._token_to_req_indices_cache = torch.zeros(343, dtype=torch.int32)
        common.compute_num_computed_tokens()
        part = builder._part_of_batch(common, slice(4, 5), slice(202, 232))
        for name in ("positions", "mm_req_doc_ranges", "_token_to_req_indices_cache", "_num_computed_tokens_cache"):
            assert getattr(common, name) is not None
            assert getattr(part, name) is None
        assert part.compute_num_computed_tokens().tolist() == [0]
        assert part.is_prefilling.tolist() == [True]
        assert part.seq_lens_cpu_upper_bound.tolist() == [30]

    def test_decodes_beside_sparse_rows_may_be_as_long_as_drafts_get(
        self, builder: SparsePrefillMetadataBuilder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM may distribute drafts on the device, so only the sum of the host's query lengths is then correct."""
        monkeypatch.setattr(builder, "reorder_batch_threshold", 4)
        (run,) = builder.build(0, make_common([(40, 2), (40, 2), (100, 200)])).sparse.dense_runs
        assert run.metadata.max_query_len == 4

    def test_the_caller_finds_its_batch_as_it_was(self, builder: SparsePrefillMetadataBuilder) -> None:
        common, before = make_common(self.LENGTHS), make_common(self.LENGTHS)
        builder.build(0, common)
        for f in dataclasses.fields(common):
            now, then = getattr(common, f.name), getattr(before, f.name)
            assert torch.equal(now, then) if isinstance(then, torch.Tensor) else now == then, f.name

    def test_graphs_are_for_uniform_decodes_at_most(self, builder: SparsePrefillMetadataBuilder) -> None:
        from vllm.v1.attention.backend import AttentionCGSupport as Support

        assert compat.uniform_decode_graphs(Support.ALWAYS) is Support.UNIFORM_BATCH
        for support in (Support.UNIFORM_BATCH, Support.UNIFORM_SINGLE_TOKEN_DECODE, Support.NEVER):
            assert compat.uniform_decode_graphs(support) is support
        support = type(builder).get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec)
        assert support is compat.DenseBuilder.get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec)
        assert not builder.supports_update_block_table

    def test_schedules_are_kept_apart_where_the_delegate_has_one_buffer_for_all(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """FlashAttention has a single buffer with graphs. Metadata of the CPU build has pointers into itself, which a
        copy would break."""
        buffer = torch.arange(8)
        part = SimpleNamespace(scheduler_metadata=buffer[:5])
        compat.keep_schedule(part)
        assert part.scheduler_metadata.data_ptr() == buffer.data_ptr()
        monkeypatch.setattr(compat, "IS_CPU", False)
        compat.keep_schedule(part)
        buffer.zero_()
        assert part.scheduler_metadata.tolist() == [0, 1, 2, 3, 4]
        compat.keep_schedule(SimpleNamespace(scheduler_metadata=None))
