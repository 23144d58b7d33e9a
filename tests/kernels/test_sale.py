# SPDX-License-Identifier: Apache-2.0
"""SALE: kernel and reference against the paper's steps in float64, the kernel's arithmetic bit for bit, properties."""

import math
from dataclasses import replace
from itertools import cycle, pairwise, product
from types import SimpleNamespace

import pytest
import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.reference.sale import paper_blocks, paper_density
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.select import METHODS, sale_means, sale_rounding, sale_scores
from vllm_sparse_kernels.select import sale as module
from vllm_sparse_kernels.select.sale import Sale
from vllm_sparse_kernels.select.sale_rounding import Regions, RoundedKeys, RoundedQueries, Selected
from vllm_sparse_kernels.testing.batches import Batch, random_batch
from vllm_sparse_kernels.workspace import Workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cannot multiply bf16 matrices.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Hopper's own type and everybody's. A GPU tests the one that it takes.
INTEGERS = [torch.int8, torch.float8_e4m3fn] if DEVICE == "cpu" else [module.integer_dtype(torch.device(DEVICE))]
POISON = -7
ROUNDING = 1e-4
"""How far from a half, in steps, a value may lie that float32 rounds the other way."""
ERROR = 1e-4
"""Of a score and of the threshold in float32, in units of the softmax's exponent."""


def make_batch(lengths, num_heads=2, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32, **kwargs) -> Batch:
    """Queries and keys about a mean of their own: what smoothing takes away."""
    batch = random_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, gap_tokens=3, **kwargs)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for x in (batch.q, batch.cache.keys):
        x.add_(torch.randn(x.shape[-2:], generator=generator, device=DEVICE).to(dtype))
    return batch


def run(batch: Batch, method: Sale, block_tokens=64, heads=None, reference=False, rows=None) -> SparseIndex:
    """The selection of ``heads`` (all unless told) in an index poisoned beforehand."""
    heads = list(range(batch.num_heads)) if heads is None else heads
    index = SparseIndex.allocate(rows or batch.rows, batch.num_heads, block_tokens)
    for tensor in (index.block_counts, index.block_ids, index.stripe_counts):
        tensor.fill_(POISON)
    select = METHODS["sale"].reference if reference else Sale.select
    on_device = torch.tensor(heads, dtype=torch.int32, device=DEVICE)
    select(method, batch.q, batch.cache, index, on_device, batch.scale)
    if len(heads) == batch.num_heads:
        index.check()
    return index


def keys_of(batch: Batch, row: int, head: int) -> torch.Tensor:
    keys, _ = batch.cache.gather(batch.rows.block_table[row], batch.rows.seq_lens[row])
    return keys[:, head // (batch.num_heads // batch.cache.num_kv_heads)].double()


def regions(method: Sale, position: int, length: int) -> list[tuple[slice, int, int]]:
    """Per 64-query block of a tile at ``position``: its queries, its local region's begin, its causal 32-key blocks."""
    blocks = []
    for first in range(0, length, 64):
        queries = slice(first, min(first + 64, length))
        num_blocks = ceil_div(position + queries.stop, 32)
        middle = num_blocks * 32 - method.sink_tokens
        segments = middle // 128
        while segments > 0 and middle - segments * 128 < method.local_tokens:
            segments -= 1
        blocks.append((queries, method.sink_tokens + max(segments, 0) * 128, num_blocks))
    return blocks


def rounded(x: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, d] in 1/7 of the largest magnitude of equal ``groups``; these steps; how many values are near a half."""
    largest = torch.zeros(int(groups.max()) + 1, dtype=x.dtype, device=x.device)
    largest = largest.scatter_reduce(0, groups, x.abs().amax(1), "amax")
    steps = (largest / 7)[groups]
    in_steps = x / steps[:, None].clamp_min(1e-30)
    near = ((in_steps - in_steps.floor() - 0.5).abs() < ROUNDING).sum(1)
    return in_steps.round() * steps[:, None], steps, near


def channels_of(batch: Batch, method: Sale, row: int, head: int) -> list[int]:
    """Channels that are multiplied: all, or the half that holds most of the energy, by a sort in plain Python."""
    head_dim, group = batch.cache.head_dim, batch.num_heads // batch.cache.num_kv_heads
    if method.channels == "all" or head_dim <= 32:
        return list(range(head_dim))
    q = batch.q[batch.rows.tokens[row] :][: batch.rows.query_lens[row], head // group * group :][:, :group].double()
    k = keys_of(batch, row, head)
    energy = (k - k.mean(0)).square().mean(0) * (q - q.mean(0)).square().mean(0).sum(0)
    heaviest = sorted(range(head_dim), key=lambda d: -float(energy[d]))
    return sorted(heaviest[: {64: 32, 96: 64, 128: 64, 256: 128}[head_dim]])


def compared_as(integers: torch.dtype, fits: bool = True) -> torch.dtype:
    """What the kernel compares scores in that fit half precision or do not."""
    half = fits and integers == torch.float8_e4m3fn and module.adds_up_in_half(torch.device(DEVICE))
    return torch.float16 if half else torch.float32


def definition(batch: Batch, method: Sale, row: int, head: int):
    """The paper's steps in float64. Per tile: (surely, maybe) kept, bool [64-query blocks, causal 32-key blocks].

    The two differ where float32 could decide otherwise: by its error, and by integers that round the other way.
    """
    rows, scale = batch.rows, batch.scale
    k = keys_of(batch, row, head)
    q = batch.q[rows.tokens[row] : rows.tokens[row] + rows.query_lens[row], head].double()
    j = torch.arange(len(k), device=DEVICE)
    smooth_k, smooth_q = k - k.mean(0), q - q.mean(0)
    kept_d = channels_of(batch, method, row, head)
    left_out = [d for d in range(k.shape[1]) if d not in kept_d]
    k4, k_steps, k_near = rounded(smooth_k[:, kept_d], j // 32 * 4 + j % 8 // 2)
    q4, q_steps, q_near = rounded(smooth_q[:, kept_d], torch.arange(len(q), device=DEVICE))
    deviation = (smooth_q[:, left_out] ** 2 @ (smooth_k[:, left_out] ** 2).mean(0)).sqrt()
    for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
        tile = rows.tile_list[i_tile]
        blocks = regions(method, tile.position, tile.length_tokens)
        kept = torch.ones(2, len(blocks), blocks[-1][2], dtype=torch.bool, device=DEVICE)
        for i, (queries, local, num_blocks) in enumerate(blocks):
            first = tile.token - rows.tokens[row]
            mine, end = slice(first + queries.start, first + queries.stop), tile.position + queries.stop
            exact = q[mine] @ k[:end].T * scale
            exact.masked_fill_(j[:end] > j[end - len(exact) : end, None], -torch.inf)
            sink_local = exact[:, (j[:end] < method.sink_tokens) | (j[:end] >= local)]
            m = sink_local.amax(1, keepdim=True)
            l = (sink_local - m).exp().sum(1, keepdim=True)  # noqa: E741
            middle = slice(method.sink_tokens, local)
            product, bias = q4[mine] @ k4[middle].T, smooth_k[middle] @ q.mean(0)
            estimate = product + bias + (q[mine] @ k.mean(0))[:, None]
            half = compared_as(module.integer_dtype(q.device)) == torch.float16
            error = ERROR + half * scale * (2**-11 * (product + bias).abs() + 2**-10 * bias.abs())
            error = error + scale * 7 * q_steps[mine, None] * k_steps[middle] * (q_near[mine, None] + k_near[middle])
            for which, sign in enumerate((-1, 1)):
                lowered = estimate + deviation[mine, None]
                passed = (lowered * scale + sign * error - m).exp() / l >= method.tau
                kept[which, i, method.sink_tokens // 32 : local // 32] = passed.any(0).view(-1, 32).any(1)
                kept[which, i, num_blocks:] = False
        yield i_tile, kept[0], kept[1]


def assert_agrees(batch: Batch, method: Sale, index: SparseIndex) -> None:
    """Every block that the paper's steps surely keep is kept, and none that they surely do not."""
    kept = total = undecided = 0
    fine = index.block_tokens // 32
    for row in range(batch.rows.num_rows):
        for head in range(batch.num_heads):
            for i_tile, surely, maybe in definition(batch, method, row, head):
                tile = batch.rows.tile_list[i_tile]
                ours = torch.zeros(index.num_causal_blocks(tile), dtype=torch.bool, device=DEVICE)
                ours[index.blocks_of(head, i_tile)] = True
                surely, maybe = (
                    torch.nn.functional.pad(x.any(0), (0, len(ours) * fine - x.shape[1])).view(-1, fine).any(1)
                    for x in (surely, maybe)
                )
                diagonal = index.first_diagonal_block(tile)
                assert bool(ours[surely].all()), f"head {head}, tile {i_tile}: lacks {(surely & ~ours).nonzero()}"
                extra = (ours & ~maybe)[:diagonal]
                assert not bool(extra.any()), f"head {head}, tile {i_tile}: {extra.nonzero()} are not to be kept"
                kept, total = kept + int(ours.sum()), total + len(ours)
                undecided += int((surely != maybe).sum())
    assert undecided <= 3 + 0.03 * total, f"{undecided} of {total} blocks prove nothing"
    assert total < 100 or 0.1 < kept / total < 0.9, f"{kept} of {total}: this data tells little"


# lengths, heads, kv heads, head_dim, page size, block_tokens, physical layout, method
CASES = [
    ([(0, 1), (0, 63), (0, 1000)], 1, 1, 64, 16, 64, "NHD", Sale(0.3)),
    ([(477, 300), (300, 63)], 4, 2, 64, 64, 128, "HND", Sale(0.3)),
    ([(841, 100)], 4, 1, 64, 128, 64, "HND", Sale(0.2, sink_tokens=0)),
    ([(633, 130), (129, 1), (255, 2)], 8, 1, 64, 16, 128, "NHD", Sale(0.3, sink_tokens=96, local_tokens=160)),
    ([(1800, 249)], 1, 1, 96, 64, 64, "NHD", Sale(0.3)),
    ([(2300, 70)], 2, 1, 256, 16, 64, "NHD", Sale(0.3)),
    ([(0, 2049)], 1, 1, 128, 128, 128, "NHD", Sale(0.5)),
    ([(477, 300), (0, 63), (801, 1)], 4, 2, 64, 16, 32, "HND", Sale(0.3)),
    ([(711, 130)], 6, 2, 64, 32, 32, "NHD", Sale(0.3, sink_tokens=96, local_tokens=160)),
    ([(513, 64)], 1, 1, 64, 16, 32, "NHD", Sale(0.2, sink_tokens=0)),
    ([(477, 300), (0, 63), (801, 1)], 4, 2, 128, 16, 32, "HND", Sale(0.3, channels="half")),
    ([(633, 130), (129, 1), (255, 2)], 6, 2, 96, 64, 64, "NHD", Sale(0.4, channels="half")),
    ([(900, 70)], 8, 1, 256, 32, 32, "NHD", Sale(0.4, channels="half")),
    ([(633, 300), (0, 70)], 4, 2, 64, 16, 32, "NHD", Sale(0.3, channels="half")),
    ([(500, 130)], 1, 1, 32, 16, 32, "NHD", Sale(0.2, channels="half")),
]
# On a GPU every case runs in every type; the interpreter is slow, and takes them by turns.
PAIRS = product(CASES, DTYPES) if DEVICE == "cuda" else zip(CASES, cycle(DTYPES))


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=str)
def test_kernel_agrees_with_the_paper(case, dtype):
    lengths, num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, method = case
    batch = make_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, layout=layout)
    assert_agrees(batch, method, run(batch, method, block_tokens))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_the_paper(case):
    lengths, num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, method = case
    batch = make_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, layout=layout)
    assert_agrees(batch, method, run(batch, method, block_tokens, reference=True))
    heads = torch.arange(num_heads)
    ours = {(head, i): x for head, i, x in paper_blocks(method, batch.q, batch.cache, batch.rows, heads, batch.scale)}
    for row, head in product(range(len(lengths)), range(num_heads)):
        for i_tile, surely, maybe in definition(batch, method, row, head):
            assert bool((ours[head, i_tile] | ~surely).all() and (maybe | ~ours[head, i_tile]).all())
    density = paper_density(method, batch.q, batch.cache, batch.rows, heads, batch.scale)
    assert density == pytest.approx(
        sum(int(x.sum()) for x in ours.values())
        / sum(b[2] for t in batch.rows.tile_list for b in regions(method, t.position, t.length_tokens)) / num_heads
    )  # fmt: skip


def selected_heads(method: Sale, batch: Batch) -> Selected:
    """All of them."""
    heads = torch.arange(batch.num_heads, dtype=torch.int32, device=DEVICE)
    return Selected(heads, torch.full((len(heads),), math.log(method.tau), device=DEVICE), len(heads))


def rounded_by_kernels(method: Sale, batch: Batch) -> tuple[RoundedQueries, RoundedKeys]:
    """All rows, whose keys fit one slab."""
    q, cache, rows, room = batch.q, batch.cache, batch.rows, Workspace(torch.device(DEVICE))
    dtype, selected = module.integer_dtype(q.device), selected_heads(method, batch)
    regions = Regions(method.sink_tokens, method.local_tokens)
    kept_d = sale_means.kept_channels(cache.head_dim, method.channels == "half")
    means = sale_means.row_means(q, cache, rows, kept_d, room)
    queries = sale_rounding.round_queries(q, cache, rows, means, selected, regions, batch.scale, kept_d, dtype, room)
    (slab,) = module.slabs_of_rows(method, rows)
    num_keys = sum(module.tested_keys(method, rows))
    keys = sale_rounding.room_for_keys(selected.num_selected, cache.num_kv_heads, num_keys, kept_d, dtype, room)
    group = batch.num_heads // cache.num_kv_heads
    sale_rounding.round_keys(cache, rows, means, selected, group, slab.pieces, slab.longest, keys)
    return queries, keys


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


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("tau", [0.0, 1e-300])
def test_smallest_tau_is_dense(tau, reference):
    index = run(make_batch([(500, 140), (0, 70)]), Sale(tau), reference=reference)
    assert index.density() == 1


def test_one_element_keeps_its_block():
    batch = random_batch([(650, 200)], 2, 1, 64, 16, torch.float32, DEVICE)
    method = Sale(0.9)
    before = run(batch, method)
    token, head, position = 150, 1, 330
    # Its score with that one query is about 7, with all others about 0.
    batch.cache.keys[batch.rows.block_table[0, position // 16], position % 16, 0] = 0.9 * batch.q[token, head]
    after = run(batch, method)
    for head, i_tile in product(range(2), range(2)):
        extra = {330 // 64} if (head, i_tile) == (1, 1) else set()
        was, now = (set(index.blocks_of(head, i_tile).tolist()) for index in (before, after))
        assert now - was == extra
        assert was <= now


@pytest.mark.parametrize("reference", [False, True])
def test_sink_and_local_region_are_kept_at_any_score(reference):
    """Keys before the tile point away from its queries, those of sink and local region too."""
    batch = random_batch([(1210, 100)], 1, 1, 64, 16, torch.float32, DEVICE)
    batch.q[:] = 1 + 0.01 * batch.q
    keys = batch.cache.keys
    keys.copy_(torch.where(keys.isnan(), keys, -1 + 0.01 * keys))
    for position in range(1210, 1310):
        keys[batch.rows.block_table[0, position // 16], position % 16] = 1
    index = run(batch, Sale(0.5), 64, reference=reference)
    # The first query block ends at 1273, in its 40th block. Past the sink are 9 segments; one, and 3 blocks, are local.
    assert regions(Sale(0.5), 1210, 100)[0] == (slice(0, 64), 32 + 8 * 128, 40)
    assert index.blocks_of(0, 0).tolist() == [0, *range((32 + 8 * 128) // 64, 1310 // 64 + 1)]


def test_local_region_has_128_to_224_tokens():
    sizes = {
        num_blocks * 32 - local
        for position in range(300, 900, 17)
        for _, local, num_blocks in regions(Sale(), position, 128)
    }
    assert sizes == {128, 160, 192, 224}


@pytest.mark.parametrize("channels", ["all", "half"])
@pytest.mark.parametrize("reference", [False, True])
def test_heads_selected_together_select_what_each_selects_alone(reference, channels):
    """Four heads on two kv heads, of three τ, in the order of ``heads``: bitwise."""
    batch = make_batch([(700, 130), (0, 63), (533, 1)], 4, 2, dtype=torch.float16)
    heads, settings = [2, 0, 3, 1], [Sale(0.3), Sale(0.1), Sale(0.0), Sale(0.3, int8_scores=True)]
    settings = [replace(method, channels=channels) for method in settings]
    merged = Sale.merged(settings)
    together = run(batch, merged, heads=heads, reference=reference)
    for head, method in zip(heads, settings):
        alone = run(batch, method, heads=[head], reference=reference)
        assert torch.equal(alone.block_counts[head], together.block_counts[head])
        for i_tile in range(batch.rows.num_tiles):
            assert torch.equal(alone.blocks_of(head, i_tile), together.blocks_of(head, i_tile))
    assert len({tuple(counts) for counts in together.block_counts.tolist()}) > 2


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_channels_that_hold_nothing_need_not_be_multiplied(block_tokens):
    """Half of 128 channels are the same in all keys of the first kv head, in all queries of the second: bitwise."""
    batch = make_batch([(700, 130), (0, 63), (533, 1)], 4, 2, 128, dtype=torch.float16)
    dead = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:64].to(DEVICE)
    batch.cache.keys[:, :, 0, dead] = 0.5
    batch.q[:, 2:, dead] = 0.5
    halves, wholes = (run(batch, Sale(0.3, channels=channels), block_tokens) for channels in ("half", "all"))
    assert torch.equal(halves.block_counts, wholes.block_counts)
    for head, i_tile in product(range(4), range(batch.rows.num_tiles)):
        assert torch.equal(halves.blocks_of(head, i_tile), wholes.blocks_of(head, i_tile))
    assert halves.density() < 0.9
    queries, keys = rounded_by_kernels(Sale(0.3, channels="half"), batch)
    assert queries.integers.shape[2] == keys.integers.shape[2] == 64


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_the_channels_that_weigh_most_are_multiplied(head_dim):
    """Of the first kv head all keys of the first row are alike, and one channel of the second row holds a NaN."""
    batch = make_batch([(300, 70), (0, 140)], 6, 3, head_dim, 64)
    pages = batch.rows.block_table
    batch.cache.keys[pages[0, :6], :, 0] = 1.0
    batch.cache.keys[pages[1, 0], 5, 0, 7] = torch.nan
    kept_d = sale_means.kept_channels(head_dim, half=True)
    assert kept_d == {64: 32, 96: 64, 256: 128}[head_dim]
    means = sale_means.row_means(batch.q, batch.cache, batch.rows, kept_d, Workspace(torch.device(DEVICE)))
    assert means.channels[0, 0].tolist() == list(range(kept_d))
    assert 7 not in means.channels[1, 0]
    assert means.channels[1, 0].unique().numel() == kept_d
    assert 0 <= means.channels.min() <= means.channels.max() < head_dim
    for row, kv in product(range(2), (1, 2)):
        expected = channels_of(batch, Sale(channels="half"), row, 2 * kv)
        assert means.channels[row, kv].tolist() == expected
        variance = keys_of(batch, row, 2 * kv).var(0, correction=0)
        variance[expected] = 0
        torch.testing.assert_close(means.left_out[row, kv, :head_dim].double(), variance, rtol=1e-4, atol=0)
        assert not means.left_out[row, kv, head_dim:].any()


def test_what_is_merged():
    settings = [Sale(0.3), Sale(0.1), Sale(0.3, int8_scores=True)]
    merged = Sale.merged(settings)
    assert list(merged.of_heads(3)) == settings
    assert merged.alike == settings[0].alike == Sale()
    common = {"sink_tokens": 32, "local_tokens": 128, "channels": "all", "settings": 3}
    assert merged.summary([merged, Sale(0.3)]) == common
    assert Sale.merged(settings[:1] * 2) == settings[0]
    assert Sale(sink_tokens=64).alike != Sale().alike
    assert Sale(channels="half").alike == Sale(0.3, channels="half").alike != Sale().alike
    with pytest.raises(ValueError, match="methods alike"):
        Sale.merged([Sale(), Sale(sink_tokens=64)])


def test_higher_tau_keeps_less():
    batch = random_batch([(900, 128)], 2, 1, 64, 16, torch.float32, DEVICE)
    masks = [run(batch, Sale(tau), reference=True).to_mask(0) for tau in (0.15, 0.25, 0.35, 0.5)]
    for more, less in pairwise(masks):
        assert bool((more | ~less).all())
        assert int(more.sum()) > int(less.sum())


@pytest.mark.parametrize("channels", ["all", "half"])
def test_rows_do_not_depend_on_each_other(channels):
    batch = make_batch([(330, 130), (0, 65), (600, 65)])
    rows, method = batch.rows, Sale(0.4, channels=channels)
    together = run(batch, method)
    for row in range(3):
        of_rows = (rows.tokens, rows.query_lens, rows.context_lens, rows.block_table)
        one = Rows(*(x[row : row + 1] for x in of_rows))
        alone = run(batch, method, rows=one)
        for i, head in product(range(one.num_tiles), range(2)):
            assert torch.equal(alone.blocks_of(head, i), together.blocks_of(head, rows.tile_starts[row] + i))


def test_rows_in_slabs_select_what_they_select_together(monkeypatch):
    """Three rows of which two are cut, in slabs of 512 keys and in one; bitwise, blocks of 32."""
    batch = make_batch([(1211, 130), (700, 5), (300, 70)], 4, 2)
    methods = [Sale(0.3), Sale(0.0), Sale(0.4), Sale(0.2)]
    monkeypatch.setattr(sale_scores, "SPAN_TOKENS", 256)
    together = run(batch, Sale.merged(methods), 32)
    batch.rows.state.clear()
    monkeypatch.setattr(module, "SLAB_TOKENS", 512)
    assert len(module.slabs_of_rows(methods[0], batch.rows)) > 3
    apart = run(batch, Sale.merged(methods), 32)
    assert torch.equal(apart.block_counts, together.block_counts)
    for head, i_tile in product(range(4), range(batch.rows.num_tiles)):
        assert torch.equal(apart.blocks_of(head, i_tile), together.blocks_of(head, i_tile))
    assert 0.1 < together.density() < 0.9


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


def test_pages_and_layout_do_not_matter():
    batch = make_batch([(555, 70)], num_heads=2, num_kv_heads=2, page_size=16)
    expected = run(batch, Sale(0.4))
    keys, values = batch.cache.gather(batch.rows.block_table[0], 625)
    for page_size, layout in ((64, "HND"), (128, "NHD")):
        other = random_batch([(555, 70)], 2, 2, 64, page_size, torch.float32, DEVICE, layout=layout)
        positions = torch.arange(625, device=DEVICE)
        pages = other.rows.block_table[0, positions // page_size].long()
        other.cache.keys[pages, positions % page_size] = keys
        other.cache.values[pages, positions % page_size] = values
        moved = Batch(batch.q, PagedCache(other.cache.keys, other.cache.values), other.rows, batch.scale)
        index = run(moved, Sale(0.4))
        for head in range(2):
            assert torch.equal(index.blocks_of(head, 0), expected.blocks_of(head, 0))


@pytest.mark.parametrize("reference", [False, True])
def test_other_heads_are_left_alone(reference):
    batch = make_batch([(600, 70)], num_heads=8, num_kv_heads=4)
    everyone, some = run(batch, Sale(0.4), reference=True), run(batch, Sale(0.4), heads=[6, 1], reference=reference)
    assert torch.equal(some.block_counts[[1, 6]], everyone.block_counts[[1, 6]])
    assert bool((some.stripe_counts[[1, 6]] == 0).all())
    others = [0, 2, 3, 4, 5, 7]
    assert bool((some.block_counts[others] == POISON).all() and (some.block_ids[others] == POISON).all())
    assert bool((some.stripe_counts[others] == POISON).all())


@pytest.mark.parametrize(
    ("field", "value"),
    [("tau", -0.1), ("tau", 1.0), ("tau", math.nan), ("sink_tokens", 16), ("sink_tokens", -32), ("local_tokens", 96),
     ("local_tokens", 130), ("sink_tokens", 32.0), ("channels", "most"), ("channels", 64)],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}: given {value!r}, expected"):
        Sale(**{field: value})


def test_defaults_are_the_papers():
    assert Sale() == Sale(tau=0.004, sink_tokens=32, local_tokens=128)


def test_a_hopper_kernel_that_does_not_compile_is_done_without(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no such layout")

    monkeypatch.setattr(sale_scores, "UNUSABLE", [])
    monkeypatch.setattr(sale_scores.sale_hopper, "half_kernel", Broken())
    rounded = SimpleNamespace(integers=None)
    assert not sale_scores._test_on_hopper((1, 1, 1), rounded, rounded, (), torch.empty(0), {})
    assert sale_scores.UNUSABLE == ["RuntimeError: no such layout"]
