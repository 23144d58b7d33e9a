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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache, key_args, key_offsets
from vllm_sparse_kernels.rows import TILE_FIELDS, TILE_TOKENS, Rows, ceil_div
from vllm_sparse_kernels.select.base import Method, PerHead, on_device, require
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, compact_blocks, tile_blocks

KEY_BLOCK_TOKENS = 64
"""b_k, the paper's granularity of keys. An index of 128-token blocks keeps a block if either half is kept."""

SCORE_BYTES = 128 << 20
"""Workspace for S^: longer chunks are selected a slab of tiles at a time."""

ROW_ALIGN = 16
FORCED = tl.constexpr(-1.0)
"""What a key block outside the softmax holds in a row of exponentials; all others are >= 0."""

LEAST = tl.constexpr(-3.0e38)
"""Stands for the largest score of a row that has none."""

LOG2_E = 1.4426950408889634
ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0, the largest exponential. Bits of floats >= 0 sort as the floats do."""

UNSPECIALIZED = ("seq_len", "num_heads", "num_tiles", "all_tiles", "first_tile", "table_start", "stride_kept")
"""Kernel arguments that change from step to step: they shall not call for new variants of a kernel."""


@dataclass(frozen=True)
class SpargeAttn(Method):
    """τ, θ and λ of SpargeAttn (section 3.6), per head; the module says what each does."""

    kept_mass: float = 0.9
    """τ, in (0, 1]: share of the compressed softmax that the kept blocks reach. 1 keeps every causal block."""

    min_similarity: float = 0.1
    """θ, in [-1, 1]: tiles and key blocks less similar than this are always computed. At 0 or below there are none."""

    smooth_keys: bool = True
    """Measure the similarity of keys about the row's mean key."""

    skip_margin: float | None = None
    """λ < 0 of the second stage, in natural units of the scaled scores; None skips nothing. The tile's 128 queries are
    tested together, the paper's by warps: the same λ skips less here."""

    int8_scores: bool = False
    """Multiply queries and keys in 8 bits (section 3.5)."""

    def __post_init__(self) -> None:
        require(0 < self.kept_mass <= 1, "kept_mass", self.kept_mass, "a number in (0, 1]")
        require(-1 <= self.min_similarity <= 1, "min_similarity", self.min_similarity, "a number in [-1, 1]")
        in_range = self.skip_margin is None or -math.inf < self.skip_margin < 0
        require(in_range, "skip_margin", self.skip_margin, "a finite number < 0, or null to skip nothing")

    @property
    def alike(self) -> "SpargeAttn":
        return SpargeAttn(smooth_keys=self.smooth_keys)

    @classmethod
    def merged(cls, methods: Sequence[Self]) -> Method:
        return SpargeAttnLayer.join(methods)

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        index.stripe_counts.index_fill_(0, heads.long(), 0)
        settings = self.of_heads(len(heads))
        if all(one.kept_mass == 1 for one in settings):
            compact_blocks(None, index, heads)
            return
        rows, num_heads = index.rows, len(heads)
        kept_mass = on_device(tuple(one.kept_mass for one in settings), q.device)
        min_similarity = on_device(tuple(one.min_similarity for one in settings), q.device)
        tiles = _compress_tiles(q, rows, heads)
        kept = torch.empty(num_heads, index.block_ids.shape[1], dtype=torch.uint8, device=q.device)
        for row, seq_len in enumerate(rows.seq_lens):
            blocks = _compress_keys(cache, rows, row, heads, q.shape[1], self.smooth_keys)
            stride = ceil_div(ceil_div(seq_len, KEY_BLOCK_TOKENS), ROW_ALIGN) * ROW_ALIGN
            slab = max(1, SCORE_BYTES // (4 * stride * num_heads))
            for first_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1], slab):
                num_tiles = min(slab, rows.tile_starts[row + 1] - first_tile)
                scores = torch.empty(num_heads, num_tiles, stride, dtype=torch.float32, device=q.device)
                _score_tiles(tiles, blocks, index, first_tile, seq_len, heads, scale, min_similarity, scores)
                _keep_top_mass(scores, tiles.similarity, index, first_tile, kept_mass, min_similarity, kept)
        compact_blocks(kept, index, heads)


@dataclass(frozen=True)
class SpargeAttnLayer(PerHead, SpargeAttn):
    """Heads that differ in τ, θ or what they ask of attention; keys are compressed once for all."""


class _Compressed(NamedTuple):
    """Tiles [len(heads), num_tiles, ...] or key blocks [num_kv_heads, num_blocks, ...] as single tokens."""

    sums: torch.Tensor  # [..., head_dim] float32: over the tokens
    similarity: torch.Tensor  # [...] float32: mean cosine over all pairs

    @staticmethod
    def empty(groups: int, length: int, head_dim: int, device: torch.device) -> "_Compressed":
        return _Compressed(
            torch.empty(groups, length, head_dim, dtype=torch.float32, device=device),
            torch.empty(groups, length, dtype=torch.float32, device=device),
        )


def _compress_tiles(q: torch.Tensor, rows: Rows, heads: torch.Tensor) -> _Compressed:
    head_dim = q.shape[2]
    tiles = _Compressed.empty(len(heads), rows.num_tiles, head_dim, q.device)
    _compress_tiles_kernel[(rows.num_tiles, len(heads))](
        q, q.stride(0), q.stride(1), rows.tiles, heads, *tiles, rows.num_tiles,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), TILE=TILE_TOKENS, BLOCK=KEY_BLOCK_TOKENS,
        FIELDS=TILE_FIELDS, num_warps=_warps(head_dim),
    )  # fmt: skip
    return tiles


def _compress_keys(
    cache: PagedCache, rows: Rows, row: int, heads: torch.Tensor, num_heads: int, smooth: bool
) -> _Compressed:
    """Key blocks of one row. Kv heads that none of ``heads`` reads stay undefined."""
    head_dim, seq_len = cache.head_dim, rows.seq_lens[row]
    num_blocks = ceil_div(seq_len, KEY_BLOCK_TOKENS)
    blocks = _Compressed.empty(cache.num_kv_heads, num_blocks, head_dim, rows.device)
    keys = key_args(cache, rows.block_table[0])  # rows are told apart by where their tables start

    def launch(sums: torch.Tensor | None, similarity: torch.Tensor | None, center: torch.Tensor | None) -> None:
        _compress_keys_kernel[(num_blocks, cache.num_kv_heads)](
            keys, row * rows.block_table.stride(0), seq_len, heads, len(heads), sums, similarity, center,
            GROUP=num_heads // cache.num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK=KEY_BLOCK_TOKENS, HEADS=128, num_warps=_warps(head_dim),
        )  # fmt: skip

    if smooth:
        launch(blocks.sums, None, None)
        launch(None, blocks.similarity, blocks.sums.sum(1) / seq_len)
    else:
        launch(blocks.sums, blocks.similarity, None)
    return blocks


def _warps(head_dim: int) -> int:
    """64 tokens are held in registers, as float32: 64 of them a thread."""
    return max(4, triton.next_power_of_2(head_dim) // 32)


def _score_tiles(
    tiles: _Compressed, blocks: _Compressed, index: SparseIndex, first_tile: int, seq_len: int, heads: torch.Tensor,
    scale: float, min_similarity: torch.Tensor, scores: torch.Tensor,
) -> None:  # fmt: skip
    """S^ in base 2 of the tiles from ``first_tile`` on: [n, num_tiles, >= num_blocks], causal or not."""
    num_heads, num_tiles, _ = scores.shape
    num_kv_heads, num_blocks, head_dim = blocks.sums.shape
    grid = (ceil_div(num_blocks, 64), ceil_div(num_tiles, 32), num_heads)
    _score_tiles_kernel[grid](
        tiles.sums, *blocks, index.rows.tiles, heads, scores, scores.stride(1), first_tile, num_tiles,
        index.rows.num_tiles, seq_len, scale * LOG2_E, min_similarity,
        GROUP=index.num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_M=32, BLOCK_N=64, BLOCK_D=32,
        BLOCK=KEY_BLOCK_TOKENS, FIELDS=TILE_FIELDS,
    )  # fmt: skip


def _keep_top_mass(
    scores: torch.Tensor, similarity: torch.Tensor, index: SparseIndex, first_tile: int, kept_mass: torch.Tensor,
    min_similarity: torch.Tensor, kept: torch.Tensor,
) -> None:  # fmt: skip
    """Flags of the tiles from ``first_tile`` on, laid out as block_ids. Overwrites ``scores``."""
    num_heads, num_tiles, _ = scores.shape
    _keep_top_mass_kernel[(num_tiles, num_heads)](
        scores, scores.stride(1), similarity, index.rows.tiles, index.block_offsets, first_tile, index.rows.num_tiles,
        kept_mass, min_similarity, kept, kept.stride(0),
        BLOCK=KEY_BLOCK_TOKENS, HALVES=index.block_tokens // KEY_BLOCK_TOKENS, CHUNK=CHUNK_BLOCKS, FIELDS=TILE_FIELDS,
    )  # fmt: skip


@triton.jit
def _fold_tokens(b_x, b_sum, b_units):
    """Add tokens [N, D] to a sum of tokens [D] and to a sum of tokens of unit length [D]."""
    b_length = tl.sqrt(tl.sum(b_x * b_x, 1))
    b_unit = b_x / tl.where(b_length > 0, b_length, 1.0)[:, None]
    return b_sum + tl.sum(b_x, 0), b_units + tl.sum(b_unit, 0)


@triton.jit
def _similarity(b_units, count):
    """Mean cosine over all pairs of ``count`` tokens, those with themselves too."""
    return tl.sum(b_units * b_units, 0) / (count * count)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _compress_tiles_kernel(
    q, stride_token, stride_head, tiles, heads, sums, similarity, num_tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_tile, i_group = tl.program_id(0), tl.program_id(1)
    i_head = tl.load(heads + i_group)
    token = tl.load(tiles + i_tile * FIELDS + 1)
    length = tl.load(tiles + i_tile * FIELDS + 2)
    o_d = tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([BLOCK_D], tl.float32)
    b_units = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, TILE, BLOCK):
        o_m = start + tl.arange(0, BLOCK)
        o_q = (token + o_m).to(tl.int64)[:, None] * stride_token + i_head * stride_head + o_d[None, :]
        mask = (o_m < length)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_q = tl.load(q + o_q, mask=mask, other=0.0).to(tl.float32)
        b_sum, b_units = _fold_tokens(b_q, b_sum, b_units)
    i_out = i_group.to(tl.int64) * num_tiles + i_tile
    tl.store(sums + i_out * HEAD_DIM + o_d, b_sum, mask=o_d < HEAD_DIM)
    tl.store(similarity + i_out, _similarity(b_units, length.to(tl.float32)))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _compress_keys_kernel(
    keys, table_start, seq_len, heads, num_heads, sums, similarity, center,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    i_block, i_kv = tl.program_id(0), tl.program_id(1)
    if not _is_read(i_kv, heads, num_heads, GROUP, HEADS):
        return
    o_d = tl.arange(0, BLOCK_D)
    o_n = i_block * BLOCK + tl.arange(0, BLOCK)
    in_row = o_n < seq_len
    o_key = key_offsets(
        keys.block_table + table_start, o_n, in_row, keys.page_size, keys.stride_page, keys.stride_token
    )
    mask = in_row[:, None] & (o_d < HEAD_DIM)[None, :]
    o_k = o_key[:, None] + i_kv.to(tl.int64) * keys.stride_head + o_d[None, :]
    b_k = tl.load(keys.k + o_k, mask=mask, other=0.0).to(tl.float32)
    if center is not None:
        b_center = tl.load(center + i_kv * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)
        b_k = tl.where(mask, b_k - b_center[None, :], 0.0)
    b_zero = tl.zeros([BLOCK_D], tl.float32)
    b_sum, b_units = _fold_tokens(b_k, b_zero, b_zero)
    i_out = i_kv.to(tl.int64) * tl.num_programs(0) + i_block
    if sums is not None:
        tl.store(sums + i_out * HEAD_DIM + o_d, b_sum, mask=o_d < HEAD_DIM)
    if similarity is not None:
        count = tl.minimum(seq_len - i_block * BLOCK, BLOCK).to(tl.float32)
        tl.store(similarity + i_out, _similarity(b_units, count))


@triton.jit
def _is_read(i_kv, heads, num_heads, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Whether any of the query heads reads this kv head."""
    found = 0
    for start in range(0, num_heads, HEADS):
        o_h = start + tl.arange(0, HEADS)
        b_head = tl.load(heads + o_h, mask=o_h < num_heads, other=-GROUP)
        found = tl.maximum(found, tl.max((b_head // GROUP == i_kv).to(tl.int32), 0))
    return found > 0


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _score_tiles_kernel(
    tile_sums, block_sums, block_similarity, tiles, heads, scores, stride_scores, first_tile, num_tiles, all_tiles,
    seq_len, scale, min_similarity,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_group = tl.program_id(2)
    i_kv = tl.load(heads + i_group) // GROUP
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    num_blocks = tl.cdiv(seq_len, BLOCK)
    in_tiles, in_blocks = o_m < num_tiles, o_n < num_blocks
    o_tile = i_group.to(tl.int64) * all_tiles + first_tile + o_m
    o_block = i_kv.to(tl.int64) * num_blocks + o_n
    b_s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, HEAD_DIM, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        in_head = (o_d < HEAD_DIM)[None, :]
        b_q = tl.load(tile_sums + o_tile[:, None] * HEAD_DIM + o_d[None, :], mask=in_tiles[:, None] & in_head, other=0)
        b_k = tl.load(
            block_sums + o_block[:, None] * HEAD_DIM + o_d[None, :], mask=in_blocks[:, None] & in_head, other=0
        )
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="ieee")
    b_length = tl.load(tiles + (first_tile + o_m) * FIELDS + 2, mask=in_tiles, other=1).to(tl.float32)
    b_count = tl.minimum(seq_len - o_n * BLOCK, BLOCK).to(tl.float32)
    b_s = b_s / b_length[:, None] / b_count[None, :] * scale
    b_similar = tl.load(block_similarity + o_block, mask=in_blocks, other=0.0) >= tl.load(min_similarity + i_group)
    b_s = tl.where(b_similar[None, :], b_s, float("-inf"))
    o_row = (i_group.to(tl.int64) * num_tiles + o_m) * stride_scores
    tl.store(scores + o_row[:, None] + o_n[None, :], b_s, mask=in_tiles[:, None] & in_blocks[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _keep_top_mass_kernel(
    scores, stride_scores, similarity, tiles, block_offsets, first_tile, all_tiles, kept_mass, min_similarity,
    kept, stride_kept,
    BLOCK: tl.constexpr, HALVES: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_tile, i_group = first_tile + tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = scores + (i_group * tl.num_programs(0) + tl.program_id(0)) * stride_scores
    _, num_blocks = tile_blocks(tiles, i_tile, BLOCK, FIELDS)
    share = tl.load(kept_mass + i_group)
    is_unlike = tl.load(similarity + i_group * all_tiles + i_tile) < tl.load(min_similarity + i_group)
    all_kept = tl.where(share >= 1, 1, is_unlike.to(tl.int32)) != 0
    target = _exponentials(row, num_blocks, CHUNK) * share

    # The largest bits such that blocks of at least those bits reach the target; 1 to 1.0 takes 30 halvings.
    bits = tl.where(all_kept, ONE_BITS, 1)
    too_many = ONE_BITS + 1
    for _ in range(tl.where(all_kept, 0, 30)):
        middle = (bits + too_many) // 2
        reached = _mass(row, num_blocks, middle, CHUNK) >= target
        bits = tl.where(reached, middle, bits)
        too_many = tl.where(reached, too_many, middle)
    # Of the blocks of just those bits, the first ones, as many as it takes.
    missing = target - _mass(row, num_blocks, bits + 1, CHUNK)
    num_equal = tl.ceil(missing / bits.to(tl.float32, bitcast=True)).to(tl.int32)

    flags = kept + i_group * stride_kept + tl.load(block_offsets + i_tile)
    seen = 0
    for first in range(0, num_blocks, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        b_e = tl.load(row + o_n, mask=o_n < num_blocks, other=0.0)
        b_bits = b_e.to(tl.int32, bitcast=True)
        b_equal = (b_bits == bits).to(tl.int32)
        b_chosen = (b_bits > bits) | ((b_equal != 0) & (seen + tl.cumsum(b_equal, 0) <= num_equal))
        seen += tl.sum(b_equal, 0)
        b_kept = (b_chosen | (b_e < 0) | all_kept).to(tl.uint8)
        b_kept = tl.max(tl.reshape(b_kept, [CHUNK // HALVES, HALVES]), 1)
        o_b = first // HALVES + tl.arange(0, CHUNK // HALVES)
        tl.store(flags + o_b, b_kept, mask=o_b * HALVES < num_blocks)


@triton.jit
def _exponentials(row, num_blocks, CHUNK: tl.constexpr):
    """Put exponentials, the largest 1, in place of scores, FORCED in place of −∞; returns their sum."""
    b_max = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, num_blocks, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        b_max = tl.maximum(b_max, tl.load(row + o_n, mask=o_n < num_blocks, other=float("-inf")))
    largest = tl.maximum(tl.max(b_max, 0), LEAST)
    total = 0.0
    for first in range(0, num_blocks, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        b_s = tl.load(row + o_n, mask=o_n < num_blocks, other=float("-inf"))
        b_e = tl.exp2(b_s - largest)
        total += tl.sum(b_e, 0)
        tl.store(row + o_n, tl.where(b_s > float("-inf"), b_e, FORCED), mask=o_n < num_blocks)
    tl.debug_barrier()
    return total


@triton.jit
def _mass(row, num_blocks, bits, CHUNK: tl.constexpr):
    """Sum of the exponentials of at least these bits. In floating point too it never falls as more of them count."""
    total = 0.0
    for first in range(0, num_blocks, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        b_e = tl.load(row + o_n, mask=o_n < num_blocks, other=0.0)
        total += tl.sum(tl.where(b_e.to(tl.int32, bitcast=True) >= bits, b_e, 0.0), 0)
    return total
