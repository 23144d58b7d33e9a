# SPDX-License-Identifier: Apache-2.0
"""SALE's integers: the kernel's arithmetic bit for bit, sums that are exact, the memory that rounded keys take."""

from itertools import pairwise

import pytest
import torch

from benchmarks.batches import random_batch
from tests.methods.cases import DEVICE
from tests.methods.sale_cases import compared_as, make_batch, regions, rounded_by_kernels, selected_heads
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.sale import method as module, rounding as sale_rounding, scores as sale_scores
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.rounding import Regions, RoundedKeys, RoundedQueries
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.trial import Batch
from vllm_sparse_kernels.workspace import Workspace

# Hopper's own type and everybody's. A GPU tests the one that it takes.
INTEGERS = [torch.int8, torch.float8_e4m3fn] if DEVICE == "cpu" else [module.integer_dtype(torch.device(DEVICE))]


def rounded_row(q, k, thresholds, biases, integers) -> tuple[RoundedQueries, RoundedKeys]:
    """Queries [heads, n, d] and keys [kv heads, m, d] that are integers; all steps are 1."""
    largest = biases.abs().unflatten(1, (-1, 64)).amax(2)
    squares = q.float().square().sum(2), k.float().square().sum(2).unflatten(1, (-1, 64)).amax(2)
    ones = torch.ones_like(thresholds)
    steps = torch.ones(len(k), k.shape[1] // 8, device=DEVICE)
    queries = RoundedQueries(q.to(integers), thresholds, ones, squares[0], q.shape[1])
    return queries, RoundedKeys(k.to(integers), steps, biases, biases.half(), squares[1], largest, k.shape[1])


def flags_of(queries: RoundedQueries, keys: RoundedKeys, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Bool [heads, queries, 32-key blocks]: an element passes, by the kernel's arithmetic, operation by operation."""
    products = queries.integers.float() @ keys.integers.float().repeat_interleave(group, 0).mT
    steps, bias = queries.inverse_steps[:, :, None].to(dtype), keys.biases[:, None, :].to(dtype)
    if DEVICE == "cuda":  # one rounding: a fused multiply-add
        scores = (products.double() + steps.double() * bias.double()).to(dtype)
    else:
        scores = products.to(dtype) + steps * bias
    largest = scores.float().unflatten(2, (-1, 4, 4, 2)).amax((3, 5))
    steps = keys.steps.repeat_interleave(group, 0).unflatten(1, (-1, 4))
    return (largest * steps[:, None] >= queries.thresholds[:, :, None, None]).any(3)


def flags_twice(
    method: Sale, queries, keys, batch: Batch, block_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel says of row 0, and what its arithmetic, done over, says: uint8 in the layout of block_ids."""
    index = SparseIndex.allocate(batch.rows, batch.num_heads, block_tokens)
    group = batch.num_heads // batch.cache.num_kv_heads
    ours = torch.ones(batch.num_heads, index.block_ids.shape[1], dtype=torch.uint8, device=DEVICE)
    expected = ours.clone()
    (slab,) = module.slabs_of_rows(method, batch.rows)
    selected, always = selected_heads(method, batch), Regions(method.sink_tokens, method.local_tokens)
    half = keys.integers.dtype == torch.float8_e4m3fn and module.adds_up_in_half(torch.device(DEVICE))
    sale_scores.first_flags(ours, index, selected, always)
    sale_scores.flag_blocks(queries, keys, ours, index, selected, always, group, slab.pairs, slab.longest, half)
    passed = flags_of(queries, keys, group, dtype)
    for i_tile, tile in enumerate(batch.rows.tile_list):
        fine = passed[:, i_tile * 128 : (i_tile + 1) * 128].any(1)
        fine = fine.unflatten(1, (-1, block_tokens // 32)).any(2)
        start = int(index.block_offsets[i_tile])
        begin = ceil_div(method.sink_tokens, block_tokens)
        end = regions(method, tile.position, tile.length_tokens)[0][1] // block_tokens
        expected[:, start + begin : start + end] = fine[:, begin:end]
    return ours, expected


@pytest.mark.parametrize(("tau", "mean"), [(0.3, 0), (0.2, 4), (0.2, 60)])
@pytest.mark.parametrize("integers", INTEGERS, ids=str)
def test_on_the_same_integers_flags_are_equal_bit_for_bit(integers, tau, mean, monkeypatch):
    """In half precision, but where means are so large that biases leave its range."""
    monkeypatch.setattr(module, "integer_dtype", lambda device: integers)
    batch = make_batch([(1300, 260)], num_heads=2)
    generator = torch.Generator(DEVICE).manual_seed(2)
    batch.q.add_(mean * torch.randn(64, generator=generator, device=DEVICE))
    method = Sale(tau)
    queries, keys = rounded_by_kernels(method, batch)
    assert queries.integers.dtype == integers
    assert float(queries.integers.float().abs().max()) == float(keys.integers.float().abs().max()) == 7
    largest = float((queries.inverse_steps.amax(1) * keys.biases[:, :1500].abs().amax(1)).min())
    assert (largest > 2048) == (mean == 60)
    ours, expected = flags_twice(method, queries, keys, batch, 64, compared_as(integers, mean < 60))
    assert torch.equal(ours, expected)
    assert 0.1 < ours.float().mean() < 0.9


@pytest.mark.parametrize("integers", INTEGERS, ids=str)
def test_what_a_row_may_reach_is_stored_beside_its_integers(integers, monkeypatch):
    monkeypatch.setattr(module, "integer_dtype", lambda device: integers)
    batch = make_batch([(300, 260)], num_heads=2)
    queries, keys = rounded_by_kernels(Sale(), batch)
    again = rounded_row(*(x.integers.float() for x in (queries, keys)), queries.thresholds, keys.biases, integers)
    for x, y in zip((queries.squares, *keys[3:6]), (again[0].squares, *again[1][3:6]), strict=True):
        assert torch.equal(x, y)
    assert bool((queries.inverse_steps[:, 260:] == 0).all())


@pytest.mark.parametrize("integers", INTEGERS, ids=str)
@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_scores_and_thresholds_below_zero(integers, block_tokens):
    """Biases that fall from key to key: in one tile blocks fail and pass at scores that are all negative."""
    batch = random_batch([(1300, 260)], 1, 1, 64, 64, torch.float32, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randint(-3, 4, (1, 384, 64), generator=generator, device=DEVICE)
    k = torch.randint(-7, 8, (1, 1664, 64), generator=generator, device=DEVICE)
    thresholds = torch.full((1, 384), -600.0, device=DEVICE)
    thresholds[:, 100:] = 200.0
    thresholds[:, 260:] = torch.inf
    biases = -1.2 * torch.arange(1664.0, device=DEVICE)[None] - 50
    row = rounded_row(q, k, thresholds, biases, integers)
    ours, expected = flags_twice(Sale(0.5), *row, batch, block_tokens, compared_as(integers))
    assert torch.equal(ours, expected)
    assert 0 in ours[:, : 1300 // block_tokens]


@pytest.mark.parametrize(("head_dim", "largest"), [(256, 7), (128, 4)])
@pytest.mark.parametrize("integers", INTEGERS, ids=str)
def test_sums_of_the_largest_integers_are_exact(integers, head_dim, largest):
    """Thresholds that a single key just reaches, and others that it misses by one, at sums up to 12,544 and 2,048."""
    batch = random_batch([(700, 130)], 1, 1, head_dim, 64, torch.float32, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randint(0, 2, (1, 256, head_dim), generator=generator, device=DEVICE) * 2 * largest - largest
    k = torch.randint(-largest, largest + 1, (1, 896, head_dim), generator=generator, device=DEVICE)
    for query in range(130):
        k[0, 37 + 4 * query] = q[0, query]
        k[0, 37 + 4 * query, : query % 5] -= q[0, query, : query % 5].sign()  # sums of 12544, 12537, …
    thresholds = (q.float() @ k.float().mT)[:, :, :600].amax(2)
    assert thresholds[:, :130].min() == largest * (largest * head_dim - 4)
    thresholds[:, 1::2] += 1
    thresholds[:, 130:] = torch.inf
    zeros = torch.zeros(1, 896, device=DEVICE)
    # Of integers there are no roundings to tell apart, in half precision where it has all of them.
    row = rounded_row(q, k, thresholds, zeros, integers)
    ours, expected = flags_twice(Sale(0.5), *row, batch, 64, torch.float32)
    assert torch.equal(ours, expected)
    assert 0 in ours


@pytest.mark.parametrize(
    ("bias", "sevens", "fits"), [(0, 0, True), (-2048, 27, True), (-2050, 0, False), (0, 28, False)]
)
@pytest.mark.parametrize("integers", INTEGERS, ids=str)
def test_half_precision_is_used_within_its_range_alone(integers, bias, sevens, fits):
    """It has no number between 1,000 and 1,000.5: there a score of 1,000.3 reaches a threshold of 1,000.4."""
    batch = random_batch([(700, 130)], 1, 1, 64, 64, torch.float32, DEVICE)
    q, k = torch.zeros(1, 256, 64, device=DEVICE), torch.zeros(1, 896, 64, device=DEVICE)
    q[0, 129, :sevens] = 7  # 27 · 49 · 64 · 49 < 2,048², 28 · 49 · 64 · 49 is more
    k[0, 400] = -7
    biases = torch.zeros(1, 896, device=DEVICE)
    biases[0, 150], biases[0, 330] = 1000.3, bias
    row = rounded_row(q, k, torch.full((1, 256), 1000.4, device=DEVICE), biases, integers)
    dtype = compared_as(integers, fits)
    ours, expected = flags_twice(Sale(0.5), *row, batch, 64, dtype)
    assert torch.equal(ours, expected)
    assert int(ours[0, 150 // 64]) == (dtype == torch.float16)


def test_slabs_hold_every_key_once_and_cut_rows_at_spans_alone():
    num_keys = [1280, 0, 128, 640, 3072, 256]
    slabs = sale_rounding.slabs_of(num_keys, 1024, 512)
    seen = [[] for _ in num_keys]
    for slab in slabs:
        assert slab[0].start == 0
        assert all(one.start + one.num_keys == other.start for one, other in pairwise(slab))
        assert 0 < slab[-1].start + slab[-1].num_keys <= 1024
        for piece in slab:
            assert piece.begin % 512 == 0
            seen[piece.row] += range(piece.begin, piece.begin + piece.num_keys)
    assert seen == [list(range(n)) for n in num_keys]


def test_memory_does_not_grow_with_the_number_of_cached_tokens():
    """256 rows of 32 new tokens over a document of 131,072: below half a gigabyte but for the index itself."""
    rows = Rows(tuple(range(0, 8192, 32)), (32,) * 256, (131_072 - 32,) * 256, torch.zeros(256, 1, dtype=torch.int32))
    assert sum(module.tested_keys(Sale(), rows)) == 256 * 130_944
    slabs = module.slabs_of_rows(Sale(), rows)
    assert len(slabs) == 256
    room = Workspace(torch.device("meta"))
    sale_rounding.room_for_keys(32, 8, module.SLAB_TOKENS, 128, torch.int8, room)
    assert room.peak_bytes < 165e6
