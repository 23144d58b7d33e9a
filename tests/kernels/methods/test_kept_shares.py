# SPDX-License-Identifier: Apache-2.0
"""Counts of the shares that queries keep, under a method with a floor."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.lined import DEVICE
from tests.helpers.method_cases import int32, kept_blocks, row_alone, select
from tests.helpers.top_p_cases import METHOD, WITHOUT, Bytes, make_batch
from vllm_sparse_kernels import SparseIndex, Workspace, share_counts
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods.top_p import floor as module, method as method_module
from vllm_sparse_kernels.methods.top_p.choice import ADDED, CHOSEN, mass_width
from vllm_sparse_kernels.methods.top_p.floor import FloorShares, add_for_floor, count_kept_shares
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import tile_shares
from vllm_sparse_kernels.selection.engine import SelectSpec
from vllm_sparse_kernels.share_counts import (
    EDGES,
    LIFTED,
    LOST,
    SHARE_FIELDS,
    SUM,
    UNIT,
    add_share_counts,
    merge_counts,
)

BUCKETS = len(EDGES) + 1
LENGTHS = [(1500, 5), (0, 63), (321, 1), (40, 133)]
ERROR = 0.02
"""Error of a share: half precision rounds scores up to 32 by up to 2^-7; exponentials err by as much."""


@pytest.fixture
def all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_counts, "COUNT_EVERY", 1)


def counts_of(index: SparseIndex) -> list[list[int]]:
    """Return the counts of each row."""
    assert index.kept_shares is not None
    return index.kept_shares.tolist()


def kept_of_queries(method: TopP, batch: Batch, index: SparseIndex) -> list[list[float]]:
    """Return, for each row, the shares that all queries of all heads keep, computed from the index's lists."""
    kept: list[list[float]] = [[] for _ in range(batch.rows.num_rows)]
    heads = int32(range(batch.num_heads))
    for head, i_tile, shares in tile_shares(method, batch.q, batch.cache, batch.rows, heads, batch.scale):
        blocks = kept_blocks(index, head, i_tile)
        kept[batch.rows.tile_list[i_tile].row] += (shares[:, blocks].double().sum(1) / shares.double().sum(1)).tolist()
    return kept


def assert_counted(counts: Sequence[int], shares: Sequence[float], error: float) -> None:
    """Check the counts of shares that are known up to an error."""
    assert sum(counts[:BUCKETS]) == len(shares)
    for i, edge in enumerate(EDGES):
        at_most = sum(counts[: i + 1])
        assert sum(share <= edge - error for share in shares) <= at_most, edge
        assert sum(share <= edge + error for share in shares) >= at_most, edge
    assert counts[SUM.value] / UNIT.value == pytest.approx(sum(shares), abs=(error + 1e-4) * len(shares))
    assert 1 - counts[LOST.value] / UNIT.value == pytest.approx(min(shares), abs=error + 1e-4)
    assert counts[LOST.value + 1 :] == [0] * (SHARE_FIELDS.value - LOST.value - 1)


@pytest.mark.usefixtures("all_counted")
@pytest.mark.parametrize(
    ("lengths", "heads", "dtype"),
    [
        (LENGTHS, (2, 1, 64), torch.float32),
        ([(1920, 129)], (1, 1, 32), torch.float32),
        pytest.param([(0, 2049)], (1, 1, 32), torch.float32, marks=pytest.mark.full),
        (LENGTHS[:3], (4, 2, 80), torch.float16),
    ],
    ids=str,
)
def test_counts_are_of_the_lists(lengths: Any, heads: Any, dtype: torch.dtype) -> None:
    """Kernels count as the reference does, up to rounding, and both count what the lists keep."""
    batch = make_batch(lengths, heads, dtype=dtype)
    ours, theirs = select(METHOD, batch, 32), select(METHOD, batch, 32, None, True)
    for index, error in ((ours, ERROR), (theirs, 1e-5)):
        for counts, shares in zip(counts_of(index), kept_of_queries(METHOD, batch, index), strict=True):
            assert_counted(counts, shares, error)
    lifted, expected = (torch.tensor(counts_of(index))[:, LIFTED.value] for index in (ours, theirs))
    assert int(expected.sum()) > 2
    assert bool(((lifted - expected).abs() <= 1 + 0.1 * expected).all())
    floor_units = METHOD.floor * UNIT.value
    assert max(counts[LOST.value] for counts in counts_of(theirs)) <= UNIT.value - floor_units + 1
    assert max(counts[LOST.value] for counts in counts_of(ours)) <= UNIT.value - floor_units + 1


def test_heads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile counts one of three heads; the number counted follows from positions alone."""
    monkeypatch.setattr(share_counts, "COUNT_EVERY", 3)
    batch = make_batch([(1500, 5), (0, 20), (100, 257)], (5, 1, 32))
    rows, expected = batch.rows, [0, 0, 0]
    for tile in rows.tile_list:
        heads = [head for head in range(5) if head % 3 == tile.position // 128 % 3]
        expected[tile.row] += len(heads) * tile.length_tokens
    for by_reference in (False, True):
        index = select(METHOD, batch, 32, None, by_reference)
        assert [sum(counts[:BUCKETS]) for counts in counts_of(index)] == expected


@pytest.mark.usefixtures("all_counted")
def test_counts_of_a_row_do_not_depend_on_the_batch() -> None:
    batch = make_batch(LENGTHS)
    together = counts_of(select(METHOD, batch, 32))
    for row in (0, 2, 3):
        assert counts_of(select(METHOD, row_alone(batch, row), 32)) == [together[row]]
    assert counts_of(select(METHOD, batch, 128)) == together


@pytest.mark.usefixtures("all_counted")
def test_heads_count_for_themselves() -> None:
    """In a merged launch, heads without a floor and heads that keep everything are left out."""
    batch = make_batch([(1500, 2), (0, 20)], (4, 2, 64))
    settings = [WITHOUT, METHOD, replace(METHOD, floor=0.8), replace(METHOD, kept_mass=1.0)]
    merged = TopP.merged(settings)
    for by_reference in (False, True):
        together = torch.tensor(counts_of(select(merged, batch, 32, None, by_reference)))
        first, second = (
            torch.tensor(counts_of(select(settings[head], batch, 32, [head], by_reference))) for head in (1, 2)
        )
        for counts, a, b in zip(together, first, second, strict=True):
            assert torch.equal(counts, merge_counts(a, b))
        assert together[:, :BUCKETS].sum(1).tolist() == [2 * 2, 2 * 20]
        assert not int(second[:, : EDGES.index(0.7) + 1].sum())


@pytest.mark.usefixtures("all_counted")
def test_memory_that_was_never_written_is_not_counted() -> None:
    """The workspace is full of NaN."""
    batch = make_batch(LENGTHS)
    expected = counts_of(select(METHOD, batch, 32))
    workspace = Workspace(torch.device(DEVICE), torch.full((1 << 25,), 255, dtype=torch.uint8, device=DEVICE))
    index = SparseIndex.allocate(batch.rows, 2, 32, workspace=workspace, counts_shares=True)
    METHOD.select(batch.q, batch.cache, index, int32([0, 1]), batch.scale)
    assert counts_of(index) == expected


@pytest.mark.usefixtures("all_counted")
def test_queries_whose_sums_are_not_numbers_are_left_out() -> None:
    """The reference has no share for a query of NaN, and the kernel none for a sum of NaN."""
    batch = make_batch([(700, 3)])
    batch.q[1] = float("nan")
    by_reference = counts_of(select(METHOD, batch, 32, None, True))[0]
    stored, numbers = Bytes(700, 3, num_heads=2), torch.full((2,), 0.5, device=DEVICE)
    stored.diagonal[:, 0, 1] = float("nan")
    marks = torch.zeros(2, 1, mass_width(stored.reach), dtype=torch.uint8, device=DEVICE)
    marks[:, :, 10:] = CHOSEN.value
    counts = torch.zeros(1, SHARE_FIELDS.value, dtype=torch.int64, device=DEVICE)
    count_kept_shares(stored.stored, marks, FloorShares(numbers, numbers), stored.rows.tiles, 0, counts)
    for line in (by_reference, counts[0].tolist()):
        assert sum(line[:BUCKETS]) == 4
        assert 0 < line[LOST.value] < UNIT.value
        assert 0 < line[SUM.value] < 4 * UNIT.value


@pytest.mark.parametrize("lengths", [(700, 5), (2100, 130), (3001, 1), (130, 30)], ids=str)
@pytest.mark.parametrize("steps", [1, 8])
def test_counts_of_bytes(lengths: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts the stored bytes, relative to the smaller of a query's two sums, as the floor does."""
    monkeypatch.setattr(module, "STEP_ROUNDS", steps)
    monkeypatch.setattr(share_counts, "COUNT_EVERY", 1)
    stored, floors = Bytes(*lengths, num_heads=2), torch.tensor([0.3, 0.6], device=DEVICE)
    rows = stored.rows
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(2, rows.num_tiles, mass_width(stored.reach), generator=generator)
    marks = (drawn < 0.3).byte() * CHOSEN.value + (drawn > 0.8).byte() * ADDED.value
    for i_tile, tile in enumerate(rows.tile_list):
        marks[:, i_tile, tile.position // 128 * 4 :] = CHOSEN.value
    counts = torch.zeros(1, SHARE_FIELDS.value, dtype=torch.int64, device=DEVICE)
    shares = FloorShares(torch.full((2,), 0.5, device=DEVICE), floors)
    count_kept_shares(stored.stored, marks.to(DEVICE), shares, rows.tiles, 0, counts)
    kept_shares, lifted = [], 0
    for head in range(2):
        for i_tile, tile in enumerate(rows.tile_list):
            x = stored.exponentials[head][i_tile].double()
            of_tile = marks[head, i_tile, : x.shape[1]]
            total = stored.parts[head, i_tile, :, : tile.length_tokens].nan_to_num(0.0).sum(0)
            total += stored.diagonal[head, i_tile, : tile.length_tokens]
            whole = torch.minimum(total.double(), x.sum(1))
            kept_shares += (x[:, of_tile != 0].sum(1) / whole).clamp(max=1.0).tolist()
            lifted += int((x[:, of_tile == CHOSEN.value].sum(1) < float(floors[head]) * whole).sum())
    (line,) = counts.tolist()
    assert_counted(line, kept_shares, 1e-6)
    assert line[LIFTED.value] == lifted
    assert len(set(kept_shares)) > 1


@pytest.mark.usefixtures("all_counted")
@pytest.mark.parametrize("floor", [0.5, 0.9])
def test_no_query_is_counted_below_the_floor_over_bytes(floor: float) -> None:
    """The floor and the counts refer to the same sum of a query, although bytes are rounded."""
    stored, floors = Bytes(2100, 130, num_heads=2), torch.full((2,), floor, device=DEVICE)
    rows, kept_mass = stored.rows, torch.full((2,), 0.5, device=DEVICE)
    marks = torch.zeros(2, rows.num_tiles, mass_width(stored.reach), dtype=torch.uint8, device=DEVICE)
    for i_tile, tile in enumerate(rows.tile_list):
        marks[:, i_tile, :1] = CHOSEN.value
        marks[:, i_tile, (tile.position - 128) // 32 :] = CHOSEN.value
    add_for_floor(stored.stored, marks, kept_mass, floors, rows.tiles, 0, 32, 128)
    counts = torch.zeros(1, SHARE_FIELDS.value, dtype=torch.int64, device=DEVICE)
    count_kept_shares(stored.stored, marks, FloorShares(kept_mass, floors), rows.tiles, 0, counts)
    (line,) = counts.tolist()
    assert line[LIFTED.value] == sum(line[:BUCKETS]) == 2 * 130
    assert 1 - line[LOST.value] / UNIT.value >= floor - 1 / UNIT.value


@pytest.mark.gpu
@pytest.mark.usefixtures("all_counted")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_counts_as_the_lists_say(head_dim: int) -> None:
    """A byte is off by up to a ninth, and so is a share."""
    if (reason := method_module.hopper_refusal(SelectSpec(METHOD, torch.device(DEVICE), head_dim))) is not None:
        pytest.skip(f"no Hopper kernels here: {reason}")
    batch = make_batch([(20_000, 300), (0, 2049), (5000, 1)], (8, 2, head_dim), 16, torch.bfloat16)
    index = select(METHOD, batch, 32)
    for counts, shares in zip(counts_of(index), kept_of_queries(METHOD, batch, index), strict=True):
        assert_counted(counts, shares, 0.12)
        assert 1 - counts[LOST.value] / UNIT.value >= METHOD.floor - 2 / UNIT.value


def test_without_a_floor_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm_sparse_kernels.methods.top_p.method.count_kept_shares")
    batch = make_batch([(300, 5)])
    assert not WITHOUT.counts_kept_shares
    assert select(WITHOUT, batch, 32).kept_shares is None
    assert TopP.merged([WITHOUT, METHOD]).counts_kept_shares
    with pytest.raises(NameError, match="count_kept_shares"):
        select(METHOD, batch, 32)


def test_rows_add_up() -> None:
    """Sums add up, and the largest loss of any row or step remains."""
    generator = torch.Generator().manual_seed(5)
    totals = torch.zeros(3, SHARE_FIELDS.value, dtype=torch.int64, device=DEVICE)
    expected = torch.zeros(SHARE_FIELDS.value, dtype=torch.int64)
    for num_rows in (1, 5, 2, 200):
        rows = torch.randint(0, 1 << 40, (num_rows, SHARE_FIELDS.value), generator=generator)
        add_share_counts(rows.to(DEVICE), totals, 1)
        for row in rows:
            expected = merge_counts(expected, row)
    assert torch.equal(totals[1].cpu(), expected)
    assert not bool(totals[[0, 2]].any())


def test_the_least_share() -> None:
    counts = torch.zeros(SHARE_FIELDS.value, dtype=torch.int64)
    assert share_counts.least_share(counts.tolist()) is None
    share_counts.count_shares(counts, torch.tensor([0.5, 1.0625, float("nan")]), 0)
    assert share_counts.least_share(counts.tolist()) == 0.5
    assert counts[:BUCKETS].tolist() == [0, 1, 0, 0, 0, 0, 0, 1]
    assert counts[SUM.value] == 1.5 * UNIT.value
