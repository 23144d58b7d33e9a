# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn's first stage: which key blocks of 64 a tile of 128 queries attends to (Zhang et al., arXiv 2502.18137).

Section 3.2, per query head: tiles and key blocks are compressed to their mean token, S^ = scale · q kᵀ, P^ = softmax of
S^'s rows, and a tile keeps TopCdf(P^, τ) (equation 4). A mean stands for its tokens only where they are alike: key
blocks of a self-similarity under θ get S^ = −∞ and are always kept, and tiles under θ keep every causal block (equation
5). The second stage, which skips products of P and V by λ, and the 8-bit scores of SageAttention that the paper builds
on belong to attention itself, which these heads ask for them (``attend``'s options).

What the paper leaves open, and what departs from it:

* CosSim(X). The prose asks for the mean cosine similarity over a block's tokens; the formula below it divides X Xᵀ by
  its largest entry, which is no cosine. The prose holds here, as in the authors' code: the mean over all pairs (a token
  with itself too) of the Gram matrix of the tokens scaled to unit length. That is the squared length of the mean unit
  token, exactly, so no Gram matrix is formed. A token of length zero counts as unlike any other.
* ``smooth_keys``. The authors subtract the row's mean key first, as SageAttention does for its 8-bit keys; the paper's
  own figures show it (table 9: randomly permuted keys have a similarity of 0.02, which a common part of the keys would
  raise). It moves similarities alone: softmax does not see a shift that all keys share. The mean is over the keys that
  the step can see, so selection depends on the chunking, and on later queries of the same chunk.
* TopCdf. The text keeps the largest probabilities until their sum reaches τ, the listing stops one block earlier (and
  keeps none where one block holds more than τ). The text holds. Ties go to the earlier block.
* Causal mask. Blocks with a key that the tile's last query may see take part, diagonal blocks like any other: by the
  mean of all of their keys that exist, though some queries see only some of them. Diagonal blocks are always kept; one
  that TopCdf did not choose does not count towards τ.
* ``keep_sink``. Each tile keeps the first key block, which the paper has no rule for: trained models put mass on their
  first keys that the mean of 64 hides. The authors' functions do so where ``attention_sink`` is set, and their module
  that attends with searched parameters sets it. Like a diagonal block, the sink stays in the softmax, and does not
  count towards τ unless TopCdf chose it.
* Raising τ never drops a block. Raising θ never drops a forced block or tile, yet may drop a block that τ chose before:
  a block that leaves the softmax takes its mass along.
* The Hilbert-curve permutation (section 3.7) reorders image and video tokens, which see each other both ways. Under a
  causal mask over cached keys a reordered block would mix positions before and after a query: it does not apply.

The paper finds τ, θ and λ per head by search and gives no defaults. Those of τ and θ here are the defaults of the
authors' function that makes the block map (``get_block_map_meansim``: cdfthreshd 0.9, simthreshd1 0.1). Their function
for use without a search has 0.98 and 0.6, meant for image and video: 128 consecutive queries of a language model are
seldom that alike (after rotary embedding, 0.2 to 0.5 on a trained 29M model, where 0.6 left nearly every tile dense).
The skip and the 8-bit scores, both part of the paper's Algorithm 1, are off here unless asked for: attention over what
was kept is then exact to rounding, which is what ``attend``'s error budget is stated for, and selection alone loses.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import PerHead
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.selection.lists import append, compact_blocks, list_of, tile_blocks
from vllm_sparse_kernels.selection.parameters import on_device, require
from vllm_sparse_kernels.selection.pooled import ALIGNED, KEY_BLOCK_TOKENS, pooled_products

HELD_BLOCKS = 2048
"""Blocks of a row of S^ that stay in registers while its threshold is searched, those of 131,072 keys. Longer rows are
read again for the rest."""

FORCED = tl.constexpr(-1.0)
"""What a key block outside the softmax holds in a row of exponentials; all others are >= 0."""

LEAST = tl.constexpr(-3.0e38)
"""Stands for the largest score of a row that has none."""

LOG2_E = 1.4426950408889634
ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0, the largest exponential. Bits of floats >= 0 sort as the floats do."""


@dataclass(frozen=True)
class SpargeAttn(PerHead):
    """τ, θ and λ of SpargeAttn (section 3.6), per head; the module says what each does."""

    differing = ("kept_mass", "min_similarity", "skip_margin", "int8_scores")

    kept_mass: float = 0.9
    """τ, in (0, 1]: share of the compressed softmax that the kept blocks reach. 1 keeps every causal block."""

    min_similarity: float = 0.1
    """θ, in [-1, 1]: tiles and key blocks less similar than this are always computed. At 0 or below there are none."""

    smooth_keys: bool = True
    """Measure the similarity of keys about the row's mean key."""

    keep_sink: bool = True
    """Keep the first key block whatever its score; false is the paper's letter."""

    skip_margin: float | None = None
    """λ < 0 of the second stage, in natural units of the scaled scores; None skips nothing. The tile's 128 queries are
    tested together, the paper's by warps: the same λ skips less here. As in Algorithm 1 the sum counts what is skipped;
    the authors' kernels, whose pvthreshd is −λ · log2 e, leave it out of the sum too."""

    int8_scores: bool = False
    """Multiply queries and keys in 8 bits (section 3.5)."""

    def __post_init__(self) -> None:
        require(0 < self.kept_mass <= 1, "kept_mass", self.kept_mass, "a number in (0, 1]")
        require(-1 <= self.min_similarity <= 1, "min_similarity", self.min_similarity, "a number in [-1, 1]")
        in_range = self.skip_margin is None or -math.inf < self.skip_margin < 0
        require(in_range, "skip_margin", self.skip_margin, "a finite number < 0, or null to skip nothing")

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        """Fill the lists of ``heads``: see ``Method.select``.

        Args:
            q: [num_tokens, num_heads, head_dim], in the cache's dtype.
            cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
            index: The index, whose lists of ``heads`` are overwritten.
            heads: [n] int32 on the device, numbers of the selected query heads.
            scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
        """
        index.clear_stripes(heads)
        settings = self.of_heads(len(heads))
        if all(head.kept_mass == 1 for head in settings):
            compact_blocks(None, index, heads)
            return
        kept_mass = on_device(tuple(head.kept_mass for head in settings), q.device)
        min_similarity = on_device(tuple(head.min_similarity for head in settings), q.device)
        products = pooled_products(q, cache, index, heads, scale * LOG2_E, 1, min_similarity, self.smooth_keys)
        for first_tile, scores, similarity in products:
            keep_top_mass(scores, similarity, index, first_tile, heads, kept_mass, min_similarity, self.keep_sink)


def keep_top_mass(
    scores: torch.Tensor, similarity: torch.Tensor | None, index: SparseIndex, first_tile: int, heads: torch.Tensor,
    kept_mass: torch.Tensor, min_similarity: torch.Tensor, keep_sink: bool,
) -> None:  # fmt: skip
    """Write the lists of the tiles from ``first_tile`` on from S^ in base 2. Overwrites ``scores``.

    Args:
        scores: [n, tiles, a multiple of 64] float32.
        similarity: [n, num_tiles] float32, of all tiles.
        index: The index, whose lists of ``heads`` are overwritten.
        first_tile: First tile of the run.
        heads: [n] int32 on the device, numbers of the selected query heads.
        kept_mass: [n] float32, τ.
        min_similarity: [n] float32, θ.
        keep_sink: Whether the first block is kept whatever its score.
    """
    num_heads, num_tiles, width = scores.shape
    _keep_top_mass_kernel[(num_tiles, num_heads)](
        scores, width // ALIGNED.value, similarity, heads, index.args, index.rows.num_tiles, first_tile,
        kept_mass, min_similarity, int(keep_sink),
        BLOCK=KEY_BLOCK_TOKENS, HALVES=index.block_tokens // KEY_BLOCK_TOKENS, CHUNK=HELD_BLOCKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "num_tiles", "first_tile", "num_sink"])
def _keep_top_mass_kernel(
    scores, width, similarity, heads, index, num_tiles, first_tile, kept_mass, min_similarity, num_sink,
    BLOCK: tl.constexpr, HALVES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the list of one (tile, head): the fewest blocks that hold the share ``kept_mass`` of Σ exp(score).

    scores [heads, tiles, width · ALIGNED] float32, of mean queries with mean keys of BLOCK keys; −∞ for blocks whose
    keys are not alike, which are kept. A tile whose queries' mean cosine is below ``min_similarity`` keeps every block;
    sink and diagonal are always kept. HALVES neighbouring blocks make one of the index, kept if one of them is.

    Grid: (tiles of the run, n). Bound by latency: 30 halvings over scores in registers.

    Args:
        scores: The scores described above; overwritten.
        width: Columns of ``products``, in units of 64.
        similarity: [n, num_tiles] float32.
        heads: [n] int32 on the device, numbers of the selected query heads.
        index: IndexArgs; lists and counts are written.
        num_tiles: Tiles of the step.
        first_tile: First tile of the run.
        kept_mass: [n] float32, τ.
        min_similarity: [n] float32, θ.
        num_sink: 1: the first block is kept; 0: it is not.
        BLOCK: Keys of a block.
        HALVES: Blocks of 64 keys in an index block.
        CHUNK: Scores that stay in registers.
    """
    i_tile, i_entry = first_tile + tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_head = tl.load(heads + i_entry).to(tl.int64)
    row = scores + (i_entry * tl.num_programs(0) + tl.program_id(0)) * (width * ALIGNED)
    _, num_blocks = tile_blocks(index.tiles, i_tile, BLOCK)
    share = tl.load(kept_mass + i_entry)
    is_unlike = tl.load(similarity + i_entry * num_tiles + i_tile) < tl.load(min_similarity + i_entry)
    all_kept = tl.where(share >= 1, 1, is_unlike.to(tl.int32)) != 0
    b_e, total = _exponentials(row, num_blocks, CHUNK)
    target = total * share

    # The largest bits such that blocks of at least those bits reach the target; 1 to 1.0 takes 30 halvings.
    bits = tl.where(all_kept, ONE_BITS, 1)
    too_many = ONE_BITS + 1
    for _ in range(tl.where(all_kept, 0, 30)):
        middle = (bits + too_many) // 2
        reached = _mass(b_e, row, num_blocks, middle, CHUNK) >= target
        bits = tl.where(reached, middle, bits)
        too_many = tl.where(reached, too_many, middle)
    # Of the blocks of just those bits, the first ones, as many as it takes.
    missing = target - _mass(b_e, row, num_blocks, bits + 1, CHUNK)
    num_equal = tl.ceil(missing / bits.to(tl.float32, bitcast=True)).to(tl.int32)

    diagonal, num_causal = tile_blocks(index.tiles, i_tile, BLOCK * HALVES)
    ids = list_of(index, i_head, i_tile)
    count, seen = 0, 0
    for first in range(0, num_blocks, CHUNK):
        if first > 0:
            b_e = _load(row, first, num_blocks, 0.0, CHUNK)
        b_bits = b_e.to(tl.int32, bitcast=True)
        b_equal = (b_bits == bits).to(tl.int32)
        b_chosen = (b_bits > bits) | ((b_equal != 0) & (seen + tl.cumsum(b_equal, 0) <= num_equal))
        seen += tl.sum(b_equal, 0)
        b_kept = (b_chosen | (b_e < 0) | all_kept).to(tl.int32)
        b_kept = tl.max(tl.reshape(b_kept, [CHUNK // HALVES, HALVES]), 1) != 0
        o_n = first // HALVES + tl.arange(0, CHUNK // HALVES)
        count = append(ids, count, o_n, (o_n < num_causal) & (b_kept | (o_n < num_sink) | (o_n >= diagonal)))
    tl.store(index.block_counts + i_head * num_tiles + i_tile, count)
    tl.store(index.stripe_counts + i_head * num_tiles + i_tile, 0)


@triton.jit
def _load(row, first, num_blocks, other, CHUNK: tl.constexpr):
    """Load CHUNK values of a row of scores from block ``first`` on; ``other`` past the last block."""
    o_n = first + tl.arange(0, CHUNK)
    return tl.load(row + o_n, mask=o_n < num_blocks, other=other)


@triton.jit
def _exponentials(row, num_blocks, CHUNK: tl.constexpr):
    """Compute exponentials of scores, the largest 1, and FORCED for scores of −∞.

    Returns those of the first CHUNK, and the sum of all.

    The others are written in place of their scores.
    """
    b_s = _load(row, 0, num_blocks, float("-inf"), CHUNK)
    largest = tl.maximum(tl.max(b_s, 0), LEAST)
    for first in range(CHUNK, num_blocks, CHUNK):
        largest = tl.maximum(largest, tl.max(_load(row, first, num_blocks, float("-inf"), CHUNK), 0))
    b_first = tl.exp2(b_s - largest)
    total = tl.sum(b_first, 0)
    b_first = tl.where((b_s > float("-inf")) | (tl.arange(0, CHUNK) >= num_blocks), b_first, FORCED)
    for first in range(CHUNK, num_blocks, CHUNK):
        b_s = _load(row, first, num_blocks, float("-inf"), CHUNK)
        b_e = tl.exp2(b_s - largest)
        total += tl.sum(b_e, 0)
        o_n = first + tl.arange(0, CHUNK)
        tl.store(row + o_n, tl.where(b_s > float("-inf"), b_e, FORCED), mask=o_n < num_blocks)
    tl.debug_barrier()
    return b_first, total


@triton.jit
def _mass(b_first, row, num_blocks, bits, CHUNK: tl.constexpr):
    """Sum the exponentials of at least these bits. The sum never decreases as more count, in floating point too."""
    total = _part(b_first, bits)
    for first in range(CHUNK, num_blocks, CHUNK):
        total += _part(_load(row, first, num_blocks, 0.0, CHUNK), bits)
    return total


@triton.jit
def _part(b_e, bits):
    """Sum the exponentials of a chunk of at least these bits."""
    return tl.sum(tl.where(b_e.to(tl.int32, bitcast=True) >= bits, b_e, 0.0), 0)
