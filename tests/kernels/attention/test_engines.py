# SPDX-License-Identifier: Apache-2.0
"""Every engine in every supported shape, against exact softmax attention over the same index.

If an engine refuses a case, the test is skipped with its reason. Outputs are poisoned with NaN, and so are all places
of the cache that no position owns, as far as the engine promises not to read them. The error budget is the error of
eager torch in the same dtype, times a small factor.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.batches import assert_close, every_head, new_index, random_batch, random_index, repaged
from tests.helpers.engine_cases import (
    DTYPES,
    ENGINES,
    FULL,
    READS_PAST_THE_END,
    check,
    flash_attention,
    independent,
    run,
    same,
)
from tests.helpers.method_cases import by_turns
from tests.helpers.paged_varlen import paged_varlen
from vllm_sparse_kernels import engine_choice
from vllm_sparse_kernels.attention import HOPPER, PORTABLE, AttendEngine, AttendSpec, FlashAttention
from vllm_sparse_kernels.attention.flash import engine as flash_module
from vllm_sparse_kernels.attention.flash.engine import PART_SEQUENCES, flash_engine
from vllm_sparse_kernels.engine_trial import Batch, expected_attention
from vllm_sparse_kernels.index import SparseIndex, StripeLayout
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.paged import FP8
from vllm_sparse_kernels.selection.engine import SelectSpec
from vllm_sparse_kernels.workspace import Workspace

EACH_DTYPE = [DTYPES[0], pytest.param(DTYPES[1], marks=FULL)]


Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> AttendEngine:
    return ENGINES[request.param]


USUAL = {"lengths": [(150, 70), (0, 3)], "heads": (2, 1), "head_dim": 64, "page_size": 16, "block_tokens": 64}
USUAL |= {"layout": "NHD", "density": 0.5, "stripes": 30, "dtype": DTYPES[0]}
# Tiles that begin anywhere in a block and cover one to five blocks, whole and cut short.
ASKEW = [(c, 130) for c in (1, 31, 33, 97, 127, 129)] + [(c, 33) for c in (0, 31, 32, 64, 128, 191)]
DIAGONALS = {"lengths": ASKEW, "heads": (1, 1), "page_size": 128, "density": 0.3, "stripes": 0}
LENGTHS = [[(0, 63)], [(1000, 1)], [(37, 1000)], [(5, 63), (0, 1), (301, 150), (64, 128)]]
STRIPED = {"lengths": [(700, 130)], "density": 0.1}
QUICK = [
    {"lengths": LENGTHS[3], "heads": (1, 1), "density": 0.2, "stripes": 90},
    {"lengths": [(1000, 1), (0, 63)], "heads": (6, 2), "head_dim": 96},
    DIAGONALS,
    STRIPED | {"stripes": 64},
]
OTHERS = [
    *({"lengths": lengths, "heads": (1, 1), "density": 0.2, "stripes": 90} for lengths in LENGTHS[:3]),
    {"lengths": [(0, 2049)], "heads": (1, 1), "page_size": 64, "density": 0.05, "stripes": 40},
    *({"heads": heads} for heads in ((2, 2), (4, 2), (4, 1), (8, 1), (6, 2))),
    *(
        {"page_size": page_size, "block_tokens": block_tokens, "layout": layout, "lengths": [(333, 40), (0, 50)]}
        for page_size, block_tokens, layout in product((16, 48, 64, 128), (32, 64, 128), ("NHD", "HND"))
    ),
    *({"head_dim": head_dim, "block_tokens": 64} for head_dim in (64, 96, 128, 256)),
    *({"head_dim": head_dim, "block_tokens": 128} for head_dim in (64, 96, 128)),
    *(
        {"head_dim": 256, "page_size": 128, "block_tokens": block_tokens} | case
        for block_tokens in (32, 64)
        for case in (
            {"lengths": LENGTHS[3], "heads": (4, 1)},
            {"lengths": ASKEW, "stripes": 0},
            STRIPED | {"stripes": 64},
        )
    ),
    *(DIAGONALS | {"block_tokens": block_tokens} for block_tokens in (32, 128)),
    *(STRIPED | {"stripes": stripes} for stripes in (0, 1, 200)),
]
OTHERS += [case | {"dtype": DTYPES[1]} for case in QUICK + OTHERS if "page_size" not in case]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=FULL) for case in OTHERS)], ids=str)
def test_softmax_over_the_index(engine, device, case):
    """Lengths, head counts, head sizes, pages, blocks, layouts, stripes: each case has at most a single unusual
    property."""
    batch, index = made(USUAL | case, device)
    if case.get("lengths") == STRIPED["lengths"]:
        assert bool(index.stripe_counts.any()) == (case["stripes"] > 0)
    check(engine, batch, index)


def made(shape: dict[str, Any], device: str, seed: int = 0) -> tuple[Batch, SparseIndex]:
    more = {"layout": shape["layout"], "gap_tokens": 3}
    sizes = *shape["heads"], shape["head_dim"], shape["page_size"]
    batch = random_batch(shape["lengths"], *sizes, shape["dtype"], device, seed, **more)
    return batch, random_index(batch, shape["block_tokens"], shape["density"], shape["stripes"], seed)


def test_stripes_of_some_heads_and_tiles(engine, device):
    """Only one of four heads has room for stripes, and some of its tiles keep none: empty lists next to full lists."""
    batch = random_batch([(300, 300), (0, 40)], 4, 2, 64, 16, DTYPES[0], device)
    index = new_index(batch.rows, 4, 64, {2: StripeLayout.per_tile(batch.rows, 50)})
    for i_tile, tile in enumerate(batch.rows.tile_list):
        for head in range(4):
            index.set_blocks(head, i_tile, torch.zeros(index.num_causal_blocks(tile), dtype=torch.bool, device=device))
    index.set_stripes(2, 1, torch.arange(0, 100, 3, device=device))
    check(engine, batch, index)


@FULL
def test_stripes_that_tiles_share(engine, device):
    """In AnchorAttention, the tiles of a group share a list."""
    batch = random_batch([(700, 300)], 2, 1, 64, 16, torch.float16, device)
    method = AnchorAttention(theta=2.7, step_tiles=2)
    index = new_index(batch.rows, 2, 64, dict.fromkeys((0, 1), method.stripe_layout(batch.rows)))
    method.select(batch.call(index, every_head(method, 2)))
    assert bool((index.stripe_counts > 0).any())
    assert int(index.stripe_counts.max()) <= index.longest_stripes < len(index.stripe_positions)
    check(engine, batch, index)


@pytest.mark.parametrize("sinks", [[-math.inf, 0.0, 5.0, 12.0], [-60.0] * 4, pytest.param([20.0] * 4, marks=FULL)])
@pytest.mark.parametrize(
    "case",
    [
        {"heads": (4, 2)},
        *(
            pytest.param({"head_dim": head_dim, "heads": heads, "dtype": dtype, "page_size": 128}, marks=FULL)
            for head_dim, heads, dtype in by_turns((64, 128, 256), ((4, 4), (4, 1)), DTYPES)
        ),
    ],
    ids=str,
)
def test_sinks_join_the_softmax(engine, device, sinks, case):
    """A logit per head, from negligible to larger than every score: equal or different between heads."""
    batch, index = made(USUAL | {"block_tokens": 64} | case, device)
    dtype = torch.bfloat16 if batch.q.dtype == torch.bfloat16 else torch.float32  # in the dtype of the weights
    batch = dataclasses.replace(batch, sinks=torch.tensor(sinks, dtype=dtype, device=device))
    check(engine, batch, index)


@pytest.mark.parametrize("sinks", [None, [-30.0, 0.0, 5.0, 12.0]])
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_full_index_is_dense_attention(engine, device, dtype, sinks):
    """The expected value is the softmax over whole matrices, without tiles or indices."""
    batch = random_batch([(37, 200), (0, 90)], 4, 2, 64, 16, dtype, device, gap_tokens=1)
    if sinks is not None:
        batch = dataclasses.replace(batch, sinks=torch.tensor(sinks, device=device))
    index = new_index(batch.rows, 4, 64)
    Dense().select(batch.call(index, every_head(Dense(), 4)))
    out, expected = run(engine, batch, index), expected_attention(batch, index)
    assert_close(expected, out)
    rows = batch.rows
    for row, (token, query_len) in enumerate(zip(rows.query_starts, rows.query_lens, strict=True)):
        tokens = slice(token, token + query_len)
        cached = (x.repeat_interleave(2, 1) for x in batch.cache.gather(rows.block_table[row], rows.seq_lens[row]))
        q, k, v = (x.double().transpose(0, 1) for x in (batch.q[tokens], *cached))
        scores = q @ k.transpose(1, 2) * batch.scale
        scores = scores + torch.full_like(scores, -torch.inf).triu(rows.context_lens[row] + 1)
        others = torch.tensor(sinks or [-torch.inf] * 4, device=device).double().exp()[:, None, None]
        exact = (scores.exp() / (scores.exp().sum(-1, keepdim=True) + others) @ v).transpose(0, 1)
        assert float((out[tokens] - exact).abs().max()) <= expected.budget


def test_nothing_else_is_written(engine, device):
    """Tokens outside of all rows keep their value in out, and the cache is unchanged. vLLM's q is a slice of the fused
    projection, and out may be part of a larger buffer."""
    batch = random_batch([(100, 70), (3, 20)], 2, 1, 64, 16, DTYPES[0], device, gap_tokens=9)
    index = random_index(batch, 64, 0.5, stripes=10)
    whole = run(engine, batch, index)
    fused, wide = (torch.full((len(batch.q), n, 64), 7.0, dtype=batch.q.dtype, device=device) for n in (4, 5))
    fused[:, :2] = batch.q
    before = batch.cache.keys.clone()
    engine.attend(replace(batch.call(index), q=fused[:, :2]), wide[:, 1:3])
    assert torch.equal(wide[:, 1:3], whole.nan_to_num(nan=7.0))
    assert (wide[:, [0, 3, 4]] == 7.0).all()
    assert same(before, batch.cache.keys)


def test_large_scores_neither_overflow_nor_vanish(engine, device):
    """With scores of thousands, the running maximum must be subtracted before the exponential."""
    batch = random_batch([(200, 70)], 2, 1, 64, 16, DTYPES[0], device)
    batch.q.mul_(300.0)
    check(engine, batch, random_index(batch, 64, 0.5, stripes=30))


def test_temporary_tensors_come_from_the_workspace(engine, device):
    """A poisoned workspace does not change the result, and the engine's memory is counted."""
    batch = random_batch([(200, 170)], 2, 1, 64, 64, DTYPES[0], device)
    workspace = Workspace(torch.device(device), torch.full((1 << 22,), 255, dtype=torch.uint8, device=device))
    results = []
    for room in (None, workspace):
        index = new_index(batch.rows, 2, 64, workspace=room)
        Dense().select(batch.call(index, every_head(Dense(), 2)))
        index.workspace.peak_bytes = before = index.workspace.used_bytes
        results.append(run(engine, batch, index))
    assert same(*results)
    assert engine is PORTABLE or workspace.peak_bytes > before


FEW, SIXTEEN = [(333, 140), (530, 1), (200, 30)], [(130 * i, 100 + 77 * i) for i in range(16)]


@pytest.mark.parametrize(
    ("lengths", "chosen", "shape", "stripes"),
    [
        (FEW, range(3), (2, 1, 64, 16), 70),
        *(
            pytest.param(SIXTEEN, (0, 7, 15), (8, 2, head_dim, 128), stripes, marks=pytest.mark.gpu)
            for head_dim, stripes in product((128, 256), (0, 100))
        ),
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(engine, device, lengths, chosen, shape, stripes):
    """Results are bitwise the same with any other rows in the batch."""
    batch = random_batch(lengths, *shape, DTYPES[0], device, gap_tokens=3)
    independent(engine, batch, random_index(batch, 64, 0.5, stripes=stripes), chosen)


@pytest.mark.parametrize(
    ("page_size", "layout"),
    [
        (48, "HND"), (128, "BHLNC"), *(pytest.param(*case, marks=FULL) for case in ((16, "NHD"), (128, "HND"))),
        *(pytest.param(128, layout, marks=FULL) for layout in ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC")),
    ],
)  # fmt: skip
def test_a_row_does_not_depend_on_pages(engine, device, page_size, layout):
    """Results are bitwise the same for any page size, placement of pages, and layout that vLLM's backends may get."""
    batch = random_batch([(333, 140), (20, 5)], 4, 2, 64, 64, DTYPES[0], device)
    index = random_index(batch, 64, 0.5, stripes=70)
    other = repaged(batch, page_size, layout)
    moved = dataclasses.replace(index, rows=other.rows)
    assert same(run(engine, batch, index), run(engine, other, moved))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[(0, 2049)], [(1000, 8192)], [(4000, 2049), (0, 63), (130, 1000)]], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "block_tokens"),
    [(128, 32), (128, 64), (128, 128), (96, 64), (64, 64), (64, 128), (256, 32), (256, 64)],
)
def test_long_rows_on_gpu(lengths, dtype, head_dim, block_tokens):
    """A single test for every engine that accepts long rows, because the expected result takes longest."""
    batch = random_batch(lengths, 8, 2, head_dim, 128, dtype, "cuda", gap_tokens=3)
    index = random_index(batch, block_tokens, 0.2, stripes=200)
    index.check()
    expected, spec = expected_attention(batch, index), AttendSpec.of(batch.cache, index, None)
    for engine in sorted(ENGINES.values(), key=lambda engine: engine.name in READS_PAST_THE_END):
        if engine is PORTABLE or engine.refusal(spec) is None:
            assert_close(expected, run(engine, batch, index))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks_are_what_vllms_flash_attention_takes_them_for(engine, head_dim):
    """The index keeps everything. Only version 3 accepts sinks."""
    flash = flash_attention()
    if flash is None or FP8 not in flash.dtypes:
        pytest.skip("no FlashAttention-3 here")
    batch = random_batch([(300, 700)], 8, 2, head_dim, 128, torch.bfloat16, "cuda")
    sinks = torch.linspace(-5, 12, 8, dtype=torch.bfloat16, device="cuda")
    batch, index = dataclasses.replace(batch, sinks=sinks), random_index(batch, 64, 1.0)
    out = run(engine, batch, index)
    keys, values = (side.nan_to_num(nan=1e3) for side in (batch.cache.keys, batch.cache.values))
    ends, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 700], [1000]))
    stock = flash.varlen(
        q=batch.q, k=keys, v=values, cu_seqlens_q=ends, max_seqlen_q=700, seqused_k=lengths, max_seqlen_k=1000,
        softmax_scale=batch.scale, causal=True, block_table=batch.rows.block_table[:, :8].contiguous(), s_aux=sinks,
    )  # fmt: skip
    expected = expected_attention(batch, index)
    for result in (out, stock):
        assert_close(expected, result)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("stripes", [0, 200])
def test_the_same_however_often(engine, stripes, head_dim):
    """Races occur once in a thousand launches, and more often if items differ more in length.

    Short rows give items with a single step, which ends past the row and has no stripes.
    """
    lengths = [(32768, 8192), (5000, 777), *[(0, 1), (0, 63)] * 20]
    batch = random_batch(lengths, 8, 2, head_dim, 128, torch.bfloat16, "cuda")
    index, few = (random_index(batch, 64, density, stripes, seed) for seed, density in enumerate((0.1, 0.003)))
    for of_index, of_few in ((index.block_counts, few.block_counts), (index.block_ids, few.block_ids)):
        of_index[1::2] = of_few[1::2]
    expected = run(engine, batch, index)
    assert not expected.isnan().any()
    assert all(same(run(engine, batch, index), expected) for _ in range(2000))


class TestFlash:
    @FULL
    def test_parts_change_nothing(self, device, monkeypatch):
        """Sequences run a few at a time, cut within a kv head, a tile and a group of heads."""
        batch = random_batch([(70, 300), (3, 20)], 6, 2, 64, 16, DTYPES[0], device)
        index = random_index(batch, 64, 0.5, stripes=40)
        whole = run(ENGINES["flash"], batch, index)
        for sequences in (1, 5, 7):
            monkeypatch.setattr(flash_module, "PART_SEQUENCES", sequences)
            assert same(run(ENGINES["flash"], batch, index), whole)

    @FULL
    def test_the_workspace_bounds_what_runs_at_once(self, device, monkeypatch):
        batch = random_batch([(500, 300)], 4, 2, 64, 16, DTYPES[0], device)
        peaks = []
        for limit in (1 << 30, 1 << 18):
            monkeypatch.setattr(flash_module, "PART_BYTES", limit)
            index = random_index(batch, 64, 0.5, stripes=400)
            used = index.workspace.used_bytes
            run(ENGINES["flash"], batch, index)
            assert index.workspace.used_bytes == used
            peaks.append(index.workspace.peak_bytes - used)
        assert peaks[1] <= (1 << 18) + 8 * 256 < peaks[0]

    def test_of_version(self):
        called = {}
        for version, max_seqlen_q in ((2, 128), (3, 256)):
            flash = FlashAttention.of_version(version, lambda **given: called.update(given))
            flash.varlen(causal=True)
            assert called == {"causal": True, "fa_version": version, "num_splits": 1}
            assert flash.max_seqlen_q == max_seqlen_q
        assert PART_SEQUENCES < 1 << 16

    @pytest.mark.parametrize(
        ("version", "changes", "says"),
        [
            (3, {}, None),
            (2, {"has_stripes": False}, None),
            (2, {}, "single keys need pages of 1 token"),
            (2, {"has_stripes": False, "page_size": 24}, "pages of 8 tokens would be needed"),
            (3, {"skips": True}, "the skip of products: FlashAttention has no such option"),
            (3, {"int8": True}, "8-bit scores"),
            (3, {"dtype": torch.float32}, "not torch.float32"),
            (3, {"head_dim": 100}, "head_dim 100"),
            (3, {"head_dim": 512}, "head_dim 512"),
            (3, {"strides": (16 * 204, 204, 4)}, "not multiples of 16 bytes"),
            (0, {}, "there is no FlashAttention for this device"),
        ],
    )
    def test_refusals(self, version, changes, says):
        flash = flash_engine(FlashAttention.of_version(version, paged_varlen) if version else None)
        why = flash.refusal(dataclasses.replace(SPEC, **changes))
        assert (why is None) if says is None else (says in why)


SPEC = AttendSpec(
    torch.device("cpu"), torch.float16, 64, 16, (16 * 128, 128, 16 * 128), block_tokens=64, has_stripes=True
)


@pytest.mark.parametrize(
    ("head_dim", "block_tokens", "says"),
    [
        *((128, block_tokens, None) for block_tokens in (32, 64, 128)),
        (256, 32, None),
        (256, 64, None),
        (256, 128, "blocks of 128 keys with head_dim 256 do not fit into shared memory"),
        (96, 64, "head_dim 64, 128 and 256, not torch.float16 with 96"),
    ],
)
def test_what_hopper_takes(monkeypatch, head_dim, block_tokens, says):
    monkeypatch.setattr(engine_choice, "capability_of", lambda device: (9, 0))
    for page_size in (16, 48, 128, 528, 7808):  # the longer ones as in hybrids
        strides = (page_size * 4 * head_dim, 4 * head_dim, 2 * head_dim)
        changes = {"head_dim": head_dim, "block_tokens": block_tokens, "page_size": page_size, "strides": strides}
        why = HOPPER.refusal(dataclasses.replace(SPEC, **changes))
        assert (why is None) if says is None else (says in why)


@pytest.mark.parametrize("strides", [(2000, 128, 64), (2048, 128, 192), (2048, 132, 4)])
def test_hopper_refuses_caches_that_are_no_matrix_of_tokens(monkeypatch, strides):
    """Pages, or kv heads beyond a token's row, do not begin at a row; or rows are not multiples of 16 bytes."""
    monkeypatch.setattr(engine_choice, "capability_of", lambda device: (9, 0))
    why = HOPPER.refusal(dataclasses.replace(SPEC, strides=strides))
    assert f"the cache's strides {strides} do not form a matrix" in why


def test_all_kernels_in_gluon_name_what_gluon_lacks(monkeypatch):
    monkeypatch.setattr(engine_choice, "HOPPER_CAPABILITY", (0, 0))  # that of a CPU
    monkeypatch.setattr(engine_choice, "MISSING_GLUON", "cannot import name 'tma'")
    refusals = [HOPPER.refusal(SPEC)]
    for method in (Sale(), TopP()):
        refusals.append(method.select_engines[0].refusal(SelectSpec(method, SPEC.device, SPEC.head_dim)))
    assert set(refusals) == {"it needs Triton 3.6 to 3.9, whose Gluon has all names (cannot import name 'tma')"}


class TestChoice:
    """The choice of an engine. For refused engines and failed trials, see serving/worker/test_engine_picker.py."""

    def test_portable_is_last_and_has_all(self, device):
        assert list(ENGINES)[-1] == "portable"
        spec = dataclasses.replace(SPEC, device=torch.device(device), skips=True, int8=True)
        assert PORTABLE.refusal(spec) is None
