# SPDX-License-Identifier: Apache-2.0
"""Faults that public bug reports describe in attention kernels of other projects, tested on every engine and method."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.batches import assert_close, random_batch, random_index
from tests.helpers.engine_cases import DTYPES, ENGINES, FULL, READS_PAST_THE_END, check, run, same
from tests.helpers.lined import lined_batch
from tests.helpers.method_cases import VARIANTS, all_lists, select
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.engine_trial import Batch, expected_attention
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows

METHOD_SETTINGS = [
    pytest.param(name, params, id=f"{name}-{i}", marks=FULL if i else ())
    for name, spec in METHODS.items()
    for i, params in enumerate([dict(spec.demo), *VARIANTS.get(name, [])])
]
every_method = pytest.mark.parametrize(("name", "params"), METHOD_SETTINGS)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> AttendEngine:
    return ENGINES[request.param]


def refill(batch: Batch, value: float) -> Batch:
    """Return the batch with ``value`` at all places of the cache that no position owns, which hold NaN."""
    keys, values = (
        torch.where(side.isnan(), torch.full_like(side, value), side) for side in (batch.cache.keys, batch.cache.values)
    )
    return replace(batch, cache=replace(batch.cache, keys=keys, values=values), rows=replace(batch.rows))


@pytest.mark.parametrize("sinks", [None, [-30.0, 5.0]], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("block_tokens", [pytest.param(32, marks=FULL), 64, pytest.param(128, marks=FULL)])
def test_queries_to_which_the_first_block_read_is_masked(
    engine: AttendEngine, device: str, block_tokens: int, sinks: list[float] | None
) -> None:
    """vllm#48364: a first block without a visible key made the running maximum −∞, and the output NaN.

    Only the blocks on the diagonal are kept. Whichever end an engine begins at, some query sees none of its first
    block: a tile's first queries see none of the last blocks, and, with stripes, none of the later positions.
    """
    lengths = [(0, 128), (97, 130)]
    batch = random_batch(lengths, 2, 1, 64, 128, DTYPES[0], device)
    if sinks is not None:
        batch = replace(batch, sinks=torch.tensor(sinks, device=device))
    check(engine, batch, random_index(batch, block_tokens, 0.0))
    check(engine, batch, random_index(batch, block_tokens, 0.0, stripes=3))


@pytest.mark.parametrize("value", [pytest.param(0.0, marks=FULL), pytest.param(1e3, marks=FULL), -65504.0])
def test_whatever_lies_past_a_sequences_end_attention_stays_the_same(
    engine: AttendEngine, device: str, value: float
) -> None:
    """Stale values in the tail of a sequence's last page do not reach the output (vllm#27264, torch-spyre#4517).

    NaN is the value to compare with, except for the engines that need finite values there.
    """
    batch = random_batch([(201, 70), (0, 5)], 2, 1, 64, 64, torch.float16, device)
    index = random_index(batch, 64, 0.5, stripes=30)
    expected = expected_attention(batch, index)
    baseline = batch if engine.name not in READS_PAST_THE_END else refill(batch, 1.0)
    refilled = refill(batch, value)
    results = [run(engine, b, replace(index, rows=b.rows)) for b in (baseline, refilled)]
    assert same(*results)
    assert_close(expected, results[1])


@every_method
@pytest.mark.parametrize("values", [(1e3,), pytest.param((0.0, -65504.0), marks=FULL)], ids=["1000", "0 and -65504"])
@pytest.mark.parametrize("by_reference", [False, pytest.param(True, marks=FULL)], ids=["kernels", "reference"])
def test_whatever_lies_past_a_sequences_end_methods_keep_the_same(
    name: str, params: dict[str, Any], by_reference: bool, values: tuple[float, ...]
) -> None:
    """Selection is unchanged too. Its means and sums of blocks include the last, partly filled page, which is NaN at
    first."""
    batch = lined_batch([(201, 70), (0, 5)], 2, 1, 64, 64, torch.float16)
    method = METHODS[name].parameters(**params)
    lists = [
        all_lists(select(method, b, method.block_tokens, by_reference=by_reference))
        for b in (batch, *(refill(batch, value) for value in values))
    ]
    assert all(other == lists[0] for other in lists[1:])


def test_a_row_whose_only_key_scores_far_below_minus_fifty_thousand(engine: AttendEngine, device: str) -> None:
    """flashinfer#4451: a finite stand-in for −∞, −5e4, beat the row's only score, and the output was zero."""
    batch = random_batch([(0, 1), (0, 3)], 2, 1, 64, 64, DTYPES[0], device)
    batch.q.fill_(-512.0)
    cache = batch.cache
    cache.keys.copy_(torch.where(cache.keys.isnan(), cache.keys, torch.full_like(cache.keys, 64.0)))
    index = random_index(batch, 64, 1.0)
    out = run(engine, batch, index)
    assert -512.0 * 64.0 * 64 * batch.scale < -5e4
    value = cache.values[batch.rows.block_table[0, 0].long(), 0]
    assert torch.equal(out[0], value.expand(2, -1))
    assert_close(expected_attention(batch, index), out)


def far_batch(lengths: Sequence[tuple[int, int]], dtype: torch.dtype, element_offset: int) -> tuple[Batch, Batch]:
    """Return a batch, and the same one with its pages ``element_offset`` elements further on in a huge cache.

    The cache only reserves address space: no pages except the batch's are written or read.
    """
    batch = lined_batch(lengths, 2, 1, 64, 64, dtype)
    cache, rows = batch.cache, batch.rows
    num_pages, page_elements = cache.keys.shape[0], cache.keys.stride(0)
    first_page = element_offset // page_elements + 1
    storage = torch.empty((first_page + num_pages) * page_elements, dtype=dtype, device=cache.keys.device)
    pages = storage.view(first_page + num_pages, cache.page_size, 1, 2 * cache.head_dim)
    keys, values = pages.split(cache.head_dim, -1)
    keys[first_page:], values[first_page:] = cache.keys, cache.values
    far_rows = Rows(rows.query_starts, rows.query_lens, rows.context_lens, rows.block_table + first_page)
    return batch, replace(batch, cache=PagedCache(keys, values), rows=far_rows)


FAR = (1 << 32) + (1 << 31)
"""Offset in elements: beyond 32 bits, signed and unsigned, and negative if cut to 32 bits."""


def test_attention_past_two_to_the_31_elements(engine: AttendEngine) -> None:
    """Offsets of pages that exceed 32 bits (native-sparse-attention#8)."""
    batch, far = far_batch([(201, 70), (0, 5)], DTYPES[1], FAR)
    index = random_index(batch, 64, 0.5, stripes=30)
    assert same(run(engine, far, replace(index, rows=far.rows)), run(engine, batch, index))


@every_method
def test_selection_past_two_to_the_31_elements(name: str, params: dict[str, Any]) -> None:
    """Selection reads pages at the same offsets."""
    batch, far = far_batch([(201, 70), (0, 5)], torch.float16, FAR)
    method = METHODS[name].parameters(**params)
    assert all_lists(select(method, far, method.block_tokens)) == all_lists(select(method, batch, method.block_tokens))


LONG = [(131_071, 2), (262_144 - 65, 130)]
"""The first chunk ends past 131,072 tokens, the second past 262,144."""


@pytest.mark.parametrize("page_size", [128, pytest.param(640, marks=FULL)])
def test_attention_past_131072_and_262144_tokens(engine: AttendEngine, device: str, page_size: int) -> None:
    """Contexts as long as in mlx-lm#1454."""
    batch = random_batch(LONG, 1, 1, 64, page_size, DTYPES[1], device)
    index = random_index(batch, 64, 0.004, stripes=90)
    kept_blocks = [index.blocks_of(0, i) for i in range(batch.rows.num_tiles)]
    assert max(int(blocks.max()) for blocks in kept_blocks) * 64 >= 262_144
    check(engine, batch, index)
