# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn's first stage: which key blocks of 64 a tile of 128 queries attends to (Zhang et al., arXiv:2502.18137).

**The paper's rule** (section 3.2), per query head:

1. Compress each tile and each key block to its mean token: q and k.
2. Compute S^ = scale · q kᵀ, and P^ = softmax of each row of S^.
3. Keep the blocks TopCdf(P^, τ): the fewest whose probabilities reach τ (equation 4).
4. A mean represents its tokens only if they are similar. A key block with a self-similarity below θ gets S^ = −∞ and is
   always kept; a tile below θ keeps every causal block (equation 5).

The second stage (section 3.4), which skips products of P and V by λ, and SageAttention's 8-bit scores (section 3.5)
belong to attention, not to selection: ``skip_margin`` and ``int8_scores`` request them from ``attend``. Both are off by
default, so that attention over the kept blocks is exact to rounding.

**Released code.** The authors' repository (thu-ml/SpargeAttn at bfd980b) differs from the paper:

* It recommends the calls whose names contain ``topk``, and states "we do not recommend" for the cumulative calls. In
  place of step 3 they keep the ⌊share · K⌋ blocks of the largest P^, at least 1. K counts all key blocks of the call,
  not only the causal blocks. The recommended share is 0.5, with θ = −0.1; no block is below this θ. It is not
  implemented, because it loses half of the answers (docs/research/papers.md).
* Its cumulative cut follows the paper's listing. It keeps blocks while the sum is at most τ, but at least 1 block. It
  therefore stops one block earlier than the paper's text.
* No diagonal block is forced: a tile may drop the keys at its own queries.
* ``attention_sink`` keeps the first key block. The module with searched parameters sets it, and the
  recommended call does not.
* On Hopper, SageAttention2's calls use tiles of 64 queries and blocks of 128 keys.
* These calls apply the causal mask to whole blocks; their attention kernel receives no causal mask.
* A block whose self-similarity equals θ counts as dissimilar; in the paper it counts as similar.

**This implementation** differs from both as follows:

* *Cumulative cut.* It follows the paper's text, not its listing. Ties go to the earlier block.
* *Diagonal blocks* are always kept, so that every query attends to something. They compete with the other blocks, by
  the mean of all of their keys, although some queries see only some of these. A diagonal block that neither rule
  chooses is kept in addition; it does not count towards τ.
* *Sink.* ``keep_sink`` keeps the first key block of each tile, by default. The paper has no such rule; trained models
  put mass on their first keys, which the mean of 64 keys hides. Like a diagonal block it is kept in addition.
* *CosSim.* The paper's prose asks for the mean cosine similarity of a block's tokens; the formula below it divides X Xᵀ
  by its largest entry, which is not a cosine. This implementation and the released code follow the prose: the mean over
  all pairs of tokens, including each token with itself, which equals the squared length of the mean unit token. A token
  of length zero counts as dissimilar to every other token; the released code divides by zero and keeps its block.
* *Smooth keys.* The row's mean key is subtracted before similarities are measured, as in the released code (the paper's
  table 9 implies it: randomly permuted keys have a similarity of 0.02). Softmax is invariant to it.
* *Chunks.* The mean key is the mean of the keys that the step can see, so it depends on the chunking. If a prompt runs
  in one chunk, it is as in the released code.
* *Hilbert-curve permutation* (section 3.7) reorders image and video tokens, which attend in both directions. It does
  not apply under a causal mask over cached keys.

Raising τ never drops a block. Raising θ never drops a forced block or tile, but may drop a block that τ chose before,
because a block that leaves the softmax removes its mass.

**Parameters.** The paper searches τ, θ and λ for each head and states no defaults (section 3.6; ``profile calibrate
--method sparge_attn`` runs this search). The defaults of τ and θ here are those of the released function that builds
the block map (``get_block_map_meansim``: 0.9 and 0.1). The released cumulative calls have 0.98 and 0.6, meant for
images and video: 128 consecutive queries of a language model are seldom that similar. After rotary embedding, their
similarity is 0.2 to 0.5 on a trained model with 29M parameters, and θ = 0.6 makes nearly every tile dense.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.top_p.choice import search_threshold
from vllm_sparse_kernels.selection.lists import (
    above_threshold,
    append,
    compact_blocks,
    list_of,
    store_count,
    tile_and_head,
    tile_blocks,
)
from vllm_sparse_kernels.selection.parameters import require
from vllm_sparse_kernels.selection.pooled import (
    ALIGNED,
    KEY_BLOCK,
    pooled_products,
)

HELD_BLOCKS = Constant(2048)
"""Blocks of a row of S^ that stay in registers during the search for its threshold: the blocks of 131,072 keys. The
other blocks of longer rows are read again in each step of the search."""

FORCED = Constant(-1e-30)
"""Rank of a key block outside the softmax; all other ranks are >= 0, and this one adds nothing to their sums."""

LEAST = Constant(-3.0e38)
"""Replaces the largest score of a row without scores."""

MOST_BLOCKS = Constant(1 << 30)
"""No limit of the number of blocks."""


@dataclass(frozen=True)
class SpargeAttn(Method):
    """Parameters of SpargeAttn (section 3.6) for each head; the module's docstring has the rules."""

    differing = ("kept_mass", "min_similarity", "skip_margin", "int8_scores")

    kept_mass: float = 0.9
    """τ, in (0, 1]: share of the compressed softmax that the kept blocks reach (equation 4). 1 keeps every causal
    block."""

    min_similarity: float = 0.1
    """θ, in [-1, 1]: tiles and key blocks less similar than this are always computed (equation 5). At 0 or below, there
    are no such tiles and blocks."""

    keep_sink: bool = True
    """Keep the first key block regardless of its score; false is the paper's rule."""

    skip_margin: float | None = None
    """λ < 0 of the second stage (section 3.4), in natural units of the scaled scores; None skips nothing. The 128
    queries of a tile are tested together, while the paper tests them warp by warp: the same λ skips less here. As in
    Algorithm 1, the softmax's sum includes skipped products; the authors' kernels, whose pvthreshd is −λ · log2 e,
    exclude them."""

    int8_scores: bool = False
    """Multiply queries and keys in 8 bits (section 3.5)."""

    def __post_init__(self) -> None:
        require(0 < self.kept_mass <= 1, "kept_mass", self.kept_mass, "a number in (0, 1]")
        require(-1 <= self.min_similarity <= 1, "min_similarity", self.min_similarity, "a number in [-1, 1]")
        in_range = self.skip_margin is None or -math.inf < self.skip_margin < 0
        require(in_range, "skip_margin", self.skip_margin, "a finite number < 0, or null to skip nothing")

    def select(self, call: Call) -> None:
        if all(method.kept_mass == 1 for method in call.heads.methods):
            compact_blocks(None, call)
            return
        in_base_2 = replace(call, scale=call.scale_in_base_2)
        for first_tile, scores, similarity in pooled_products(in_base_2, 1, call.parameters("min_similarity")):
            keep_top_blocks(call, scores, similarity, first_tile)


def keep_top_blocks(call: Call, scores: torch.Tensor, similarity: torch.Tensor | None, first_tile: int) -> None:
    """Write the lists of all tiles after and including ``first_tile``, given S^ in base 2. Overwrites ``scores``."""
    index, (num_heads, num_tiles, width) = call.index, scores.shape
    _keep_top_blocks_kernel[(num_tiles, num_heads)](
        scores, width // ALIGNED.value, similarity, call.head_ids, index.args,
        index.rows.num_tiles, first_tile, call.parameters("kept_mass", "min_similarity"), int(call.method.keep_sink),
        HALVES=index.block_tokens // KEY_BLOCK.value,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "num_tiles", "first_tile", "num_sink"])
def _keep_top_blocks_kernel(
    scores, width, similarity, heads, index, num_tiles, first_tile, limits, num_sink,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Write the list of one (tile, head): the blocks of the largest scores, up to τ.

    Scores become ranks: exp2(score − largest), float32 in [0, 1]. The kept blocks are the fewest, from the highest rank
    down, that hold the share τ of the sum of all ranks. The lowest kept rank is found by bisection over its bits.

    scores [heads, tiles, width · ALIGNED] float32, of mean queries with mean keys of blocks; −∞ for blocks whose
    keys are not similar, which are kept. A tile whose queries' mean cosine is below θ keeps every block; sink and
    diagonal are always kept. HALVES neighbouring blocks form one block of the index, which is kept if one of them is.

    Grid: (tiles of the run, n). Bound by latency: up to 31 bisection steps on ranks in registers.

    Args:
        similarity: [n, num_tiles] float32.
        heads: [n] int32 on the device, numbers of the selected query heads.
        limits: [2, n] float32: τ and θ of each head.
    """
    i_tile, i_selected, i_head = tile_and_head(first_tile, heads)
    row = scores + (i_selected * tl.num_programs(0) + tl.program_id(0)) * (width * ALIGNED)
    _, num_blocks = tile_blocks(index.tiles, i_tile, KEY_BLOCK)
    kept_mass = tl.load(limits + i_selected)
    min_similarity = tl.load(limits + tl.num_programs(1) + i_selected)
    is_dissimilar = tl.load(similarity + i_selected * num_tiles + i_tile) < min_similarity
    all_kept = tl.where(kept_mass >= 1, 1, is_dissimilar.to(tl.int32)) != 0
    b_rank, total = _ranks(row, num_blocks)
    target = tl.where(all_kept, 0.0, total * kept_mass)
    bits, num_equal = search_threshold(b_rank, row, 0, num_blocks, target, MOST_BLOCKS, HELD_BLOCKS)

    diagonal, num_causal = tile_blocks(index.tiles, i_tile, KEY_BLOCK * HALVES)
    ids = list_of(index, i_head, i_tile)
    count, num_seen = 0, 0
    for first in range(0, num_blocks, HELD_BLOCKS):
        if first > 0:
            b_rank = _load(row, first, num_blocks, 0.0)
        b_chosen, num_seen = above_threshold(b_rank, bits, num_equal, num_seen)
        b_kept = (b_chosen | (b_rank < 0) | all_kept).to(tl.int32)
        b_kept = tl.max(tl.reshape(b_kept, [HELD_BLOCKS // HALVES, HALVES]), 1) != 0
        o_n = first // HALVES + tl.arange(0, HELD_BLOCKS // HALVES)
        count = append(ids, count, o_n, (o_n < num_causal) & (b_kept | (o_n < num_sink) | (o_n >= diagonal)))
    store_count(index.block_counts, i_head, i_tile, num_tiles, count)


@triton.jit
def _load(row, first, num_blocks, other):
    """Load HELD_BLOCKS values of a row of scores from block ``first`` on; ``other`` past the last block."""
    o_n = first + tl.arange(0, HELD_BLOCKS)
    return tl.load(row + o_n, mask=o_n < num_blocks, other=other)


@triton.jit
def _ranks(row, num_blocks):
    """Compute the ranks of a row of scores, the largest 1, and FORCED for scores of −∞.

    Returns the ranks of the first HELD_BLOCKS, and the sum of all ranks except FORCED.

    The other ranks overwrite their scores.
    """
    b_s = _load(row, 0, num_blocks, float("-inf"))
    largest = tl.maximum(tl.max(b_s, 0), LEAST)
    for first in range(HELD_BLOCKS, num_blocks, HELD_BLOCKS):
        largest = tl.maximum(largest, tl.max(_load(row, first, num_blocks, float("-inf")), 0))
    b_first = tl.exp2(b_s - largest)
    total = tl.sum(b_first, 0)
    b_first = tl.where((b_s > float("-inf")) | (tl.arange(0, HELD_BLOCKS) >= num_blocks), b_first, FORCED)
    for first in range(HELD_BLOCKS, num_blocks, HELD_BLOCKS):
        b_s = _load(row, first, num_blocks, float("-inf"))
        b_rank = tl.exp2(b_s - largest)
        total += tl.sum(b_rank, 0)
        o_n = first + tl.arange(0, HELD_BLOCKS)
        tl.store(row + o_n, tl.where(b_s > float("-inf"), b_rank, FORCED), mask=o_n < num_blocks)
    tl.debug_barrier()
    return b_first, total
