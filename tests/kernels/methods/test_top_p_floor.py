# SPDX-License-Identifier: Apache-2.0
"""The floor of ``top_p``: no query keeps less of its own estimated attention, and no block is added without need."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.method_cases import DEVICE, DTYPES, all_lists, by_turns, int32, kept_blocks, row_alone, select
from tests.helpers.top_p_cases import METHOD, WITHOUT, Bytes, make_batch
from vllm_sparse_kernels.methods.top_p import floor as module, method as method_module
from vllm_sparse_kernels.methods.top_p.choice import ADDED, CHOSEN, mass_width
from vllm_sparse_kernels.methods.top_p.floor import add_for_floor
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import below_floor, tile_shares
from vllm_sparse_kernels.selection.engine import SelectSpec

LENGTHS = [(1500, 5), (0, 63), (321, 1)]
SHARE_ERROR = 0.02
"""Error of a query's kept share: half precision rounds scores up to 32 by up to 2^-7; exponentials err by as much."""


def added_by_sorting(shares: torch.Tensor, kept: torch.Tensor, floor: float) -> set[int]:
    """Return the blocks that queries add, computed query by query in float64."""
    added: set[int] = set()
    for of_query in shares.double():
        held, goal = float(of_query[kept].sum()), floor * float(of_query.sum())
        others = [block for block in range(len(kept)) if not kept[block] and of_query[block] > 0]
        for block in sorted(others, key=lambda block: (-float(of_query[block]), block)):
            if held >= goal:
                break
            held += float(of_query[block])
            added.add(block)
    return added


def least_share(shares: torch.Tensor, kept: torch.Tensor) -> float:
    """Return the smallest share of its own attention that any query keeps."""
    return float(shares[:, kept].sum(1).min())


@pytest.mark.parametrize(
    ("heads", "dtype", "page_size", "floor"),
    [*by_turns([(2, 1, 64), (3, 3, 32), (4, 1, 80)], DTYPES, [16, 48, 128], [0.5, 0.3, 0.9])],
)
def test_no_query_stays_below_the_floor(heads: Any, dtype: torch.dtype, page_size: int, floor: float) -> None:
    """This holds for kernels and reference, which add the same blocks except where rounding of shares decides."""
    batch, method = make_batch(LENGTHS, heads, page_size, dtype), replace(METHOD, floor=floor)
    ours, theirs, without = (
        select(*case) for case in ((method, batch, 32), (method, batch, 32, None, True), (WITHOUT, batch, 32))
    )
    lifted = partly = differing = kept = 0
    all_heads = int32(range(heads[0]))
    for head, i_tile, shares in tile_shares(method, batch.q, batch.cache, batch.rows, all_heads, batch.scale):
        before, a, b = (kept_blocks(index, head, i_tile) for index in (without, ours, theirs))
        assert least_share(shares, b) >= floor - 1e-5
        assert least_share(shares, a) >= floor - SHARE_ERROR
        assert not bool((before & ~a).any())
        lifted += least_share(shares, before) < floor - SHARE_ERROR
        partly += int(before.sum()) < int(a.sum()) < len(a)
        differing, kept = differing + int((a ^ b).sum()), kept + int(b.sum())
    assert min(lifted, partly) >= 2
    assert differing <= 0.03 * kept


@pytest.mark.parametrize("floor", [0.25, 0.5, 0.99])
def test_the_reference_adds_the_fewest_blocks_of_each_query(floor: float) -> None:
    generator = torch.Generator().manual_seed(3)
    shares = (4 * torch.randn(9, 40, generator=generator)).softmax(1)
    shares[2] = 1 / 40  # equal shares: the first blocks are added
    shares[3] = torch.eye(40)[17]  # a single block has everything
    kept = torch.arange(40) % 7 == 1
    ours = below_floor(replace(METHOD, floor=floor), shares, kept)
    assert set(ours.nonzero().flatten().tolist()) == added_by_sorting(shares, kept, floor)
    assert not bool((ours & kept).any())
    assert not bool(below_floor(WITHOUT, shares, kept).any())


def test_equal_shares_go_by_position() -> None:
    """All keys are equal: a query adds as many of the first blocks between sink and local region as it lacks."""
    batch = make_batch([(1023, 1)], (1, 1, 64))
    batch.cache.keys.nan_to_num_(0.0).fill_(0.5)
    method = replace(METHOD, kept_mass=0.01)
    forced = [0, *range((1023 - 128) // 32, 32)]
    for by_reference in (False, True):
        blocks = select(method, batch, 32, None, by_reference).blocks_of(0, 0).tolist()
        assert blocks == sorted({*forced, *range(1, 1 + 16 - len(forced))})


@pytest.mark.parametrize("block_tokens", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_floor_that_nobody_is_below_changes_nothing(block_tokens: int, dtype: torch.dtype) -> None:
    """Lists that are written from marks equal lists that are written directly, bit for bit."""
    batch = make_batch([(900, 130), (0, 63), (500, 1)], dtype=dtype)
    low, without = replace(METHOD, floor=1e-9), replace(WITHOUT, peak_share=0.3)
    low = replace(low, peak_share=0.3)
    assert all_lists(select(low, batch, block_tokens)) == all_lists(select(without, batch, block_tokens))


def test_without_a_floor_no_marks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(300, 5)])
    for name in ("mark_blocks", "add_for_floor", "write_marked_lists"):
        monkeypatch.delattr(f"vllm_sparse_kernels.methods.top_p.method.{name}")
    select(WITHOUT, batch, 32)
    with pytest.raises(NameError, match="mark_blocks"):
        select(METHOD, batch, 32)


def test_queries_do_not_depend_on_other_rows_or_on_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(600, 5), (0, 40), (450, 3)])
    together = select(METHOD, batch, 32)
    for row in (0, 2):
        assert all_lists(select(METHOD, row_alone(batch, row), 32)) == all_lists(together, batch.rows.tiles_of(row))
    monkeypatch.setattr(module, "HELD_BLOCKS", 8)
    assert all_lists(select(METHOD, batch, 32)) == all_lists(together)


def test_each_head_has_its_own_floor() -> None:
    """In a single launch, heads without a floor, with a low or high floor, or keeping everything: bitwise as alone."""
    batch = make_batch([(1500, 2), (0, 20)], (4, 2, 64))
    settings = [WITHOUT, METHOD, replace(METHOD, floor=0.8), replace(METHOD, kept_mass=1.0)]
    together = select(TopP.merged(settings), batch, 32)
    counts = together.block_counts[:, 0].tolist()
    assert counts[0] < counts[1] < counts[2] < counts[3] == 47
    for head, setting in enumerate(settings):
        alone = select(setting, batch, 32, [head])
        assert all_lists(alone, heads=[head]) == all_lists(together, heads=[head])


def test_a_request_with_its_own_p_keeps_the_floors() -> None:
    merged = TopP.merged([WITHOUT, METHOD, METHOD])
    heads = merged.with_kept_mass(0.3).of_heads(3)
    assert [head.floor for head in heads] == [0.0, 0.5, 0.5]
    assert {(head.kept_mass, head.most_share) for head in heads} == {(0.3, 1.0)}
    assert METHOD.with_kept_mass(0.3) == replace(METHOD, kept_mass=0.3, most_share=1.0)


def test_a_floor_gets_a_trial_of_its_own() -> None:
    """A floor needs other kernels, but heads of the same launch may have different floors."""
    assert METHOD.group_key == WITHOUT.group_key
    assert METHOD.size_key != WITHOUT.size_key == WITHOUT.group_key
    assert TopP.merged([WITHOUT, METHOD]).size_key == METHOD.size_key


@pytest.mark.parametrize(
    ("lengths", "floors", "steps", "held"),
    [
        ((700, 5), (0.6, 0.0), 8, 1024),
        ((2100, 130), (0.25, 0.3), 2, 1024),
        ((3001, 3), (0.6, 0.95), 1, 16),
        ((3001, 1), (0.9, 0.98), 8, 32),
        ((90, 30), (0.5, 0.5), 8, 1024),
    ],
    ids=str,
)
def test_blocks_are_added_by_bytes(lengths: Any, floors: Sequence[float], steps: int, held: int, monkeypatch) -> None:
    """The kernel applies the rule exactly to the stored bytes.

    It keeps existing marks, and does not read bytes that were never written. A query's sum is the sum before rounding
    or the sum of the bytes, whichever is smaller, so a floor near 1 adds some blocks but not all.
    """
    monkeypatch.setattr(module, "STEP_ROUNDS", steps)
    monkeypatch.setattr(module, "HELD_BLOCKS", held)
    stored = Bytes(*lengths, num_heads=2)
    rows, width = stored.rows, mass_width(stored.reach)
    generator = torch.Generator().manual_seed(1)
    marks = (torch.rand(2, rows.num_tiles, width, generator=generator) < 0.08).byte() * CHOSEN.value
    for i_tile, tile in enumerate(rows.tile_list):
        marks[:, i_tile, :1] = CHOSEN.value
        marks[:, i_tile, max(tile.position - 128, 0) // 32 :] = CHOSEN.value
    before, marks = marks.clone(), marks.to(DEVICE)
    kept_mass, few = torch.full((2,), 0.5, device=DEVICE), torch.tensor(floors, device=DEVICE)
    add_for_floor(stored.stored, marks, kept_mass, few, rows.tiles, 0, 32, 128)
    lacked = left = 0
    for head in range(2):
        for i_tile, tile in enumerate(rows.tile_list):
            x = stored.exponentials[head][i_tile]
            count = x.shape[1]
            kept = before[head, i_tile, :count] == CHOSEN.value
            sums = stored.parts[head, i_tile, :, : tile.length_tokens].nan_to_num(0.0).sum(0)
            sums += stored.diagonal[head, i_tile, : tile.length_tokens]
            expected: set[int] = set()
            for of_query, total in zip(x, sums, strict=True):
                floor = floors[head] * min(float(total / of_query.sum()), 1.0)
                expected |= added_by_sorting(of_query[None], kept, floor)
            lacked += len(expected)
            left += count - int(kept.sum()) - len(expected)
            ours = marks[head, i_tile, :count].cpu()
            assert set((ours == ADDED.value).nonzero().flatten().tolist()) == expected
            assert torch.equal(ours == CHOSEN.value, kept)
    assert min(lacked, left) > 3 or lengths == (90, 30)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_keeps_the_floor_but_for_the_rounding_of_bytes(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte is off by up to a ninth, and so is a query's sum of bytes. Equal bytes are ordered by position."""
    if (reason := method_module.hopper_refusal(SelectSpec(METHOD, torch.device(DEVICE), head_dim))) is not None:
        pytest.skip(f"no Hopper kernels here: {reason}")
    batch = make_batch([(20_000, 300), (0, 2049), (5000, 1)], (8, 2, head_dim), 16, torch.bfloat16)
    ours, without = select(METHOD, batch, 32), select(WITHOUT, batch, 32)
    monkeypatch.setattr(method_module, "hopper_refusal", lambda spec: "not in this half of the test")
    theirs = select(METHOD, batch, 32)
    lifted = differing = kept = 0
    for head, i_tile, shares in tile_shares(METHOD, batch.q, batch.cache, batch.rows, int32(range(8)), batch.scale):
        before, a, b = (kept_blocks(index, head, i_tile) for index in (without, ours, theirs))
        assert least_share(shares, a) >= 0.5 * (8 / 9) * 0.9 - SHARE_ERROR
        assert least_share(shares, b) >= 0.5 - SHARE_ERROR
        assert not bool((before & ~a).any())
        lifted += least_share(shares, before) < 0.4
        differing, kept = differing + int((a ^ b).sum()), kept + int(b.sum())
    assert lifted
    assert differing <= 0.25 * kept
