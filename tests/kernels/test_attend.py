"""attend: every shape it may meet against exact softmax attention over the same index.

Budgets are those of testing/budget.py: the error that eager torch makes in the same dtype, times a small factor.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_sparse_kernels.attend import attend, supports_bulk, widest_block
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select.dense import Dense
from vllm_sparse_kernels.testing.batches import Batch, random_batch, random_index
from vllm_sparse_kernels.testing.budget import expected_attention

# Triton's interpreter multiplies bf16 tiles wrongly, without an error; on a GPU vLLM's caches are bf16 or fp16.
DTYPES = [torch.bfloat16, torch.float16] if torch.cuda.is_available() else [torch.float32, torch.float16]


def run(batch: Batch, index: SparseIndex, bulk: bool | None = False) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the kernel, poisoned before."""
    out = batch.empty_out()
    lse = torch.full((batch.num_heads, len(batch.q)), float("nan"), device=batch.q.device)
    attend(batch.q, batch.cache, index, out, batch.scale, lse, bulk)
    return out, lse


def check(batch: Batch, index: SparseIndex, bulk: bool | None = False) -> None:
    index.check()
    expected_attention(batch, index).assert_close(*run(batch, index, bulk))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths",
    [[(0, 1)], [(0, 63)], [(1000, 1)], [(37, 1000)], [(5, 63), (0, 1), (301, 150), (64, 128)]],
    ids=str,
)
def test_lengths(device, lengths, dtype):
    batch = random_batch(lengths, 1, 1, 64, 16, dtype, device, gap_tokens=5)
    check(batch, random_index(batch, 64, 0.2, stripes=90))


def test_long_row(device):
    batch = random_batch([(0, 2049)], 1, 1, 64, 64, DTYPES[1], device)
    check(batch, random_index(batch, 64, 0.05, stripes=40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (6, 2), (4, 1), (8, 1)])
def test_query_heads_find_their_kv_head(device, num_heads, num_kv_heads, dtype):
    batch = random_batch([(71, 40), (0, 3)], num_heads, num_kv_heads, 64, 16, dtype, device)
    check(batch, random_index(batch, 64, 0.5, stripes=20))


@pytest.mark.parametrize(
    ("page_size", "block_tokens", "layout"),
    [
        (16, 64, "NHD"), (16, 128, "HND"), (48, 64, "HND"), (48, 128, "NHD"),
        (64, 64, "NHD"), (64, 128, "HND"), (128, 64, "HND"), (128, 128, "NHD"),
    ],
)  # fmt: skip
def test_pages(device, page_size, block_tokens, layout):
    batch = random_batch([(333, 40), (0, 50)], 2, 2, 64, page_size, DTYPES[0], device, layout=layout, gap_tokens=2)
    check(batch, random_index(batch, block_tokens, 0.5, stripes=30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "block_tokens"), [(64, 64), (64, 128), (96, 64), (96, 128), (128, 64), (128, 128), (256, 64)]
)
def test_head_dims(device, head_dim, block_tokens, dtype):
    batch = random_batch([(150, 70)], 2, 1, head_dim, 16, dtype, device)
    check(batch, random_index(batch, block_tokens, 0.5, stripes=70))


@pytest.mark.parametrize("stripes", [0, 1, 64, 200])
def test_stripes(device, stripes):
    batch = random_batch([(700, 130)], 2, 1, 64, 16, DTYPES[0], device)
    index = random_index(batch, 64, 0.1, stripes=stripes)
    assert bool(index.stripe_counts.any()) == (stripes > 0)
    check(batch, index)


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_index_is_dense_attention(device, dtype):
    """Against softmax over whole matrices, which knows neither tiles nor indices."""
    batch = random_batch([(37, 200), (0, 90)], 4, 2, 64, 16, dtype, device, gap_tokens=1)
    index = SparseIndex.allocate(batch.rows, 4, 64)
    Dense().select(batch.q, batch.cache, index, torch.arange(4, dtype=torch.int32, device=device), batch.scale)
    out, lse = run(batch, index)
    expected = expected_attention(batch, index)
    expected.assert_close(out, lse)
    for row, (token, query_len, context_len) in enumerate(
        zip(batch.rows.tokens, batch.rows.query_lens, batch.rows.context_lens, strict=True)
    ):
        keys, values = batch.cache.gather(batch.rows.block_table[row], context_len + query_len)
        q, k, v = (
            x.double().transpose(0, 1)
            for x in (batch.q[token : token + query_len], *(t.repeat_interleave(2, 1) for t in (keys, values)))
        )
        scores = q @ k.transpose(1, 2) * batch.scale
        scores = scores + torch.full_like(scores, -torch.inf).triu(context_len + 1)
        exact = (scores.softmax(-1) @ v).transpose(0, 1)
        assert float((out[token : token + query_len] - exact).abs().max()) <= expected.out_budget
        assert float((lse[:, token : token + query_len] - scores.logsumexp(-1)).abs().max()) <= expected.lse_budget


def test_other_tokens_and_lse_stay_untouched(device):
    """Tokens of no row keep what was in out, and lse may be left out."""
    batch = random_batch([(10, 70), (3, 20)], 2, 1, 64, 16, DTYPES[0], device, gap_tokens=9)
    index = random_index(batch, 64, 0.5)
    out = torch.full_like(batch.q, 7.0)
    attend(batch.q, batch.cache, index, out, batch.scale)
    owned = torch.zeros(len(batch.q), dtype=torch.bool, device=device)
    for token, query_len in zip(batch.rows.tokens, batch.rows.query_lens, strict=True):
        owned[token : token + query_len] = True
    assert (out[~owned] == 7.0).all()
    assert torch.equal(out[owned], run(batch, index)[0][owned])


def test_strided_queries_and_outputs(device):
    """vLLM's q is a slice of the fused projection, and out may be one of a larger buffer."""
    batch = random_batch([(70, 100)], 2, 1, 64, 16, DTYPES[0], device)
    index = random_index(batch, 64, 0.5, stripes=10)
    fused = batch.q.new_full((len(batch.q), 4, 64), float("nan"))
    fused[:, :2] = batch.q
    wide = batch.q.new_full((len(batch.q), 5, 64), float("nan"))
    attend(fused[:, :2], batch.cache, index, wide[:, 1:3], batch.scale, bulk=False)
    assert torch.equal(wide[:, 1:3], run(batch, index)[0])
    assert wide[:, [0, 3, 4]].isnan().all()


def test_large_scores_neither_overflow_nor_vanish(device):
    """Scores of thousands: the running maximum must be subtracted before the exponential."""
    batch = random_batch([(200, 70)], 2, 1, 64, 16, DTYPES[0], device)
    batch.q.mul_(300.0)
    check(batch, random_index(batch, 64, 0.5, stripes=30))


@pytest.mark.parametrize(
    ("page_size", "block_tokens", "layout"), [(64, 64, "HND"), (128, 64, "NHD"), (128, 128, "NHD"), (128, 128, "HND")]
)
def test_bulk_copies(device, page_size, block_tokens, layout):
    """Blocks fetched as matrices give what blocks fetched by pointers give."""
    batch = random_batch([(170, 40), (0, 50)], 2, 2, 64, page_size, torch.float16, device, layout=layout)
    index = random_index(batch, block_tokens, 0.5, stripes=30)
    by_copies = run(batch, index, bulk=True)
    expected_attention(batch, index).assert_close(*by_copies)
    assert all(torch.equal(a, b) for a, b in zip(run(batch, index), by_copies, strict=True))


@pytest.mark.parametrize(("page_size", "stride_page"), [(16, 16 * 64), (64, 64 * 64 + 8)])
def test_bulk_copies_that_cannot_be_had(device, page_size, stride_page):
    """Pages smaller than a block, and pages whose stride is no multiple of a token's."""
    keys = torch.zeros(3 * stride_page, device=device).as_strided((3, page_size, 1, 64), (stride_page, 64, 64, 1))
    rows = Rows((0,), (5,), (0,), torch.zeros(1, 1, dtype=torch.int32, device=device))
    index = SparseIndex.allocate(rows, 1, 64)
    index.set_blocks(0, 0, torch.ones(1, dtype=torch.bool, device=device))
    q = torch.zeros(5, 1, 64, device=device)
    with pytest.raises(ValueError, match="bulk copies cannot read"):
        attend(q, PagedCache(keys, keys), index, torch.empty_like(q), 1.0, bulk=True)


@pytest.mark.parametrize(
    ("q_shape", "out_shape"),
    [((5, 3, 64), (5, 3, 64)), ((5, 2, 32), (5, 2, 32)), ((5, 2, 64), (5, 2, 32))],
)
def test_shapes_that_do_not_fit(device, q_shape, out_shape):
    batch = random_batch([(0, 5)], 2, 1, 64, 16, DTYPES[0], device)
    index = random_index(batch, 64, 1.0)
    with pytest.raises(ValueError, match=r"must be \[num_tokens, 2, 64\] with heads a multiple of the cache's 1"):
        attend(torch.zeros(q_shape, device=device), batch.cache, index, torch.zeros(out_shape, device=device), 1.0)


shapes = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.tuples(st.integers(0, 150), st.integers(1, 140)), min_size=1, max_size=2),
        "group": st.sampled_from([1, 2, 3]),
        "head_dim": st.sampled_from([64, 96]),
        "page_size": st.sampled_from([16, 48, 128]),
        "block_tokens": st.sampled_from([64, 128]),
        "density": st.floats(0.0, 1.0),
        "stripes": st.integers(0, 40),
        "dtype": st.sampled_from(DTYPES),
        "layout": st.sampled_from(["NHD", "HND"]),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shapes)
def test_any_shape(shape):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = random_batch(
        shape["lengths"], shape["group"], 1, shape["head_dim"], shape["page_size"], shape["dtype"], device,
        shape["seed"], shape["layout"], gap_tokens=3,
    )  # fmt: skip
    check(batch, random_index(batch, shape["block_tokens"], shape["density"], shape["stripes"], shape["seed"]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("lengths", [[(0, 2049)], [(1000, 8192)], [(4000, 2049), (0, 63), (130, 1000)]], ids=str)
class TestOnGpu:
    @pytest.mark.parametrize(("head_dim", "block_tokens"), [(128, 64), (128, 128), (64, 128), (256, 64)])
    def test_matches_the_reference(self, lengths, bulk, dtype, head_dim, block_tokens):
        batch = random_batch(lengths, 8, 2, head_dim, 128, dtype, "cuda", gap_tokens=3)
        if bulk and not supports_bulk(batch.cache):
            pytest.skip("bulk tensor copies need Hopper or later")
        check(batch, random_index(batch, block_tokens, 0.2, stripes=200), bulk)


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(bulk):
    """One row alone and the same row among 15 others: bitwise equal outputs."""
    lengths = [(130 * i, 100 + 77 * i) for i in range(16)]
    batch = random_batch(lengths, 8, 2, 128, 128, torch.bfloat16, "cuda", gap_tokens=3)
    if bulk and not supports_bulk(batch.cache):
        pytest.skip("bulk tensor copies need Hopper or later")
    index = random_index(batch, 64, 0.3, stripes=100)
    together, lse = run(batch, index, bulk)
    for row in (0, 7, 15):
        rows = batch.rows
        alone = Rows(
            rows.tokens[row : row + 1],
            rows.query_lens[row : row + 1],
            rows.context_lens[row : row + 1],
            rows.block_table[row : row + 1],
        )
        single = random_index(Batch(batch.q, batch.cache, alone, batch.scale), 64, 0.0, stripes=100)
        for i_tile in range(alone.num_tiles):
            for head in range(8):
                source = rows.tile_starts[row] + i_tile
                kept = torch.zeros(single.num_causal_blocks(alone.tile_list[i_tile]), dtype=torch.bool, device="cuda")
                kept[index.blocks_of(head, source)] = True
                single.set_blocks(head, i_tile, kept)
                single.set_stripes(head, i_tile, index.stripes_of(head, source))
        out, single_lse = run(Batch(batch.q, batch.cache, alone, batch.scale), single, bulk)
        tokens = slice(rows.tokens[row], rows.tokens[row] + rows.query_lens[row])
        assert torch.equal(out[tokens], together[tokens])
        assert torch.equal(single_lse[:, tokens], lse[:, tokens])


@pytest.mark.parametrize(
    ("head_dim", "limit_kib", "widest"),
    [(128, 227, 128), (64, 99, 128), (128, 163, 128), (128, 99, 64), (96, 99, 64), (256, 227, 64), (256, 163, 64)],
)
def test_blocks_fit_shared_memory(head_dim, limit_kib, widest):
    """H100 has 227 KiB a program, A100 163, an RTX 4090 99."""
    assert widest_block(head_dim, limit_kib * 1024) == widest


def test_no_block_fits():
    assert widest_block(256, 99 * 1024) is None
