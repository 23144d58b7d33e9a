# SPDX-License-Identifier: Apache-2.0
"""SALE: kernel and reference against the paper's steps in float64, the kernel's arithmetic bit for bit, and the memory
of rounded keys."""

from itertools import product

import pytest
import torch

from tests.helpers.batches import every_head, new_index, random_batch
from tests.helpers.method_cases import DEVICE, DTYPES, SHAPES, by_turns, select
from tests.helpers.sale_cases import (
    assert_agrees,
    compared_as,
    definition,
    make_batch,
    regions,
    rounded_by_kernels,
)
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods.sale import method as module, scores as sale_scores
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.reference import paper_blocks
from vllm_sparse_kernels.methods.sale.rounding import (
    RoundedKeys,
    RoundedQueries,
)
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.selection.engine import SelectSpec, hopper_refusal
from vllm_sparse_kernels.selection.slabs import slabs_of

METHODS = [Sale(0.5), Sale(0.6, sink_tokens=0), Sale(0.3, sink_tokens=96, local_tokens=160)]


@pytest.mark.full
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "method"), by_turns(SHAPES, DTYPES, METHODS), ids=str)
def test_kernel_agrees_with_the_paper(shape, dtype, method, narrow):
    *sizes, block_tokens, layout = shape
    batch = make_batch(*sizes, dtype, layout=layout)
    assert_agrees(batch, method, select(method, batch, 32 if narrow else block_tokens))


@pytest.mark.full
@pytest.mark.parametrize(("shape", "method"), by_turns(SHAPES, METHODS), ids=str)
def test_reference_agrees_with_the_paper(shape, method):
    *sizes, _, layout = shape
    batch = make_batch(*sizes, layout=layout)
    num_heads = batch.num_heads
    assert_agrees(batch, method, select(method, batch, by_reference=True))
    call = batch.call(new_index(batch.rows, num_heads, 32), every_head(method, num_heads))
    ours = {(head, i): x for head, i, x in paper_blocks(call)}
    for row, head in product(range(batch.rows.num_rows), range(num_heads)):
        for i_tile, surely, maybe in definition(batch, method, row, head):
            assert bool((ours[head, i_tile] | ~surely).all() and (maybe | ~ours[head, i_tile]).all())


def test_defaults_are_the_papers():
    assert Sale() == Sale(tau=0.004, sink_tokens=32, local_tokens=128)


# Hopper's type and the general type. A GPU tests its own.
INTEGERS = [torch.int8, torch.float8_e4m3fn] if DEVICE == "cpu" else [module.integer_dtype(torch.device(DEVICE))]


def rounded_row(q, k, thresholds, biases, integers) -> tuple[RoundedQueries, RoundedKeys]:
    """Return a row of integers: queries [heads, n, d] and keys [kv heads, m, d]; all scales are 1."""
    largest = biases.abs().unflatten(1, (-1, 64)).amax(2)
    squares = q.float().square().sum(2), k.float().square().sum(2).unflatten(1, (-1, 64)).amax(2)
    ones = torch.ones_like(thresholds)
    scales = torch.ones(len(k), k.shape[1] // 8, device=DEVICE)
    queries = RoundedQueries(q.to(integers), thresholds, ones, squares[0], q.shape[1])
    return queries, RoundedKeys(k.to(integers), scales, biases, biases.half(), squares[1], largest, k.shape[1])


def flags_of(queries: RoundedQueries, keys: RoundedKeys, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Compute the kernel's arithmetic step by step. Return bool [heads, queries, 32-key blocks]: whether an element
    passes."""
    products = queries.integers.float() @ keys.integers.float().repeat_interleave(group, 0).mT
    inverse, bias = queries.inverse_scales[:, :, None].to(dtype), keys.biases[:, None, :].to(dtype)
    if DEVICE == "cuda":  # a single rounding: a fused multiply-add
        scores = (products.double() + inverse.double() * bias.double()).to(dtype)
    else:
        scores = products.to(dtype) + inverse * bias
    largest = scores.float().unflatten(2, (-1, 4, 4, 2)).amax((3, 5))
    scales = keys.scales.repeat_interleave(group, 0).unflatten(1, (-1, 4))
    return (largest * scales[:, None] >= queries.thresholds[:, :, None, None]).any(3)


def checked_flags(method: Sale, queries, keys, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Return the kernel's flags for row 0, uint8 in the layout of block_ids, after comparing them with flags that are
    recomputed here."""
    index = new_index(batch.rows, batch.num_heads, 64)
    group = batch.num_heads // batch.cache.num_kv_heads
    ours = torch.ones(batch.num_heads, index.block_ids.shape[1], dtype=torch.uint8, device=DEVICE)
    expected = ours.clone()
    (run,) = slabs_of(batch.rows, batch.num_heads, sale_scores.marks_bytes)[0].runs
    call = batch.call(index, every_head(method, batch.num_heads))
    sale_scores.first_flags(call, ours)
    in_half = hopper_refusal(SelectSpec(method, torch.device(DEVICE), batch.cache.head_dim)) is None
    sale_scores.flag_blocks(call, queries, keys, ours, run, in_half)
    passed = flags_of(queries, keys, group, dtype)
    for i_tile, tile in enumerate(batch.rows.tile_list):
        fine = passed[:, i_tile * 128 : (i_tile + 1) * 128].any(1)
        fine = fine.unflatten(1, (-1, 2)).any(2)
        start = int(index.block_offsets[i_tile])
        begin = ceil_div(method.sink_tokens, 64)
        end = regions(method, tile.position, tile.length_tokens)[0][1] // 64
        expected[:, start + begin : start + end] = fine[:, begin:end]
    assert torch.equal(ours, expected)
    return ours


@pytest.mark.parametrize(("tau", "mean"), [(0.3, 0), (0.2, 4), (0.2, 60)])
@pytest.mark.parametrize("integers", INTEGERS, ids=str)
def test_on_the_same_integers_flags_are_equal_bit_for_bit(integers, tau, mean, monkeypatch):
    """In half precision, except if means are so large that biases exceed its range."""
    monkeypatch.setattr(module, "integer_dtype", lambda device: integers)
    batch = make_batch([(1300, 260)], num_heads=2)
    generator = torch.Generator(DEVICE).manual_seed(2)
    batch.q.add_(mean * torch.randn(64, generator=generator, device=DEVICE))
    method = Sale(tau)
    queries, keys = rounded_by_kernels(method, batch)
    assert queries.integers.dtype == integers
    assert float(queries.integers.float().abs().max()) == float(keys.integers.float().abs().max()) == 7
    largest = float((queries.inverse_scales.amax(1) * keys.biases[:, :1500].abs().amax(1)).min())
    assert (largest > 2048) == (mean == 60)
    assert 0.1 < checked_flags(method, queries, keys, batch, compared_as(mean < 60)).float().mean() < 0.9


@pytest.mark.parametrize(("head_dim", "largest"), [(256, 7), (128, 4)])
@pytest.mark.parametrize("integers", INTEGERS, ids=str)
def test_sums_of_the_largest_integers_are_exact(integers, head_dim, largest):
    """Thresholds that a single key just reaches, and thresholds that it misses by one, at sums up to 12,544 and
    2,048. A bias makes all other scores negative, and most thresholds too where sums are at most 2,048."""
    batch = random_batch([(700, 130)], 1, 1, head_dim, 64, torch.float32, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randint(0, 2, (1, 256, head_dim), generator=generator, device=DEVICE) * 2 * largest - largest
    k = torch.randint(-largest, largest + 1, (1, 896, head_dim), generator=generator, device=DEVICE)
    for query in range(130):
        k[0, 37 + 4 * query] = q[0, query]
        k[0, 37 + 4 * query, : query % 5] -= q[0, query, : query % 5].sign()  # sums of 12544, 12537, …
    biases = torch.full((1, 896), -2048.0, device=DEVICE)
    thresholds = (q.float() @ k.float().mT)[:, :, :600].amax(2) - 2048
    assert thresholds[:, :130].min() == largest * (largest * head_dim - 4) - 2048
    thresholds[:, 1::2] += 1
    thresholds[:, 130:] = torch.inf
    # Half precision represents all integers near these thresholds, so no flag depends on its rounding.
    row = rounded_row(q, k, thresholds, biases, integers)
    assert 0 in checked_flags(Sale(0.5), *row, batch, torch.float32)


@pytest.mark.parametrize(
    ("bias", "sevens", "fits"), [(0, 0, True), (-2048, 27, True), (-2050, 0, False), (0, 28, False)]
)
@pytest.mark.parametrize("integers", INTEGERS, ids=str)
def test_half_precision_is_used_within_its_range_alone(integers, bias, sevens, fits):
    """Half precision has no number between 1,000 and 1,000.5, so a score of 1,000.3 would reach a threshold of
    1,000.4."""
    batch = random_batch([(700, 130)], 1, 1, 64, 64, torch.float32, DEVICE)
    q, k = torch.zeros(1, 256, 64, device=DEVICE), torch.zeros(1, 896, 64, device=DEVICE)
    q[0, 129, :sevens] = 7  # 27 · 49 · 64 · 49 < 2,048², 28 · 49 · 64 · 49 is more
    k[0, 400] = -7
    biases = torch.zeros(1, 896, device=DEVICE)
    biases[0, 150], biases[0, 330] = 1000.3, bias
    row = rounded_row(q, k, torch.full((1, 256), 1000.4, device=DEVICE), biases, integers)
    dtype = compared_as(fits)
    assert int(checked_flags(Sale(0.5), *row, batch, dtype)[0, 150 // 64]) == (dtype == torch.float16)
