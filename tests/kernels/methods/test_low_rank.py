# SPDX-License-Identifier: Apache-2.0
"""Maps of ``top_p`` to few channels: kernels against the equations in float64, and the maps' share of the scores."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.batches import Batch, random_batch, repaged
from tests.helpers.method_cases import DEVICE, DTYPES, all_lists, by_turns, row_alone, select
from tests.helpers.structured import paged_batch, structured
from vllm_sparse_kernels import Workspace, share_counts
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.methods.references import rows_of
from vllm_sparse_kernels.methods.top_p import low_rank
from vllm_sparse_kernels.methods.top_p.low_rank import fill_maps, rank_of
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import kept_channels, low_rank_maps
from vllm_sparse_kernels.share_counts import EDGES, LIFTED, SHARE_FIELDS, SUM, UNIT, count_share, least_share

LENGTHS = [(0, 1), (300, 63)]
HALF = TopP(channels="half")
LOW_RANK = TopP(kept_mass=0.6, sink_tokens=32, local_tokens=128, channels="low_rank")


def maps_of(batch: Batch, variance_shares: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernels' mean mapped keys [rows, kv heads, rank] and maps [rows, kv heads, 2, BLOCK_D, rank]."""
    shape = batch.rows.num_rows, batch.cache.num_kv_heads
    block_d = 1 << (batch.cache.head_dim - 1).bit_length()
    rank = rank_of(batch.cache.head_dim)
    means = torch.full((*shape, rank), torch.nan, device=DEVICE)
    maps = torch.full((*shape, 2, block_d, rank), torch.nan, dtype=batch.q.dtype, device=DEVICE)
    inputs = LayerInputs(batch.q, batch.cache, batch.rows, batch.scale)
    fill_maps(inputs, means, maps, Workspace(batch.rows.device), variance_shares)
    return means, maps


def make_batch(lengths: Any, heads: tuple[int, int, int], page_size: int = 16, dtype: Any = torch.float32) -> Batch:
    """Return keys around a mean far from zero, and queries. Magnitudes of channels differ by up to a factor of four."""
    batch = random_batch(lengths, *heads, page_size, dtype, DEVICE, gap_tokens=3)
    generator = torch.Generator(DEVICE).manual_seed(1)
    mean, of_keys, of_queries = torch.randn(3, heads[2], generator=generator, device=DEVICE).to(dtype)
    batch.cache.keys.mul_(2 ** of_keys.clamp(-1, 1)).add_(3 * mean)
    return replace(batch, q=batch.q * 2 ** of_queries.clamp(-1, 1))


def centered(keys: torch.Tensor) -> torch.Tensor:
    """Return a row's keys in float64 minus their mean."""
    return keys.double() - keys.double().mean(0)


@pytest.mark.parametrize(
    ("heads", "dtype", "page_size", "lengths"),
    [
        *by_turns([(2, 2, 128), (3, 1, 80)], DTYPES, [48, 16], [[(1, 1), (300, 63)]]),
        pytest.param((2, 1, 256), torch.float32, 128, [(260, 140)], marks=pytest.mark.full),
        pytest.param((2, 1, 128), torch.float16, 128, [(16_500, 130), (0, 2200)], marks=pytest.mark.full),
    ],
)
def test_products_of_mapped_vectors_are_those_of_the_equations(heads, dtype, page_size, lengths) -> None:
    """A single query; samples of all keys and of every fourth group; tiles with all of their queries, and with half.

    With a single query, or only two keys, all columns of X approach one direction, which costs precision.
    """
    batch = make_batch(lengths, heads, page_size, dtype)
    means, maps = maps_of(batch)
    for row, queries, keys in rows_of(batch.q, batch.cache, batch.rows):
        expected = low_rank_maps(queries, keys, maps.shape[4])
        of_queries, of_keys = maps[row, :, :, : heads[2]].double().unbind(1)
        q = queries.double().unflatten(1, (heads[1], -1)).transpose(0, 1).flatten(1, 2)
        scores = q @ centered(keys).permute(1, 2, 0)
        ours, theirs = (
            q @ x @ (centered(keys).transpose(0, 1) @ w).mT
            for x, w in ((of_queries, of_keys), (expected.of_queries, expected.of_keys))
        )
        error = 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert float((ours - theirs).norm()) < max(error, 1e-2 * (len(queries) == 1)) * float(scores.norm()), row
        assert float((theirs - scores).norm()) < 0.8 * float(scores.norm()), row
        mapped_mean = torch.einsum("jd,jdr->jr", expected.mean, of_keys)
        torch.testing.assert_close(means[row].double(), mapped_mean, rtol=0, atol=1e-5 * float(mapped_mean.abs().max()))
        assert bool((maps[row, :, :, heads[2] :] == 0).all())


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_rows_with_fewer_queries_or_keys_than_channels(seed: int) -> None:
    """Most columns of X depend on others. Rounding errors in what is left of them must not grow."""
    batch = random_batch([(1, 1), (3, 1), (60, 2)], 4, 2, 128, 16, torch.float32, DEVICE, seed)
    _, maps = maps_of(batch)
    for row, queries, keys in rows_of(batch.q, batch.cache, batch.rows):
        for i_kv, k in enumerate(centered(keys).unbind(1)):
            q = queries.double().unflatten(1, (2, -1))[:, i_kv].flatten(0, 1)
            of_queries, of_keys = maps[row, i_kv].double()
            held = shares_held({"maps": of_queries @ of_keys.T}, q, k)["maps"]
            assert held == pytest.approx(1, abs=1e-5), (row, i_kv)


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize(("heads", "dtype"), [((2, 2, 128), torch.float32), ((3, 1, 80), torch.float16)])
def test_the_share_of_the_score_variance_is_counted(by_reference: bool, heads: Any, dtype: Any) -> None:
    """Of each row and kv head, against 1 - ‖scores - products of mapped vectors‖² / ‖scores‖² of these samples.

    All keys and queries of these rows belong to the samples. Maps hold everything of fewer queries than they have
    channels (rows 0 and 3).
    """
    lengths = [(1, 1), (300, 63), (0, 200), (120, 8)]
    batch = make_batch(lengths, heads, 16, dtype)
    index = select(LOW_RANK, batch, by_reference=by_reference)
    assert index.variance_shares is not None
    for row, queries, keys in rows_of(batch.q, batch.cache, batch.rows):
        maps, expected = low_rank_maps(queries, keys, rank_of(heads[2])), []
        for i_kv, k in enumerate(centered(keys).unbind(1)):
            q = queries.double().unflatten(1, (heads[1], -1))[:, i_kv].flatten(0, 1)
            products = maps.of_queries[i_kv] @ maps.of_keys[i_kv].T
            expected.append(shares_held({"maps": products}, q, k)["maps"])
        line = index.variance_shares[row].tolist()
        assert sum(line[: len(EDGES) + 1]) == heads[1]
        assert line[SUM.value] / UNIT.value == pytest.approx(sum(expected), abs=0.004 * heads[1])
        assert least_share(line) == pytest.approx(min(expected), abs=0.004)
        assert (least_share(line) > 0.99) is (row in (0, 3))
        assert line[LIFTED.value] == 0


def test_shares_are_counted_in_their_buckets() -> None:
    """Each share is counted as in plain torch; what is not a number is left out, and counts of a line add up."""
    shares = torch.tensor([-0.5, 0.0, *EDGES, 0.51, 0.97, 1.0, 1.25, torch.nan], device=DEVICE)
    line, expected = (torch.zeros(SHARE_FIELDS.value, dtype=torch.int64, device=DEVICE) for _ in range(2))
    _count_shares_kernel[(len(shares),)](shares, torch.tensor(EDGES, device=DEVICE), line)
    share_counts.count_shares(expected, shares.clamp(min=0), 0)
    assert torch.equal(line, expected)
    assert int(expected[: len(EDGES) + 1].sum()) == len(shares) - 1


@triton.jit
def _count_shares_kernel(shares, edges, line):
    count_share(tl.load(shares + tl.program_id(0)), edges, line)


def test_shares_do_not_depend_on_other_rows_or_on_maps() -> None:
    """Counts of a row are the same alone and in memory that was full, and maps are the same if nothing is counted."""
    batch = make_batch([(150, 63), (40, 1), (0, 200)], (2, 1, 128), dtype=torch.float16)
    together = select(LOW_RANK, batch).variance_shares
    assert together is not None
    for row in range(3):
        (line,) = select(LOW_RANK, row_alone(batch, row)).variance_shares
        assert torch.equal(line, together[row])
    means, maps = maps_of(batch)
    counts = torch.zeros(3, SHARE_FIELDS.value, dtype=torch.int64, device=DEVICE)
    counted_means, counted_maps = maps_of(batch, counts)
    assert torch.equal(counts, together)
    assert torch.equal(maps, counted_maps)
    assert torch.equal(means, counted_means)


def test_what_maps_hold_nothing_of_is_not_counted_as_everything() -> None:
    """Directions that are equally strong: maps to a quarter of the channels hold about a quarter of the variance."""
    batch = random_batch([(4000, 600)], 2, 1, 128, 128, torch.float32, DEVICE)
    (line,) = select(LOW_RANK, batch, by_reference=DEVICE == "cpu").variance_shares
    assert 0.25 < least_share(line.tolist()) < 0.4


def test_heads_that_keep_all_channels_or_everything_count_nothing() -> None:
    for method, head_dim in ((LOW_RANK, 64), (replace(LOW_RANK, kept_mass=1.0), 128)):
        batch = make_batch([(200, 40)], (2, 1, head_dim))
        for by_reference in (False, True):
            assert not bool(select(method, batch, by_reference=by_reference).variance_shares.any())
    assert select(HALF, batch).variance_shares is None


def shares_held(estimates: dict[str, torch.Tensor], queries: torch.Tensor, keys: torch.Tensor) -> dict[str, float]:
    """Return the share of the scores' variance about each query's mean that products x yᵀ capture, in float64.

    Args:
        estimates: Matrices [head_dim, head_dim] by name; each estimates q·k as qᵀ estimate k.
        queries: [n, head_dim] of the heads that share a kv head.
        keys: [m, head_dim], minus their mean.
    """
    scores = queries @ keys.T
    return {
        name: 1 - float((queries @ estimate @ keys.T - scores).square().sum() / scores.square().sum())
        for name, estimate in estimates.items()
    }


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float16)])
def test_maps_hold_more_than_picked_channels_and_nearly_what_any_could(seed: int, dtype: torch.dtype) -> None:
    """The upper bound is the share of the truncated singular value decomposition of all scores.

    A rotation mixes the channels without changing any score, so that no channels matter alone.
    """
    data = structured(700, 1800, 4, 2, 128, torch.float32, DEVICE, seed)
    basis = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))).Q.to(DEVICE)
    q, k, v = ((x @ basis).to(dtype) for x in (data.q, data.k, data.v))
    batch = paged_batch(replace(data, q=q, k=k, v=v), 16)
    _, maps = maps_of(batch)
    ((_, queries, keys),) = rows_of(batch.q, batch.cache, batch.rows)
    sample = keys[torch.arange(len(keys), device=DEVICE) // 64 % 8 == 0]
    picked = kept_channels(HALF, sample, queries)
    for i_kv in range(2):
        q = queries[:, 2 * i_kv : 2 * i_kv + 2].double().flatten(0, 1)
        k = centered(keys)[:, i_kv]
        of_queries, of_keys = maps[0, i_kv].double()
        estimates = {"maps": of_queries @ of_keys.T, "half": picked[i_kv].double().diag()}
        held = shares_held(estimates, q, k)
        # Singular values of q kᵀ from factors of both moments: [head_dim, head_dim].
        squares = torch.linalg.svdvals(torch.linalg.qr(q).R @ torch.linalg.qr(k).R.T).square()
        most = float(squares[:32].sum() / squares.sum())
        assert held["half"] < held["maps"] <= most + 1e-6
        assert most - held["maps"] < 0.02
        share = float(low_rank_maps(queries, keys, 32).share[i_kv])
        assert share == pytest.approx(held["maps"], abs=0.02)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1e16])
def test_an_element_that_is_no_number_counts_as_zero(value: float) -> None:
    """A query and a key of a row contain it: the row's maps stay finite, and maps of other rows do not change."""
    clean = make_batch([(200, 40), (90, 30)], (2, 1, 128))
    spoilt, zeroed = (replace(clean, q=clean.q.clone(), cache=deepcopy(clean.cache)) for _ in range(2))
    for batch, element in ((spoilt, value), (zeroed, 0.0)):
        batch.q[batch.rows.query_starts[0] + 5, 1, 3] = element
        batch.cache.keys[batch.rows.block_table[0, 4], 7, 0, 100] = element
    (means, maps), (others, other_maps) = maps_of(spoilt), maps_of(zeroed)
    assert bool(maps.isfinite().all())
    assert torch.equal(maps, other_maps)
    assert torch.equal(means, others)
    assert torch.equal(maps[1], maps_of(clean)[1][1])
    assert not torch.equal(maps[0], maps_of(clean)[1][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [0.0, 1e-7, 3e3])
def test_maps_of_any_magnitude_are_finite(magnitude: float, dtype: torch.dtype) -> None:
    """Zeros, and sums of squares far from 1."""
    batch = make_batch([(0, 70), (40, 1)], (2, 1, 80), dtype=dtype)
    batch.q.mul_(magnitude)
    batch.cache.keys.mul_(magnitude)
    means, maps = maps_of(batch)
    assert bool(maps.isfinite().all())
    assert bool(means.isfinite().all())
    assert float(maps.abs().max()) < 40  # at most 1/√RIDGE, and the square root of the largest eigenvalue


def test_maps_of_a_row_do_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are bitwise the same alone, among other rows, and if fewer rows' sums fit into memory at a time."""
    batch = make_batch([(150, 63), (40, 1), (0, 200)], (2, 1, 128), dtype=torch.float16)
    together = maps_of(batch)
    monkeypatch.setattr(low_rank, "BYTES_AT_ONCE", 1)
    by_one = maps_of(batch)
    assert all(map(torch.equal, together, by_one))
    for row in range(3):
        alone = maps_of(row_alone(batch, row))
        assert all(torch.equal(x[row], y[0]) for x, y in zip(together, alone, strict=True))


@pytest.mark.full
def test_lists_of_a_row_do_not_depend_on_other_rows() -> None:
    batch = make_batch([(561, 70), (0, 63), (330, 1)], (2, 1, 128), dtype=torch.float16)
    together = select(LOW_RANK, batch)
    for row in (0, 2):
        alone = select(LOW_RANK, row_alone(repaged(batch, 48, "HND"), row))
        assert all_lists(alone) == all_lists(together, batch.rows.tiles_of(row))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_query_that_is_no_number_changes_no_list_but_its_tiles(value: float) -> None:
    batch = make_batch([(500, 140), (330, 20)], (2, 1, 128))
    zeroed, spoilt = (replace(batch, q=batch.q.clone()) for _ in range(2))
    zeroed.q[batch.rows.query_starts[0] + 5] = 0.0
    spoilt.q[batch.rows.query_starts[0] + 5] = value
    others = [1, 2]
    assert all_lists(select(LOW_RANK, spoilt, 32), others) == all_lists(select(LOW_RANK, zeroed, 32), others)


def test_a_key_that_is_no_number_leaves_valid_lists() -> None:
    """From this key on, lists of its row may keep anything, but are valid. Lists of other rows do not change."""
    batch = make_batch([(500, 140), (330, 20)], (2, 1, 128))
    spoilt = replace(batch, cache=deepcopy(batch.cache))
    spoilt.cache.keys[batch.rows.block_table[0, 12], 7] = torch.nan
    index = select(LOW_RANK, spoilt, 32)  # checks that lists ascend and stay within their causal reach
    assert bool((index.block_counts > 0).all())
    assert all_lists(index, [2]) == all_lists(select(LOW_RANK, batch, 32), [2])
