# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn: kernels against the paper's equations in float64, and guarantees of both."""

import dataclasses
import math
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.batches import every_head, new_index, random_batch
from tests.helpers.method_cases import DEVICE, kept_blocks, row_parts, select
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import attend_options, layer_plan
from vllm_sparse_kernels.methods.sparge_attn import method as module, reference
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.selection.pooled import KEY_BLOCK

MARGIN = 1e-5
"""Margin of similarities: float32 sums over a tile are closer than this to float64."""

METHOD = SpargeAttn(kept_mass=0.7, min_similarity=0.4)


def make_batch(lengths, num_heads=2, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32, **kwargs) -> Batch:
    """Return a batch in which some blocks are similar and some are not.

    Each run of 150 positions leans in its own direction, every third run only a little. All keys of a row also lean in
    a common direction, which smoothing removes. q and keys depend only on lengths and heads, not on seed, pages or
    layout.
    """
    kwargs.setdefault("gap_tokens", 3)
    batch = random_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, **kwargs)
    generator = torch.Generator(DEVICE).manual_seed(11)
    rows = batch.rows
    for row, seq_len in enumerate(rows.seq_lens):
        positions = torch.arange(seq_len, device=DEVICE)
        run = positions // 150
        lean = torch.where(run % 3 == 1, 0.4, 1.5)[:, None, None]

        def tokens(heads: int, run=run, lean=lean, seq_len=seq_len) -> torch.Tensor:
            sizes = int(run[-1]) + 1, seq_len
            direction, noise = (torch.randn(n, heads, head_dim, generator=generator, device=DEVICE) for n in sizes)
            return lean * direction[run] + noise

        pages = rows.block_table[row, positions // page_size].long()
        common = 2 * torch.randn(num_kv_heads, head_dim, generator=generator, device=DEVICE)
        batch.cache.keys[pages, positions % page_size] = (tokens(num_kv_heads) + common).to(dtype)
        span = slice(rows.query_starts[row], rows.query_starts[row] + rows.query_lens[row])
        batch.q[span] = tokens(num_heads)[-rows.query_lens[row] :].to(dtype)
    return batch


def row_inputs(batch: Batch, row: int) -> tuple[torch.Tensor, ...]:
    """Return a row's queries and keys of all query heads, in float64."""
    return tuple(torch.stack(x, 1) for x in zip(*(row_parts(batch, row, head) for head in range(batch.num_heads))))


def clear_of_ties(method: SpargeAttn, batch: Batch) -> SpargeAttn:
    """Return the method with θ moved to the middle of the widest gap between similarities near it."""
    near = [torch.tensor([method.min_similarity - 0.02, method.min_similarity + 0.02], device=DEVICE).double()]
    for row in range(batch.rows.num_rows):
        q, k = row_inputs(batch, row)
        k = k - k.mean(0)
        near += [reference.compress(x, size)[1].flatten() for x, size in ((q, 128), (k, KEY_BLOCK.value))]
    values = torch.cat(near).sort().values
    values = values[(values >= near[0][0]) & (values <= near[0][1])]
    widest = int(values.diff().argmax())
    assert float(values.diff()[widest]) > 2 * MARGIN
    return dataclasses.replace(method, min_similarity=float(values[widest : widest + 2].mean()))


def test_similarity_is_the_mean_cosine_over_pairs():
    """CosSim's equation by hand: tokens at 60 degrees, one of them twice as long; a single token; a token of zeros."""
    tokens = torch.tensor([[1.0, 0.0], [1.0, math.sqrt(3.0)], [0.0, 5.0], [3.0, 4.0], [0.0, 0.0]])
    mean, similarity = reference.compress(tokens, 2)
    assert torch.allclose(similarity, torch.tensor([(1 + 1 + 0.5 + 0.5) / 4, (1 + 1 + 0.8 + 0.8) / 4, 0.0]))
    assert torch.allclose(mean[0], torch.tensor([1.0, math.sqrt(3.0) / 2]))
    assert reference.compress(tokens[:3], 2)[1][1] == 1.0


def keep_top_mass(scores: torch.Tensor, kept_mass: float, block_tokens=64, similar=None, sink=False) -> torch.Tensor:
    """Run only the last kernel, on base-2 scores [heads, blocks] of single queries. Return bool of the same shape.

    The query's own block comes after the others, with a score of −∞: it is kept, and adds no mass.
    """
    num_heads, num_blocks = scores.shape
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    wide = ceil_div(num_blocks * KEY_BLOCK.value, block_tokens) * block_tokens
    rows = Rows((0,), (1,), (wide,), table)
    index = new_index(rows, num_heads, block_tokens)
    similar = torch.ones(num_heads, 1, device=DEVICE) if similar is None else similar
    padded = torch.full((num_heads, 1, ceil_div(wide // KEY_BLOCK.value + 1, 64) * 64), float("nan"), device=DEVICE)
    padded[:, 0, :num_blocks] = scores
    padded[:, 0, num_blocks : wide // KEY_BLOCK.value] = -1e30
    padded[:, 0, wide // KEY_BLOCK.value] = -torch.inf
    nothing: Any = torch.empty(0, device=DEVICE)  # neither queries nor keys are read
    call = Call(nothing, nothing, index, 1.0, every_head(SpargeAttn(kept_mass, 0.5, sink), num_heads))
    module.keep_top_blocks(call, padded, similar, 0)
    index.check()
    flags = torch.stack([kept_blocks(index, head, 0) for head in range(num_heads)])
    return flags[:, : wide // block_tokens]


@pytest.mark.parametrize("num_blocks", [1, 70, 2047, 5000])
def test_top_mass_is_exact(num_blocks):
    """Integer scores make exponentials powers of two, whose sums are exact in float32: many ties, no margin.

    Some blocks are outside the softmax.
    """
    generator = torch.Generator(DEVICE).manual_seed(num_blocks)
    scores = torch.randint(-9, 1, (2, num_blocks), generator=generator, device=DEVICE).float()
    scores[torch.rand(2, num_blocks, generator=generator, device=DEVICE) < 0.1] = -math.inf
    for kept_mass in (0.125, 0.75):
        wanted = reference.top_cdf(scores.double().exp2(), kept_mass) | scores.isneginf()
        assert torch.equal(keep_top_mass(scores, kept_mass), wanted)
        with_sink = wanted.clone()
        with_sink[:, 0] = True
        assert torch.equal(keep_top_mass(scores, kept_mass, sink=True), with_sink)
        mass = scores.double().exp2()
        assert bool(((mass * wanted).sum(-1) >= kept_mass * mass.sum(-1)).all())


def test_top_mass_at_its_edges():
    inf = math.inf
    scores = torch.tensor([
        [-inf, 3.0, -inf, 3.0, 3.0, 3.0],  # ties: the earlier half; −∞: always
        [-inf] * 6,  # nothing is left in the softmax
        [-4e3, 900.0, -4e3, -4e3, 899.0, -inf],  # exponentials far below float32's range
        [0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
    ], device=DEVICE)  # fmt: skip
    similar = torch.tensor([[1.0], [0.5], [1.0], [0.4]], device=DEVICE)
    wanted = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6, [0, 1, 0, 0, 0, 1], [1] * 6], device=DEVICE).bool()
    assert torch.equal(keep_top_mass(scores, 0.5, similar=similar), wanted)
    pairs = wanted.unflatten(1, (3, 2)).any(-1)
    assert torch.equal(keep_top_mass(scores, 0.5, 128, similar), pairs)


# The rules of the paper and of the released code, restated from the paper and from the code's behaviour


def block_scores(q: torch.Tensor, k: torch.Tensor, theta: float) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Return for each tile: S^ (−∞ for dissimilar and future blocks), similar key blocks, and if it is similar."""

    def mean_cosine(tokens: torch.Tensor) -> float:
        lengths = tokens.norm(dim=1)
        return float((tokens @ tokens.T / (lengths[:, None] * lengths)).mean())

    centered = k - k.mean(0)
    similar = torch.tensor([mean_cosine(block) >= theta for block in centered.split(64)])
    tiles = []
    for first, tile in enumerate(q.split(128)):
        last = len(k) - len(q) + 128 * first + len(tile) - 1
        scores = torch.stack([tile.mean(0) @ block.mean(0) / math.sqrt(q.shape[1]) for block in k.split(64)])
        scores[~similar] = -math.inf
        scores[last // 64 + 1 :] = -math.inf
        tiles.append((scores, similar, mean_cosine(tile) >= theta))
    return tiles


def papers_map(q: torch.Tensor, k: torch.Tensor, theta: float, tau: float) -> torch.Tensor:
    """Return bool [tiles, key blocks]: section 3.2's "top values whose cumulative sum reaches τ · ΣP^"."""
    maps = []
    for i_tile, (scores, similar, is_tile_similar) in enumerate(block_scores(q, k, theta)):
        last = len(k) - len(q) + min(128 * i_tile + 128, len(q)) - 1
        probabilities, order = torch.nan_to_num(scores.softmax(0)).sort(descending=True)
        kept = ~similar if is_tile_similar else torch.ones_like(similar)
        kept[order[: int((probabilities.cumsum(0) < tau * probabilities.sum()).sum()) + 1]] = True
        kept[last // 64 + 1 :] = False
        maps.append(kept)
    return torch.stack(maps)


RULE_CASES = {
    "1": ([(0, 1)], 1, 1),
    "63": ([(0, 63)], 2, 2),
    "2049": ([(0, 2049)], 1, 1),
    "chunk": ([(1024, 300)], 4, 2, 128, 128, torch.float16),
    "mixed-4": ([(37, 63), (530, 1), (700, 150)], 4, 1, 96),
    "mixed-8": ([(0, 64), (449, 130)], 8, 1),
    "wide": ([(463, 77)], 2, 2, 256, 64, torch.float16),
}
"""Arguments of ``make_batch``: lengths (context, new), query heads, kv heads, head dim, page size and dtype."""


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("name", RULE_CASES)
def test_selection_equals_the_papers_rule(name, by_reference):
    """IoU of masks, with the diagonals added to the paper's."""
    batch = make_batch(*RULE_CASES[name])
    method = clear_of_ties(dataclasses.replace(METHOD, keep_sink=False), batch)
    theta, tau = method.min_similarity, method.kept_mass
    index = select(method, batch, 64, None, by_reference)
    common = union = 0
    for row, head in product(range(batch.rows.num_rows), range(batch.num_heads)):
        q, k = (tensor.cpu() for tensor in row_parts(batch, row, head))
        for i_tile, expected in zip(batch.rows.tiles_of(row), papers_map(q, k, theta, tau), strict=True):
            kept = kept_blocks(index, head, i_tile).cpu()
            expected[index.first_diagonal_block(batch.rows.tile_list[i_tile]) : len(kept)] = True
            expected = expected[: len(kept)]
            common, union = common + int((kept & expected).sum()), union + int((kept | expected).sum())
    assert common >= 0.999 * union


def test_what_heads_ask_of_attention():
    skipping = SpargeAttn(skip_margin=-5.0)
    methods = [METHOD, skipping, SpargeAttn(int8_scores=True)]
    assert len(layer_plan(methods).groups) == 1
    options = attend_options(methods, torch.device(DEVICE))
    assert options.skip_margins.tolist() == [-math.inf, -5.0, -math.inf]
    assert options.int8_heads.tolist() == [0, 0, 1]
