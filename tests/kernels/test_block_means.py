# SPDX-License-Identifier: Apache-2.0
"""Means in place of dropped blocks: every engine, against softmax over what is kept and the means, spelled out."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from benchmarks.batches import random_batch, random_index, repaged
from tests.kernels.test_attend_options import clear_margin, lossless_batch, margins_of
from tests.kernels.test_engines import DTYPES, ENGINES, READS_PAST_THE_END, part_of, same
from vllm_sparse_kernels.attend import AttendSpec, Engine, attend, reference
from vllm_sparse_kernels.attend.block_means import asking, make_means, mean_tokens, over_index
from vllm_sparse_kernels.attend.block_means_reference import dropped_keys, mean_blocks
from vllm_sparse_kernels.attend.options import AttendOptions
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.trial import Batch, Expected, error_budget
from vllm_sparse_kernels.workspace import Workspace


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


def means_of(flags: Sequence[bool], device: str) -> AttendOptions:
    options = asking(None, flags, torch.device(device))
    assert options is not None
    return options


def run(engine: Engine, batch: Batch, index: SparseIndex, options: AttendOptions | None):
    """out and lse of an engine, poisoned before. Skips the test where the engine refuses."""
    why = engine.refusal(AttendSpec.of(batch.cache, index, options))
    if why is not None:
        pytest.skip(f"{engine.name}: {why}")
    if engine.name in READS_PAST_THE_END:
        for side in (batch.cache.keys, batch.cache.values):
            side.nan_to_num_(nan=1e3)
    out = batch.empty_out()
    lse = torch.full((batch.num_heads, len(batch.q)), float("nan"), device=batch.q.device)
    attend(batch.q, batch.cache, index, out, batch.scale, lse, options, engine)
    return out, lse


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


def expected(batch: Batch, index: SparseIndex, flags: Sequence[bool]) -> Expected:
    (out, lse), (eager_out, eager_lse) = (
        spelled_out(batch, index, flags, dtype) for dtype in (torch.float64, batch.q.dtype)
    )
    return Expected(out, lse, error_budget(eager_out, out), error_budget(eager_lse, lse))


def check(engine: Engine, batch: Batch, index: SparseIndex, flags: Sequence[bool] | None = None) -> None:
    flags = [True] * batch.num_heads if flags is None else flags
    index.check()
    wanted = expected(batch, index, flags)
    got = run(engine, batch, index, means_of(flags, str(batch.q.device)))
    wanted.assert_close(*got)
    without = spelled_out(batch, index, [False] * batch.num_heads, torch.float64)
    asked = torch.tensor(flags, device=batch.q.device)
    assert float((without[0] - wanted.out)[:, asked].nan_to_num().abs().max()) > 2 * wanted.out_budget, "shows nothing"
    assert torch.equal(without[0][:, ~asked].nan_to_num(), wanted.out[:, ~asked].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[(1000, 1)], [(37, 700)], [(5, 63), (0, 1), (301, 150), (64, 128)]], ids=str)
def test_lengths(engine, device, lengths, dtype):
    batch = random_batch(lengths, 1, 1, 64, 16, dtype, device, gap_tokens=5)
    check(engine, batch, random_index(batch, 64, 0.2, stripes=90))


def test_long_row(engine, device):
    batch = random_batch([(0, 2049)], 1, 1, 64, 64, DTYPES[1], device)
    check(engine, batch, random_index(batch, 64, 0.05, stripes=40))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (4, 1), (8, 1)])
def test_query_heads_find_their_kv_head(engine, device, num_heads, num_kv_heads):
    batch = random_batch([(171, 40), (70, 3)], num_heads, num_kv_heads, 64, 16, DTYPES[0], device)
    check(engine, batch, random_index(batch, 64, 0.3, stripes=20))


@pytest.mark.parametrize("block_tokens", [32, 64, 128])
@pytest.mark.parametrize("page_size", [48, 128])
def test_pages(engine, device, page_size, block_tokens):
    batch = random_batch([(433, 40), (130, 50)], 2, 2, 64, page_size, DTYPES[0], device, gap_tokens=2)
    check(engine, batch, random_index(batch, block_tokens, 0.3, stripes=30))


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_a_diagonal_anywhere(engine, device, block_tokens):
    lengths = [(c, 130) for c in (31, 97, 129)] + [(c, 33) for c in (31, 64, 128, 191)]
    batch = random_batch(lengths, 1, 1, 64, 128, DTYPES[0], device)
    check(engine, batch, random_index(batch, block_tokens, 0.3))


@pytest.mark.parametrize(("head_dim", "block_tokens"), [(96, 64), (128, 128), (256, 64)])
def test_head_dims(engine, device, head_dim, block_tokens):
    batch = random_batch([(250, 70)], 2, 1, head_dim, 16, DTYPES[0], device)
    check(engine, batch, random_index(batch, block_tokens, 0.3, stripes=70))


def test_heads_that_do_not_ask_stay_as_they_are(engine, device):
    """Bitwise; and no key that only they read is averaged."""
    batch = random_batch([(300, 140)], 4, 2, 64, 16, DTYPES[0], device, gap_tokens=3)
    index = random_index(batch, 64, 0.3, stripes=40)
    flags = [False, True, False, False]
    check(engine, batch, index, flags)
    plain, asked = (run(engine, batch, index, options) for options in (None, means_of(flags, device)))
    others = [0, 2, 3]
    assert same((plain[0][:, others], plain[1][others]), (asked[0][:, others], asked[1][others]))
    room = Workspace(batch.rows.device, torch.full((1 << 20,), 77, dtype=torch.uint8, device=device))
    means = make_means(batch.cache, dataclasses.replace(index, workspace=room), means_of(flags, device).mean_heads)
    assert bool((means.keys[1].contiguous().view(torch.uint8) == 77).all())
    assert not bool((means.keys[0].contiguous().view(torch.uint8) == 77).all())


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


def test_a_row_does_not_depend_on_its_neighbours(engine, device):
    """Bitwise, whatever else is in the batch."""
    batch = random_batch([(333, 140), (530, 1), (200, 30)], 2, 1, 64, 16, DTYPES[0], device, gap_tokens=3)
    index, options = random_index(batch, 64, 0.3, stripes=70), means_of([True] * 2, device)
    together, lse = run(engine, batch, index, options)
    for row in range(3):
        out, single_lse = run(engine, *part_of(batch, index, row), options)
        tokens = slice(batch.rows.tokens[row], batch.rows.tokens[row] + batch.rows.query_lens[row])
        assert same((out[tokens], single_lse[:, tokens]), (together[tokens], lse[:, tokens]))


@pytest.mark.parametrize(("page_size", "layout"), [(16, "NHD"), (48, "HND"), (128, "HND")])
def test_a_row_does_not_depend_on_pages(engine, device, page_size, layout):
    batch = random_batch([(333, 140), (20, 5)], 4, 2, 64, 64, DTYPES[0], device)
    index, options = random_index(batch, 64, 0.3, stripes=70), means_of([True] * 4, device)
    other = repaged(batch, page_size, layout)
    moved = dataclasses.replace(index, rows=other.rows)
    assert same(run(engine, batch, index, options), run(engine, other, moved, options))


def test_outputs_elsewhere_and_without_a_log_sum_exp(engine, device):
    """vLLM's q is a slice of the fused projection, out may be one of a larger buffer, and lse is left out."""
    batch = random_batch([(170, 100)], 2, 1, 64, 16, DTYPES[0], device, gap_tokens=4)
    index, options = random_index(batch, 64, 0.3, stripes=10), means_of([True] * 2, device)
    whole = run(engine, batch, index, options)[0]
    fused, wide = (batch.q.new_full((len(batch.q), n, 64), float("nan")) for n in (4, 5))
    fused[:, :2] = batch.q
    attend(fused[:, :2], batch.cache, index, wide[:, 1:3], batch.scale, options=options, engine=engine)
    assert torch.equal(wide[:, 1:3].nan_to_num(nan=7), whole.nan_to_num(nan=7))
    assert wide[:, [0, 3, 4]].isnan().all()


def test_large_scores_neither_overflow_nor_vanish(engine, device):
    batch = random_batch([(300, 70)], 2, 1, 64, 16, DTYPES[0], device)
    batch.q.mul_(300.0)
    index = random_index(batch, 64, 0.3, stripes=30)
    expected(batch, index, [True] * 2).assert_close(*run(engine, batch, index, means_of([True] * 2, device)))


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
    exact = expected(batch, index, flags)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(128, 32), (128, 64), (128, 128), (64, 128), (256, 64)])
@pytest.mark.parametrize("lengths", [[(3000, 2049)], [(4000, 1000), (700, 63), (1300, 129)]], ids=str)
def test_on_gpu(engine, lengths, head_dim, block_tokens, dtype):
    batch = random_batch(lengths, 8, 2, head_dim, 128, dtype, "cuda", gap_tokens=2)
    check(engine, batch, random_index(batch, block_tokens, 0.2, stripes=200), [True, False, True, True] * 2)
