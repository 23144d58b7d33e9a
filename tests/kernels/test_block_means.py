# SPDX-License-Identifier: Apache-2.0
"""Means in place of dropped blocks: the reference against softmax over what is kept and the means, spelled out, and
what is theirs alone. (test_engines holds every engine against the reference.)
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from benchmarks.batches import random_batch, random_index
from tests.kernels.test_attend_options import clear_margin, lossless_batch, margins_of
from tests.kernels.test_engines import DTYPES, ENGINES, check, engine, means_of, run, same
from vllm_sparse_kernels.attend import reference
from vllm_sparse_kernels.attend.block_means import asking, make_means, mean_tokens, over_index
from vllm_sparse_kernels.attend.block_means_reference import dropped_keys, mean_blocks
from vllm_sparse_kernels.attend.options import AttendOptions
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.trial import Batch, Expected, expected_attention
from vllm_sparse_kernels.workspace import Workspace

__all__ = ["engine"]  # a fixture


def spelled_out(batch: Batch, index: SparseIndex, flags: Sequence[bool], dtype: torch.dtype):
    """out and lse, key by key: what is kept once, what is dropped by its block's mean, once for each dropped key."""
    rows, cache, width = batch.rows, batch.cache, mean_tokens(index.block_tokens)
    out = torch.full_like(batch.q, float("nan"), dtype=dtype)
    lse = out.new_full((batch.num_heads, len(batch.q)), float("nan"))
    group = batch.num_heads // cache.num_kv_heads
    for row in range(rows.num_rows):
        keys, values = (x.to(dtype) for x in cache.gather(rows.block_table[row], rows.seq_lens[row]))
        mask = index.to_mask(row)
        for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
            tile = rows.tile_list[i_tile]
            end = tile.position // index.block_tokens * index.block_tokens
            tokens = slice(tile.token, tile.token + tile.length_tokens)
            first = tile.position - rows.context_lens[row]
            for head in range(batch.num_heads):
                k, v = keys[:, head // group], values[:, head // group]
                kept = mask[head, first : first + tile.length_tokens]
                scores = (batch.q[tokens, head].to(dtype) @ k.T * batch.scale).masked_fill(~kept, -torch.inf)
                if flags[head]:
                    later = torch.zeros(len(k) - end, dtype=torch.bool, device=k.device)
                    dropped = torch.cat([~index.tile_keys(head, i_tile)[:end], later])
                    centres = [x[:end].unflatten(0, (end // width, width)).mean(1) for x in (k, v)]
                    k, v = (torch.cat((x, c.repeat_interleave(width, 0))) for x, c in zip((k, v), centres))
                    more = batch.q[tokens, head].to(dtype) @ k[len(dropped) :].T * batch.scale
                    scores = torch.cat((scores, more.masked_fill(~dropped[:end], -torch.inf)), 1)
                out[tokens, head] = scores.softmax(-1) @ v
                lse[head, tokens] = scores.logsumexp(-1)
    return out, lse


def test_heads_that_do_not_ask_stay_as_they_are(engine, device):
    """Bitwise; and no key that only they read is averaged."""
    batch = random_batch([(300, 140)], 4, 2, 64, 16, DTYPES[0], device, gap_tokens=3)
    index = random_index(batch, 64, 0.3, stripes=40)
    flags = [False, True, False, False]
    check(engine, batch, index, means_of(flags, device))
    plain, asked = (run(engine, batch, index, options) for options in (None, means_of(flags, device)))
    others = [0, 2, 3]
    assert same((plain[0][:, others], plain[1][others]), (asked[0][:, others], asked[1][others]))
    moved = (plain[0][:, 1] - asked[0][:, 1]).nan_to_num().abs().max()
    assert float(moved) > 2 * expected_attention(batch, index).out_budget, "means show nothing"
    room = Workspace(batch.rows.device, torch.full((1 << 20,), 77, dtype=torch.uint8, device=device))
    means = make_means(batch.cache, dataclasses.replace(index, workspace=room), means_of(flags, device).mean_heads)
    assert bool((means.keys[1].contiguous().view(torch.uint8) == 77).all())
    assert not bool((means.keys[0].contiguous().view(torch.uint8) == 77).all())


@pytest.mark.full
def test_a_full_index_is_left_as_it_is(engine, device):
    """Bitwise: nothing is dropped, so that nothing is added. A tile without a block before it is full, too."""
    batch = random_batch([(37, 200), (0, 90)], 4, 2, 64, 16, DTYPES[0], device, gap_tokens=1)
    index = SparseIndex.allocate(batch.rows, 4, 64)
    Dense().select(batch.q, batch.cache, index, torch.arange(4, dtype=torch.int32, device=device), batch.scale)
    options = means_of([True] * 4, device)
    assert same(run(engine, batch, index, None), run(engine, batch, index, options))
    starts = random_batch([(0, 128), (63, 60)], 2, 1, 64, 16, DTYPES[0], device)
    index = random_index(starts, 64, 0.0)
    assert same(run(engine, starts, index, None), run(engine, starts, index, means_of([True] * 2, device)))


def test_all_stripes_of_a_block_are_the_block(device):
    """A block all of whose keys are kept as stripes stands for nothing."""
    batch = random_batch([(192, 20)], 1, 1, 64, 16, DTYPES[0], device)
    index = random_index(batch, 64, 0.0, stripes=192)
    index.set_stripes(0, 0, torch.arange(64, 192, device=device))
    assert dropped_keys(index, 0, 0).tolist() == [64, 0, 0]
    means = make_means(batch.cache, index, means_of([True], device).mean_heads)
    assert means.dropped[0, :3].tolist() == [64, 0, 0]
    assert means.totals.tolist() == [[64]]


@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_means_and_counts(device, block_tokens):
    """What the kernels make of rows of any length, against the reference."""
    lengths = [(0, 1), (1000, 70), (63, 129), (128, 128)]
    batch = random_batch(lengths, 4, 2, 96, 48, DTYPES[0], device, gap_tokens=1)
    index = random_index(batch, block_tokens, 0.4, stripes=150)
    means = make_means(batch.cache, index, means_of([True] * 4, device).mean_heads)
    width = mean_tokens(block_tokens)
    for row, seq_len in enumerate(batch.rows.seq_lens):
        gathered = batch.cache.gather(batch.rows.block_table[row], seq_len)
        for x, found in zip(gathered, (means.keys, means.values), strict=True):
            wanted = mean_blocks(x.double(), block_tokens)
            start = batch.rows.key_starts[row] // width
            off = found[:, start : start + len(wanted)].transpose(0, 1).double() - wanted
            assert len(wanted) == seq_len // width
            assert not len(wanted) or float(off.abs().max()) <= 2 * torch.finfo(x.dtype).eps
    for i_tile in range(batch.rows.num_tiles):
        start = int(index.block_offsets[i_tile]) * (block_tokens // width)
        for head in range(4):
            wanted = dropped_keys(index, head, i_tile)
            assert torch.equal(means.dropped[head, start : start + len(wanted)].long(), wanted)
            assert int(means.totals[head, i_tile]) == int(wanted.sum())


def test_beside_the_other_options(device):
    """Skipped products and 8-bit scores are of what is kept; the means come on top, and are exact."""
    batch = lossless_batch([(300, 140)], 4, 2, 64, 16, DTYPES[1], device)
    index, flags = random_index(batch, 64, 0.6), [True, True, False, True]
    margin = clear_margin(margins_of(batch, index, 1))
    others = AttendOptions.of([None, margin, None, None], [False, False, False, True], torch.device(device))
    options = asking(others, flags, torch.device(device))
    wanted = torch.full_like(batch.q, float("nan"), dtype=torch.float64)
    wanted_lse = wanted.new_full((4, len(batch.q)), float("nan"))
    reference.attend(batch.q, batch.cache, index, wanted, batch.scale, wanted_lse, torch.float64, options)
    exact = expected_attention(batch, index, means_of(flags, device))
    Expected(wanted, exact.lse, exact.out_budget, exact.lse_budget).assert_close(
        *run(ENGINES["portable"], batch, index, options)
    )
    torch.testing.assert_close(wanted_lse, exact.lse, rtol=0, atol=1e-9, equal_nan=True)
    moved = (wanted - exact.out).nan_to_num().abs().amax((0, 2))
    assert float(moved[1]) > exact.out_budget, "nothing is skipped"
    assert float(moved[[0, 2, 3]].max()) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_is_softmax_over_both(dtype):
    batch = random_batch([(5, 63), (0, 1), (301, 150)], 6, 2, 32, 16, torch.float32, "cpu", gap_tokens=2)
    index, flags = random_index(batch, 64, 0.3, stripes=40), [True, False] * 3
    out = torch.full_like(batch.q, float("nan"), dtype=dtype)
    reference.attend(batch.q, batch.cache, index, out, batch.scale, None, dtype, means_of(flags, "cpu"))
    wanted, _ = spelled_out(batch, index, flags, dtype)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12, equal_nan=True)


def test_what_is_asked_for():
    device = torch.device("cpu")
    assert asking(None, [False, False], device) is None
    options = asking(None, [False, True], device)
    assert options.mean_heads.tolist() == [0, 1]
    assert over_index(options) is None
    assert over_index(None) is None
    both = asking(AttendOptions.of([None, -3.0], [False, False], device), [True, False], device)
    rest = over_index(both)
    assert rest.mean_heads is None
    assert rest.skip_margins is both.skip_margins


def test_flags_that_do_not_fit(engine, device):
    batch = random_batch([(100, 5)], 2, 1, 64, 16, DTYPES[0], device)
    index = random_index(batch, 64, 1.0)
    with pytest.raises(ValueError, match=r"mean_heads is \(3,\), expected \(2,\)"):
        run(engine, batch, index, means_of([True] * 3, device))
