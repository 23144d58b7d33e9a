# SPDX-License-Identifier: Apache-2.0
"""Selection and attention allocate no more of the workspace than they announce."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.helpers.batches import every_head, random_batch
from tests.helpers.method_cases import VARIANTS, uncomputed
from tests.helpers.offline_compiler import without_launches
from vllm_sparse_kernels import LayerShape, Rows, SparseIndex, Workspace
from vllm_sparse_kernels.attention import PORTABLE, FlashAttention, flash_engine, workspace_bytes
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import attend_options
from vllm_sparse_kernels.methods import METHODS

WIDTHS = {"sale": (32, 64), "top_p": (32, 64)}
CASES = [
    (name, values, width)
    for name, spec in METHODS.items()
    for values in VARIANTS.get(name, [{}])
    for width in WIDTHS.get(name, (spec.parameters.block_tokens,))
]
HEADS, KV_HEADS, DIM = 8, 2, 64
LENGTHS = st.lists(st.tuples(st.integers(0, 150_000), st.integers(1, 1500)), min_size=1, max_size=24)


@pytest.fixture
def no_kernels() -> Iterator[None]:
    """Skip all kernels, including Hopper's: allocations do not depend on the values that kernels compute."""
    with without_launches():
        yield


def peaks(name: str, values: dict[str, Any], batch: Batch, block_tokens: int) -> list[tuple[int, int]]:
    """Return (taken, announced) of the index, of selection on each engine, and of attention on either engine."""
    method = METHODS[name].parameters(**values)
    num_heads, num_kv_heads = batch.num_heads, batch.cache.keys.shape[2]
    rows = batch.rows
    layout, workspace = method.stripe_layout(rows), Workspace(rows.device)
    layouts = dict.fromkeys(range(num_heads), layout)
    index = SparseIndex.allocate(rows, num_heads, block_tokens, layouts, workspace)
    shape = LayerShape(num_heads, num_kv_heads, batch.cache.head_dim, block_tokens, batch.q.element_size())
    index_bytes = SparseIndex.bytes_for(rows, num_heads, block_tokens, num_heads * layout.capacity)
    peaks_and_bounds = [(workspace.peak_bytes, index_bytes)]

    def taken() -> int:
        return workspace.peak_bytes - workspace.used_bytes

    call = batch.call(index, every_head(method, num_heads))
    for engine in method.select_engines:
        workspace.peak_bytes = workspace.used_bytes
        with workspace.frame():
            engine.select(call)
        peaks_and_bounds.append((taken(), method.workspace_bytes(rows, shape, num_heads, layout.capacity)))
    workspace.peak_bytes = workspace.used_bytes
    options = attend_options([method] * num_heads, rows.device)
    with workspace.frame():
        PORTABLE.attend(call, batch.empty_out(), options=options)
    int8_scores = options is not None and options.int8_heads is not None
    announced = workspace_bytes(rows, shape, layout.capacity * num_heads, layout.longest, int8_scores)
    peaks_and_bounds.append((taken(), announced))
    if options is None and batch.q.dtype != torch.float32:
        workspace.peak_bytes = workspace.used_bytes
        with workspace.frame():
            FLASH.attend(call, batch.empty_out(), options=options)
        peaks_and_bounds.append((taken(), announced))
    return peaks_and_bounds


FLASH = flash_engine(FlashAttention.of_version(3, uncomputed))


def without_data(lengths: list[tuple[int, int]], shape: tuple[int, int, int] = (HEADS, KV_HEADS, DIM)) -> Batch:
    """Return rows over a cache of a single page, because nothing is read; ``shape``: heads, kv heads, head_dim."""
    batch = random_batch([(0, 1)], *shape, 64, torch.float16)
    contexts, queries = zip(*lengths, strict=True)
    tokens = tuple(sum(queries[:i]) for i in range(len(queries)))
    rows = Rows(tokens, queries, contexts, torch.zeros(len(lengths), 16, dtype=torch.int32))
    q = torch.zeros(sum(queries), shape[0], shape[2], dtype=torch.float16)
    return Batch(q, batch.cache, rows, batch.scale)


@pytest.mark.full
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("name", "values", "block_tokens"), CASES, ids=str)
def test_nothing_takes_more_than_it_announces(name: str, values: dict[str, Any], block_tokens: int) -> None:
    @given(lengths=LENGTHS)
    @settings(max_examples=8)
    def check(lengths: list[tuple[int, int]]) -> None:
        for taken, announced in peaks(name, values, without_data(lengths), block_tokens):
            assert taken <= announced

    check()


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("name", "values", "shape", "lengths"),
    [
        # Rows that share a slab, because the longest row, with which fewer would fit, comes after them.
        ("flex_vertical_slash", {"last_queries": 256}, (8, 1, 128), [(320_000, 64), (320_000, 64), (439_000, 128)]),
        ("share_prefill", {"cluster": 0, "last_queries": 256}, (8, 1, 96), [(320_000, 64)] * 2 + [(439_000, 128)]),
        # More columns than usual.
        ("vertical_slash", {"vertical_tokens": 900_000}, (64, 8, 64), [(978_846, 128)]),
        ("flex_vertical_slash", {"max_stripes": 1 << 20, "last_queries": 256}, (64, 8, 64), [(978_846, 128)]),
        # Tiles of shorter rows, whose products are as wide as those of the longest row.
        ("block_sparse", {}, (8, 1, 256), [(259_579, 7715), (846_330, 7073), (635_180, 2732)]),
    ],
    ids=str,
)
def test_nor_where_rows_differ_much(
    name: str, values: dict[str, Any], shape: tuple[int, int, int], lengths: list[tuple[int, int]]
) -> None:
    width = METHODS[name].parameters.block_tokens
    for taken, announced in peaks(name, values, without_data(lengths, shape), width):
        assert taken <= announced


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("name", "values", "block_tokens"), CASES, ids=str)
def test_nor_does_a_full_chunk_after_the_longest_context(name: str, values: dict[str, Any], block_tokens: int) -> None:
    """The last chunks of the longest prompts need no more memory than is reserved (vllm#43357).

    The arena has the announced size, so nothing is allocated outside of it. 8,192 queries end at 262,144 and 1,048,576.
    """
    for length in (262_144, 1_048_576):
        for taken, announced in peaks(name, values, without_data([(length - 8192, 8192)], (4, 1, 128)), block_tokens):
            assert taken <= announced


OTHER_SHAPES = [
    (10, 2, 128),
    (14, 2, 128),
    (9, 3, 64),
    (16, 1, 128),
    (5, 1, 128),
    (32, 8, 128),
    (4, 2, 256),
    (8, 8, 80),
]


@pytest.mark.usefixtures("no_kernels")
@settings(max_examples=100)
@given(
    shape=st.sampled_from(OTHER_SHAPES),
    lengths=st.lists(st.tuples(st.integers(0, 120_000), st.integers(1, 8192)), min_size=1, max_size=3),
)
def test_nor_does_top_p_on_any_engine_for_other_heads(
    shape: tuple[int, int, int], lengths: list[tuple[int, int]]
) -> None:
    """Hopper's tiles take half the memory of portable's, and are divided into other runs."""
    for taken, announced in peaks("top_p", {}, without_data(lengths, shape), 32):
        assert taken <= announced


@pytest.mark.parametrize("num_heads", [5, 10, 16, 32])
@settings(max_examples=80)
@given(
    rows=st.tuples(st.integers(1, 260), st.integers(0, 900), st.integers(0, 200), st.integers(0, 900)),
)
def test_what_top_p_announces_never_falls_as_a_row_gets_longer(num_heads: int, rows: tuple[int, ...]) -> None:
    num_tiles, context_tiles, more_tiles, more_context = rows
    shape, method = LayerShape(num_heads, 1, 128, 32, 2), METHODS["top_p"].parameters()
    announced = []
    for tiles, context in ((num_tiles, context_tiles), (num_tiles + more_tiles, context_tiles + more_context)):
        row = Rows((0,), (128 * tiles,), (128 * context,), torch.zeros(1, 0, dtype=torch.int32))
        announced.append(method.workspace_bytes(row, shape, num_heads, 0))
    assert announced[0] <= announced[1]
