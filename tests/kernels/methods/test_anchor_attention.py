# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention: the kernel against the reference, the reference against the paper, and consequences of both."""

from itertools import groupby, pairwise

import pytest
import torch

from tests.helpers.batches import random_batch
from tests.helpers.masks import density_of, mask_of, tile_keys
from tests.helpers.method_cases import DEVICE, DTYPES, SHAPES, all_lists, by_turns, row_parts, select
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.anchor_attention import kernels, method as module
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.anchor_attention.reference import anchor_differences
from vllm_sparse_kernels.rows import Rows, ceil_div


def make_batch(lengths, num_heads=2, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32, **kwargs) -> Batch:
    """Return a batch in which each head's queries point in a direction, so their means score some keys far above
    others."""
    batch = random_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, gap_tokens=3, **kwargs)
    generator = torch.Generator(DEVICE).manual_seed(1)
    batch.q.add_(torch.randn(num_heads, head_dim, generator=generator, device=DEVICE).to(dtype))
    return batch


def groups_of(batch: Batch, method: AnchorAttention):
    """Return (row, window start, [(tile id, tile)]) of every group."""
    span = method.span_tokens
    starts = [(tile.row, tile.position // span * span) for tile in batch.rows.tile_list]
    for (row, start), members in groupby(enumerate(batch.rows.tile_list), lambda numbered: starts[numbered[0]]):
        yield row, start, list(members)


def in_blocks(kept: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Extend kept keys to whole blocks: bool [a multiple of ``block_tokens``]."""
    return kept.view(-1, block_tokens).any(1).repeat_interleave(block_tokens)


def group_differences(batch: Batch, method: AnchorAttention, row, start, tiles, head, dtype) -> torch.Tensor:
    """Return equation 2's left side in ``dtype``: [tiles, candidates]."""
    k = row_parts(batch, row, head, dtype)[1]
    q = batch.q[:, head].to(dtype)
    return anchor_differences(method, [tile for _, tile in tiles], q, k, start, batch.scale).double()


def assert_listed_as_blocks(index: SparseIndex) -> None:
    """Check that a tile lists a block if it keeps all of its keys. Together with ``check``, this fixes a selection's
    form."""
    for i_tile, tile in enumerate(index.rows.tile_list):
        diagonal = index.first_diagonal_block(tile)
        for head in range(index.num_heads):
            keys = tile_keys(index, head, i_tile)[: diagonal * index.block_tokens]
            whole = keys.view(-1, index.block_tokens).all(1).nonzero().flatten()
            blocks = index.blocks_of(head, i_tile)
            assert torch.equal(blocks[blocks < diagonal], whole), f"head {head}, tile {i_tile}"


def assert_agree(batch: Batch, method: AnchorAttention, index: SparseIndex, reference: SparseIndex) -> None:
    """Check that both keep the same keys, except votes that float64 puts within twice the eager error of θ."""
    assert_listed_as_blocks(index)
    kept = candidates = 0
    for row, start, tiles in groups_of(batch, method):
        for head in range(batch.num_heads):
            doubtful = torch.zeros(start, dtype=torch.bool, device=DEVICE)
            if start > kernels.INITIAL.value:
                exact = group_differences(batch, method, row, start, tiles, head, torch.float64)
                eager = group_differences(batch, method, row, start, tiles, head, batch.q.dtype)
                margin = 2 * (eager - exact).abs().max()
                doubtful[kernels.INITIAL.value :] = (exact - method.theta).abs().amin(0) <= margin
                if method.whole_blocks:
                    doubtful = in_blocks(doubtful, index.block_tokens)
            for i_tile, _ in tiles:
                ours, theirs = (tile_keys(i, head, i_tile) for i in (index, reference))
                differ = ours ^ theirs
                differ[:start] &= ~doubtful
                assert not differ.any(), f"head {head}, tile {i_tile}, keys {differ.nonzero().flatten().tolist()}"
                kept += int(ours[kernels.INITIAL.value : start].sum())
                candidates += max(start - kernels.INITIAL.value, 0)
    assert candidates == 0 or 0.02 < kept / candidates < 0.98, f"{kept} of {candidates}: this data tells little"


# Runs that need few votes have more tokens between voting queries, because random data would keep all of them.
SETTINGS = [
    {"theta": 3.0},
    {"sample_tokens": 64, "whole_blocks": True},
    {"sample_tokens": 2, "theta": 0.2},
    {"sample_tokens": 16},
    {"whole_blocks": True, "theta": 2.0},
    {"sample_tokens": 128, "whole_blocks": True, "theta": 1.0},
]
LONG = ([(3 * kernels.LIST_SPLIT.value // 2, 60)], 2, 1, 64, 16, 64, "NHD")  # lists are written in stretches


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "dtype", "step_tiles", "settings"),
    [
        (LONG, DTYPES[0], 16, SETTINGS[0]),
        *by_turns(SHAPES, DTYPES, (1, 3, 8), SETTINGS[:1]),
        *by_turns(SHAPES, DTYPES, (1, 3, 8), SETTINGS[1:]),
    ],
    ids=str,
)
def test_kernel_agrees_with_reference(shape, dtype, step_tiles, settings):
    *sizes, block_tokens, layout = shape
    block_tokens = 32 if "whole_blocks" in settings else block_tokens
    batch = make_batch(*sizes, dtype, layout=layout)
    method = AnchorAttention(**{"theta": 0.5, "step_tiles": step_tiles} | settings)
    index = select(method, batch, block_tokens)
    assert_agree(batch, method, index, select(method, batch, block_tokens, by_reference=True))
    assert not method.whole_blocks or method.stripe_layout(batch.rows).capacity == 0


@pytest.mark.full
def test_groups_of_more_tiles_than_vote_at_once(monkeypatch):
    monkeypatch.setattr(module, "MOST_VOTERS", 16)
    batch = make_batch([(2176, 2060)], num_heads=1)
    method = AnchorAttention(theta=3.0, step_tiles=17)
    assert max(len(tiles) for _, _, tiles in groups_of(batch, method)) > 16
    assert_agree(batch, method, select(method, batch), select(method, batch, by_reference=True))


def definition(batch: Batch, method: AnchorAttention, row: int, head: int) -> torch.Tensor:
    """Return the paper's mask in float64, from whole score matrices: bool [query_len, seq_len]."""
    rows, span = batch.rows, method.step_tiles * 128
    context_len, query_len = rows.context_lens[row], rows.query_lens[row]
    q, k = row_parts(batch, row, head)
    positions = torch.arange(len(k), device=DEVICE)
    group_of = [(context_len + i // 128 * 128) // span for i in range(query_len)]  # of each query's tile
    kept = torch.zeros(query_len, len(k), dtype=torch.bool, device=DEVICE)
    scores = (q @ k.T * batch.scale).masked_fill(kept.logical_not().triu(context_len + 1), -torch.inf)
    for group in set(group_of):
        anchor_region = (positions < 128) | (positions >= group * span)
        queries = [i for i in range(query_len) if group_of[i] == group]
        stripes = torch.zeros_like(anchor_region)
        for _, tile in groupby(queries, lambda i: i // 128):
            tile = list(tile)
            x_a = scores[tile][:, anchor_region].amax(1)
            if method.sample_tokens:
                voters = {min(i | (method.sample_tokens - 1), len(tile) - 1) for i in range(len(tile))}
                for i in voters:
                    stripes |= x_a[i] - k @ q[tile[i]] * batch.scale <= method.theta
            else:
                stripes |= x_a.mean() - k @ q[tile].mean(0) * batch.scale <= method.theta
        stripes &= ~anchor_region
        for i in range(0, len(k), 64) if method.whole_blocks else ():
            stripes[i : i + 64] |= stripes[i : i + 64].any()
        kept[queries] = anchor_region | stripes
    return kept.tril_(context_len)


@pytest.mark.parametrize(
    "settings",
    [
        {"theta": 3.0},
        {"theta": 0.0, "sample_tokens": 16},
        {"theta": 0.0, "sample_tokens": 64, "whole_blocks": True, "step_tiles": 1},
    ],
    ids=str,
)
def test_reference_states_the_paper(settings):
    """Options beyond the paper follow their definitions, from whole score matrices."""
    # The last window of a row begins where the next row's first one does.
    batch = make_batch([(0, 700), (533, 400)], num_heads=4, num_kv_heads=2)
    method = AnchorAttention(**{"step_tiles": 2} | settings)
    index = select(method, batch, by_reference=True)
    for row in range(2):
        mask = mask_of(index, row)
        for head in range(4):
            assert torch.equal(mask[head], definition(batch, method, row, head)), f"row {row}, head {head}"
    assert 0.3 < density_of(index) < 0.98


def plant(batch: Batch, scores: dict[tuple[int, int, int], float]) -> None:
    """Give scores {(row, position, dim): score} to queries of 1/scale in dim, in a batch with pages of 16; all other
    scores are 0."""
    for tensor in (batch.q, batch.cache.keys):
        tensor.masked_fill_(~tensor.isnan(), 0.0)
    for (row, position, dim), score in scores.items():
        page = int(batch.rows.block_table[row, position // 16])
        batch.cache.keys[page, position % 16, 0, dim] = score


def test_stripes_around_whole_blocks_stay_in_order(monkeypatch):
    """Lists of stripes and of blocks span several stretches; a key in a block leaves no gap among the stripes.

    In some blocks, the first, the last or another key is not kept.
    """
    monkeypatch.setattr(kernels, "CHUNK_BLOCKS", Constant(32))
    last = 2 * kernels.LIST_SPLIT.value
    holes = [192, 323, kernels.LIST_SPLIT.value + 7, last - 1]
    batch = make_batch([(last + 256, 20)], num_heads=1)
    plant(batch, {(0, position, 0): -30.0 for position in holes})
    batch.q[:20, 0, 0] = batch.scale**-1
    index = select(AnchorAttention(step_tiles=2), batch)
    holed = {position // 64 for position in holes}
    assert index.stripes_of(0, 0).tolist() == [n for n in range(last) if n // 64 in holed and n not in holes]
    assert index.blocks_of(0, 0).tolist() == [i for i in range(ceil_div(last + 276, 64)) if i not in holed]


def test_chunks_cut_between_groups_select_as_the_whole_prompt():
    batch = make_batch([(0, 1000)], num_heads=1)
    method = AnchorAttention(theta=2.0, step_tiles=2)
    whole = all_lists(select(method, batch))
    chunks = [
        Rows((begin,), (end - begin,), (begin,), batch.rows.block_table) for begin, end in pairwise([0, 256, 768, 1000])
    ]
    in_chunks = [all_lists(select(method, batch, rows=rows)) for rows in chunks]
    assert [[tile for (tiles,) in in_chunks for tile in tiles]] == whole


@pytest.mark.parametrize("step_tiles", [1, 2, 3])
def test_the_length_up_to_which_no_key_is_left_out(step_tiles):
    """One in 128 keys scores high, and all others score low. Only the anchor region keeps the latter; votes do not."""
    method = AnchorAttention(1.0, step_tiles)

    def density(num_tokens: int) -> float:
        batch = make_batch([(0, num_tokens)], num_heads=1)
        plant(batch, {(0, position, 0): 30.0 for position in range(0, num_tokens, 128)})
        batch.q[:, 0, 0] = batch.scale**-1
        return density_of(select(method, batch, by_reference=True))

    assert density(method.least_prompt_tokens) == 1.0
    assert density(method.least_prompt_tokens + 128) < 1.0


def test_defaults_are_the_papers():
    assert AnchorAttention() == AnchorAttention(theta=12.0, step_tiles=16, sample_tokens=0, whole_blocks=False)
