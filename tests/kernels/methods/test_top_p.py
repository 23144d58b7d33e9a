# SPDX-License-Identifier: Apache-2.0
"""``top_p``: kernels against its equations in float64, guarantees of its rule, and unusual inputs and failures."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from tests.helpers.batches import every_head, new_index, random_batch
from tests.helpers.masks import density_of
from tests.helpers.method_cases import DEVICE, DTYPES, all_lists, by_turns, row_parts, select, select_on_fastest
from vllm_sparse_kernels import engine_choice
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods.top_p import method as module, portable, rounding
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import round_to_e4m3, scored_queries, tile_shares
from vllm_sparse_kernels.methods.top_p.rounding import RoundedFormat, in_e4m3
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.selection.channels import keep_heaviest
from vllm_sparse_kernels.selection.engine import SelectSpec, choose_select_engine
from vllm_sparse_kernels.selection.slabs import slabs_of

METHOD = TopP(kept_mass=0.7, ramp_tokens=1, sink_tokens=32, local_tokens=128, most_tokens=None, peak_share=1.0)
MASS_ERROR = 5e-3
"""Total error of a tile's masses: half precision rounds scores up to 32 by up to 2^-7; exponentials err by as much."""


LENGTHS = [(0, 1), (700, 63), (130, 140), (321, 1)]


def make_batch(
    lengths: Any = LENGTHS, heads: tuple[int, int, int] = (2, 1, 64), page_size: int = 16, dtype: Any = torch.float32,
    seed: int = 0,
) -> Batch:  # fmt: skip
    """Return a batch with keys around a mean far from zero, and queries that prefer some blocks of keys strongly."""
    batch = random_batch(lengths, *heads, page_size, dtype, DEVICE, seed, gap_tokens=3)
    generator = torch.Generator(DEVICE).manual_seed(seed + 1)
    batch.cache.keys.add_(3 * torch.randn(heads[1:], generator=generator, device=DEVICE).to(dtype))
    return replace(batch, q=batch.q * 2.5)


def call_of(method: TopP, batch: Batch) -> Call:
    """Return the arguments of the selection of all heads with one method."""
    index = new_index(batch.rows, batch.num_heads, 32)
    return batch.call(index, every_head(method, batch.num_heads))


def masses_of(method: TopP, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the masses from which the kernels choose: [heads, tiles, blocks], 0 past a tile's causal blocks."""
    rows = batch.rows
    capacities = [ceil_div(tile.last_position + 1, 32) for tile in rows.tile_list]
    measured = torch.zeros(batch.num_heads, rows.num_tiles, max(capacities), device=DEVICE)

    def keep(call: Any, masses: torch.Tensor, first_tile: int) -> None:
        for i in range(masses.shape[1]):
            count = capacities[first_tile + i]
            measured[:, first_tile + i, :count] = masses[:, i, :count]

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_block_lists", keep)
        select_on_fastest(call_of(method, batch))
    return measured


def exact_masses(batch: Batch, head: int, i_tile: int) -> torch.Tensor:
    """Return the masses by the equations in float64, from scores of all channels that were never rounded."""
    tile = batch.rows.tile_list[i_tile]
    queries, keys = row_parts(batch, tile.row, head)
    first = tile.position - batch.rows.context_lens[tile.row]
    scores = queries[first : first + tile.length_tokens] @ keys[: tile.last_position + 1].T * batch.scale
    scores = scores.masked_fill(torch.ones_like(scores).triu(tile.position + 1).bool(), -torch.inf)
    scores = scores[scored_queries(tile.length_tokens)]
    top = pad(scores, (0, -scores.shape[1] % 32), value=-torch.inf).unflatten(1, (-1, 32)).amax(2).exp()
    return (top / top.sum(1, keepdim=True)).mean(0)


def check_masses(method: TopP, batch: Batch, masses: torch.Tensor) -> None:
    """Check that they are the reference's masses."""
    for head, i_tile, shares in tile_shares(call_of(method, batch)):
        theirs = shares.mean(0)
        assert float((masses[head, i_tile, : len(theirs)] - theirs).abs().sum()) < MASS_ERROR, (head, i_tile)


SHAPES = [(2, 1, 64), (3, 3, 128), (4, 1, 80), (2, 2, 256)]
LONG = [(8100, 150), (0, 2049), (0, 1)]
"""More keys than a span; 2,049 new tokens; a row of a single token."""


@pytest.mark.parametrize(
    ("heads", "dtype", "page_size", "lengths"),
    [
        *by_turns(SHAPES, DTYPES, [16, 48, 128], [LENGTHS]),
        pytest.param((2, 1, 32), torch.float16, 16, LONG, marks=pytest.mark.full),
    ],
)
def test_masses_are_those_of_the_reference(heads, dtype, page_size, lengths, monkeypatch) -> None:
    batch = make_batch(lengths, heads, page_size, dtype)
    check_masses(METHOD, batch, masses_of(METHOD, batch, monkeypatch))


def test_eight_bits_are_close_to_exact_scores() -> None:
    """In tiles with several queries, errors average out. Half of the masses' difference is the mass that may be
    misplaced."""
    batch = make_batch([(1500, 300)], (2, 1, 64), dtype=torch.float32)  # all of 64 channels are multiplied
    for head, i_tile, shares in tile_shares(call_of(METHOD, batch)):
        assert float((shares.mean(0) - exact_masses(batch, head, i_tile)).abs().sum()) / 2 < 0.02


def rounded_by(batch: Batch, permuted: bool) -> list[torch.Tensor]:
    """Return rounded queries, factors, keys and steps of all rows, with 7 wherever nothing is written."""
    call = call_of(METHOD, batch)
    storage = RoundedFormat(module.estimate_channels(batch.cache.head_dim), torch.float16)
    moments = rounding.row_moments(call, storage)
    room: Any = SimpleNamespace(empty=lambda *shape, dtype=torch.float32: torch.full(shape, 7.0, dtype=dtype))
    filled = replace(call, index=replace(call.index, workspace=room))
    (slab,) = slabs_of(batch.rows, batch.num_heads, portable.tile_bytes)
    queries = rounding.round_queries(filled, moments, storage)
    return [*queries, *rounding.round_keys(filled, slab, moments, storage, permuted)]


@pytest.mark.parametrize(("head_dim", "permuted"), [(64, False), (128, True)])
def test_smaller_programs_round_to_the_same(head_dim, permuted, monkeypatch) -> None:
    """GPUs without shared memory for 128 float32 vectors round 64 or 32 at a time."""
    batch = make_batch(heads=(2, 1, head_dim))
    whole = rounded_by(batch, permuted)
    assert all(bool((part != 7).any()) for part in whole)
    for num_vectors in (64, 32):
        monkeypatch.setattr(rounding, "vectors_at_once", lambda block_d, kept_d, limit_bytes, n=num_vectors: n)
        assert all(torch.equal(a, b) for a, b in zip(whole, rounded_by(batch, permuted), strict=True))


@pytest.mark.parametrize("lengths", [[(900, 130), (0, 63), (500, 1)], [(2000, 49)]])
def test_blocks_are_kept_for_what_some_query_looks_for(lengths: Any, monkeypatch: Any) -> None:
    """All other kept blocks are the same as without peaks: a block kept for a peak does not count towards p."""
    batch = make_batch(lengths)
    method = replace(METHOD, kept_mass=0.3, peak_share=0.1)
    monkeypatch.setattr("vllm_sparse_kernels.methods.top_p.choice.HELD_BLOCKS", 32)
    index, without = select(method, batch, 32), select(replace(method, peak_share=1.0), batch, 32)
    several = 0
    for head, i_tile, shares in tile_shares(call_of(method, batch)):
        kept, most = set(index.blocks_of(head, i_tile).tolist()), shares.amax(0)
        fewest = set(without.blocks_of(head, i_tile).tolist())
        surely = set((most > 0.1 * 1.02).nonzero().flatten().tolist())
        assert fewest | surely <= kept <= fewest | set((most > 0.1 * 0.98).nonzero().flatten().tolist())
        several += len(surely - fewest)
    assert several > 3


@pytest.mark.parametrize("factor", [0.0, 1e-6, 10.0])
def test_any_magnitude_selects_as_the_reference(factor: float) -> None:
    """Vectors of zeros, and scores so far apart that a single block has all of a query's mass."""
    batch = make_batch([(600, 70)], (2, 1, 128), dtype=torch.float16)
    batch.q.mul_(factor)
    batch.cache.keys.mul_(factor)
    ours, theirs = (select(METHOD, batch, 32, by_reference=way) for way in (False, True))
    assert abs(density_of(ours) - density_of(theirs)) < 0.03


def test_scores_beyond_half_precision_give_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(600, 70)], (2, 1, 128), dtype=torch.float16)
    batch.q.mul_(1000)
    batch.cache.keys.mul_(1000)
    torch.testing.assert_close(masses_of(METHOD, batch, monkeypatch).sum(2), torch.ones(2, 1, device=DEVICE))


@pytest.mark.parametrize("num_queries", [1, 2, 3, 63, 64, 127, 128])
def test_every_second_query_is_scored_and_always_the_last(num_queries: int) -> None:
    places = scored_queries(num_queries).tolist()
    assert places == [*range(1, num_queries, 2), *([num_queries - 1] if num_queries % 2 else [])]


def test_queries_that_are_not_scored_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if they are NaN. The mean key and the channels come from keys, since all channels are multiplied."""
    batch = make_batch([(700, 255), (0, 63), (500, 1)], (2, 1, 64))
    expected = masses_of(METHOD, batch, monkeypatch)
    for tile in batch.rows.tile_list:
        scored = set(scored_queries(tile.length_tokens).tolist())
        first = batch.rows.query_starts[tile.row] + tile.position - batch.rows.context_lens[tile.row]
        for place in set(range(tile.length_tokens)) - scored:
            batch.q[first + place] = torch.nan
    assert torch.equal(masses_of(METHOD, batch, monkeypatch), expected)


def fails(error: Exception) -> Any:
    """Return a module of kernels whose first launch fails."""

    def compute_masses(*arguments: Any) -> None:
        raise error

    return SimpleNamespace(PERMUTED=False, compute_masses=compute_masses, tile_bytes=portable.tile_bytes)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no such instruction")])
def test_what_an_engine_raises_in_a_step_surfaces_and_changes_no_later_step(error, monkeypatch) -> None:
    """Out of memory or a broken kernel: no step runs on another engine, and the chosen engine stays in use."""
    batch = make_batch([(300, 40)])
    expected = all_lists(select(METHOD, batch, 32))
    with monkeypatch.context() as patch:
        patch.setattr(module, "hopper", fails(error))
        patch.setattr(module, "hopper_refusal", lambda spec: None)
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                select(METHOD, batch, 32)
        patch.setattr(module, "hopper", portable)
        patch.setattr(module, "portable", fails(error))
        assert all_lists(select(METHOD, batch, 32)) == expected


def test_why_hopper_kernels_are_refused(monkeypatch) -> None:
    spec = SelectSpec(METHOD, torch.device("cpu"), 128)
    assert module.hopper_refusal(spec) == "it is for GPUs of compute capability 9.0 (H100, H200)"
    monkeypatch.setattr(engine_choice, "capability_of", lambda device: (9, 0))
    assert module.hopper_refusal(spec) is None
    assert choose_select_engine(spec).engine.name == "hopper"
    monkeypatch.setattr(module, "hopper", None)
    monkeypatch.setattr(engine_choice, "MISSING_GLUON", "cannot import name 'tma'")
    assert "cannot import name 'tma'" in str(module.hopper_refusal(spec))
    engine, passed_over = choose_select_engine(spec)
    assert engine.name == "portable"
    assert list(passed_over) == ["hopper"]


def test_rounding_without_fp8_is_that_of_fp8() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, y):
        o = tl.arange(0, 4096)
        tl.store(y + o, in_e4m3(tl.load(x + o), tl.float16))

    every = torch.arange(1 << 7, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every <= 15]
    middles = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), torch.linspace(0, 15, 3000)])
    x = pad(torch.cat([x, -x])[:4096], (0, 4096 - min(4096, 2 * len(x)))).to(DEVICE)
    y = torch.empty(4096, dtype=torch.float16, device=DEVICE)
    kernel[(1,)](x, y)
    assert torch.equal(y.float(), x.to(torch.float8_e4m3fn).float())


def test_the_heaviest_channels_are_kept() -> None:
    """Among equal weights, the first channels. NaN counts as 0, and channels past the head's are never kept."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(weights, channels):
        keep_heaviest(channels, tl.load(weights + tl.arange(0, 128)), HEAD_DIM=96, KEPT_D=64)

    weights = torch.ones(128, device=DEVICE)
    weights[[3, 95]], weights[7], weights[96:] = 2.0, torch.nan, 9.0
    channels = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    kernel[(1,)](weights, channels)
    assert channels.tolist() == [i for i in range(64) if i != 7] + [95]


def test_the_reference_rounds_by_block() -> None:
    x = torch.randn(70, 2, 64, generator=torch.Generator().manual_seed(0))
    rounded = round_to_e4m3(x, 32)
    assert float((rounded - x).abs().max() / x.abs().max()) < 1 / 16
    largest = x[:32, 0].abs().max()
    torch.testing.assert_close(rounded[:32, 0].abs().max(), largest)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_and_portable_masses_agree(head_dim, dtype, monkeypatch) -> None:
    """With two bits of mantissa, values are off by up to a ninth in random directions, so peaks may differ."""
    if (reason := module.hopper_refusal(SelectSpec(METHOD, torch.device(DEVICE), head_dim))) is not None:
        pytest.skip(f"no Hopper kernels here: {reason}")
    batch = make_batch([(20_000, 700), (0, 2049), (5000, 1)], (8, 2, head_dim), 16, dtype)
    ours = masses_of(METHOD, batch, monkeypatch)
    share = TopP().peak_share
    few, many = (masses_of(replace(METHOD, peak_share=share * by), batch, monkeypatch) < 0 for by in (1.2, 1 / 1.2))
    monkeypatch.setattr(module, "hopper_refusal", lambda spec: "not in this half of the test")
    theirs = masses_of(METHOD, batch, monkeypatch)
    peaks = masses_of(replace(METHOD, peak_share=share), batch, monkeypatch) < 0
    assert bool(peaks.any())
    for i_tile, tile in enumerate(batch.rows.tile_list):
        diagonal = tile.position // 128 * 4  # only the sum of the diagonal blocks is comparable
        for x in (ours, theirs):
            x[:, i_tile, diagonal] = x[:, i_tile, diagonal:].sum(1)
        a, b = ours[:, i_tile, : diagonal + 1], theirs[:, i_tile, : diagonal + 1]
        assert bool(((a - b).abs() <= 0.02 * b + 0.13 * b.sqrt() / tile.length_tokens**0.5).all())
        assert bool((few <= peaks)[:, i_tile, :diagonal].all())
        assert bool((peaks <= many)[:, i_tile, :diagonal].all())


@pytest.mark.gpu
def test_rows_of_unequal_lengths_read_only_their_own_memory() -> None:
    """compute-sanitizer finds no access outside a tensor. Torch allocates each tensor separately for it.

    The driver may refuse an attribute of a kernel, and compute-sanitizer counts that. Triton's loader then does
    without: it sets the attribute for oversized shared memory.
    """
    if (reason := module.hopper_refusal(SelectSpec(METHOD, torch.device(DEVICE), 64))) is not None:
        pytest.skip(f"no Hopper kernels here: {reason}")
    if (memcheck := shutil.which("compute-sanitizer")) is None:
        pytest.skip("no compute-sanitizer here")
    case = f"{__file__}::test_hopper_and_portable_masses_agree[dtype0-64]"
    pytest_args = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu", case]
    command = [memcheck, sys.executable, "-m", "pytest", *pytest_args]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if "Host Frame" not in line]
    refusals = sum(line.endswith("on CUDA API call to cuFuncSetAttribute.") for line in lines)
    passed, summary = "1 passed" in run.stdout, lines[-1]
    assert (passed, summary.partition(": ")[2].split()[:1]) == (True, [str(refusals)]), "\n".join(lines)[-4000:]
