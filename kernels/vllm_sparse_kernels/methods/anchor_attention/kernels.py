# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention on the device: row maxima, votes, and the lists that follow from them (``method.py``).

The two kernels with matrix products loop over blocks of keys, while the other operand stays in shared memory. A vote
writes one bit for each candidate key, and the lists of blocks and stripes are built from these bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.paged import KeySource, load_keys, widen
from vllm_sparse_kernels.selection.lists import (
    CHUNK_BLOCKS,
    append,
    list_of,
    load_tile,
    store_count,
    tile_and_head,
    tile_blocks,
)
from vllm_sparse_kernels.selection.pooled import is_read
from vllm_sparse_kernels.vectors import load_vectors, padded_mask, vector_pointers

INITIAL = Constant(128)
"""Length of the paper's initial block in keys. Every query attends to it."""

WORD = Constant(32)
"""Keys whose votes form one word."""

VOTE_SPLIT = Constant(1024)
"""Candidate keys on which the voters of one program of ``vote_kernel`` vote."""

LIST_SPLIT, LIST_STEP = Constant(4096), Constant(1024)
"""Candidate keys that one program turns into a stretch of a list of stripes, and those of a step."""

ALL_KEPT = Constant(-1)
"""The word of 32 keys that are all kept."""

GROUP_FIELDS = Constant(4)
"""Columns of the groups' table: start of the window, first tile, number of tiles, offset of the list."""

FIRST_TILE, NUM_TILES, LIST_OFFSET = Constant(1), Constant(2), Constant(3)
"""Columns after the first of the groups' table."""

TILE_FIELDS = Constant(2)
"""Columns of the tiles' table: start of the window, offset of the group's list."""

TILE_LIST_OFFSET = Constant(1)
"""Column after the first of the tiles' table."""


class VoteShape(NamedTuple):
    """Compile-time sizes of the kernels that multiply; every field is a ``tl.constexpr``."""

    HEAD_DIM: Any
    BLOCK_D: Any  # HEAD_DIM rounded up to a power of two
    GROUP: Any  # query heads of a kv head
    BLOCK_N: Any  # keys of a step
    VOTERS: Any  # of a tile


class Voting(NamedTuple):
    """Which queries vote; every field is a ``tl.constexpr``."""

    BLOCK_M: Any  # queries of a tile that have an anchor, at least 16
    SAMPLE: Any  # the last of every SAMPLE queries votes; 0: the mean of all


class VoteSplit(NamedTuple):
    """How ``vote_kernel`` divides its work; every field is a ``tl.constexpr``."""

    COLUMNS: Any  # voters at a time
    BLOCK_T: Any  # voters of one group among these
    ONE_PASS: Any  # whether BLOCK_T covers all voters of a group
    WHOLE_WORDS: Any  # whether a vote for one key keeps all keys of its word


class RowVoters(NamedTuple):
    """The voters of one row and kv head."""

    voters: Any  # VoterArgs
    table: Any  # pointer to the row's groups
    num_pairs: Any  # (group, head) pairs
    first_head: Any
    num_tiles: Any


class VoterArgs(NamedTuple):
    """Output of ``anchor_kernel``: each voter with its anchor minus its head's θ.

    Only the selected heads' parts are written. A tile's voters are its mean query, or some of its queries; voters that
    are missing in a short tile have the anchor ∞.
    """

    queries: Any  # [num_heads, num_tiles, voters of a tile, BLOCK_D] of q's dtype, fp16 if q is fp8
    anchors: Any  # [num_heads, num_tiles, voters of a tile] float32, x_a: mean over the tile, or of the voter


class GroupArgs(NamedTuple):
    """The groups of all rows and their votes: a bit for each candidate, laid out like the groups' lists."""

    table: Any  # [num_groups, GROUP_FIELDS] int32
    row_starts: Any  # [num_rows + 1] int32, a row's first group
    tile_windows: Any  # [num_tiles, TILE_FIELDS] int32, what a tile needs of its group, in one load
    words: Any  # [num_heads, num_words] int32, the lowest bit for the first key
    num_words: int  # a multiple of 16, so that no batch requires a new variant of a kernel


# Numbers that change from step to step must not be specialised on: a server would compile in the middle of its work.
@triton.jit(do_not_specialize=["num_tiles"])
def anchor_kernel(queries, keys, tiles, heads, thetas, voters, groups, num_tiles, scale, SHAPE, VOTING):
    """Compute the voters of one tile and head, if there are keys between initial block and window.

    With SAMPLE, these are the last of every SAMPLE queries, and the last of the remainder at a tile's end. If SAMPLE is
    0, the only voter is the mean of all queries.

    Grid: (tiles, n), last tiles first. Bound by the matrix units: queries with the keys of the anchor region.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        heads: [n] int32 on the device, numbers of the selected query heads.
        thetas: [n] float32, θ.
    """
    i_tile = num_tiles - 1 - tl.program_id(0)  # the last tiles of a group have the longest windows: they come first
    i_head = tl.load(heads + tl.program_id(1))
    i_row, token, length, first = load_tile(tiles, i_tile)
    start = tl.load(groups.tile_windows + i_tile * TILE_FIELDS)
    if start > INITIAL:
        o_m = tl.arange(0, VOTING.BLOCK_M)
        o_d = tl.arange(0, SHAPE.BLOCK_D)
        in_tile = o_m < length
        if VOTING.SAMPLE:
            in_tile = o_m * VOTING.SAMPLE < length
            o_m = tl.minimum(o_m * VOTING.SAMPLE + VOTING.SAMPLE - 1, length - 1)
        # Offsets within the tile have 32 bits. With 64 bits they take so many instructions that Triton 3.8's assembler
        # converts the first queries for the mean before it loads the last, and a program waits for memory twice.
        q_tile = queries.q + token.to(tl.int64) * queries.stride_token + i_head * queries.stride_head
        o_q = o_m[:, None] * queries.stride_token + o_d[None, :]
        b_q = tl.load(q_tile + o_q, mask=padded_mask(in_tile, SHAPE.HEAD_DIM, SHAPE.BLOCK_D), other=0.0)
        o_v = tl.arange(0, VOTING.BLOCK_M if VOTING.SAMPLE else 1)
        o_voter = (i_head * num_tiles + i_tile).to(tl.int64) * SHAPE.VOTERS + o_v
        is_voter = o_v < SHAPE.VOTERS
        b_voter = b_q
        if not VOTING.SAMPLE:
            b_voter = (tl.sum(b_q.to(tl.float32), 0) / length).to(voters.queries.dtype.element_ty)[None, :]
        tl.store(vector_pointers(voters.queries, o_voter, SHAPE.BLOCK_D), b_voter, mask=is_voter[:, None])
        source = KeySource(keys, i_row, i_head // SHAPE.GROUP, first + length)
        b_max = _region_max(b_q, first + o_m, source, start, first, SHAPE)
        if VOTING.SAMPLE:
            b_anchor = tl.where(in_tile, b_max * scale, float("inf"))
        else:
            b_anchor = tl.zeros([1], tl.float32) + tl.sum(tl.where(in_tile, b_max * scale, 0.0), 0) / length
        tl.store(voters.anchors + o_voter, b_anchor - tl.load(thetas + tl.program_id(1)), mask=is_voter)


@triton.jit
def _region_max(b_q, o_m, source, start, first, SHAPE):
    """Compute row maxima [BLOCK_M] of q·k over the initial block and the window, for queries at positions ``o_m``."""
    b_max = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
    # As one run of positions that ends with the window; only blocks past the tile's first query need a mask.
    head = start - INITIAL
    full = head + (first + 1 - head) // SHAPE.BLOCK_N * SHAPE.BLOCK_N
    for i in range(head, full, SHAPE.BLOCK_N):
        position = tl.where(i < start, i - head, i)
        b_k = _load_block(source, position, SHAPE)
        b_max = tl.maximum(b_max, tl.max(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), 1))
    for i in range(full, source.end, SHAPE.BLOCK_N):
        b_k = _load_block(source, i, SHAPE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_seen = (i + tl.arange(0, SHAPE.BLOCK_N))[None, :] <= o_m[:, None]
        b_max = tl.maximum(b_max, tl.max(tl.where(b_seen, b_s, float("-inf")), 1))
    return b_max


@triton.jit
def _load_block(source, position, SHAPE):
    """Load keys [BLOCK_N, BLOCK_D] from ``position`` on."""
    o_n = position + tl.arange(0, SHAPE.BLOCK_N)
    return load_keys(source.keys, source.i_row, source.i_kv, o_n, source.end, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)


@triton.jit(do_not_specialize=["num_heads", "num_tiles", "num_sets"])
def vote_kernel(keys, groups, voters, heads, num_heads, num_tiles, num_sets, scale, SHAPE, VOTE):
    """Let a set of (group, head) pairs of a row vote on VOTE_SPLIT keys of one kv head, COLUMNS voters at a time.

    ``heads`` is None if all heads are selected. With WHOLE_WORDS a vote for one key keeps all keys of its word.

    Grid: (sets of pairs · kv heads, splits, rows). Bound by the matrix units, and by maxima over voters.

    Args:
        heads: [num_heads] int32, numbers of the selected heads; None for all.
    """
    PAIRS: tl.constexpr = VOTE.COLUMNS // VOTE.BLOCK_T
    # Programs that read the same keys are neighbours, and so are kv heads, which are adjacent in vLLM's usual layout.
    i_kv, i_row = tl.program_id(0) // num_sets, tl.program_id(2)
    begin = tl.program_id(1) * VOTE_SPLIT
    first_pair = tl.program_id(0) % num_sets * PAIRS
    o_pair = first_pair + tl.arange(0, PAIRS)
    i_first = tl.load(groups.row_starts + i_row)
    num_pairs = (tl.load(groups.row_starts + i_row + 1) - i_first) * SHAPE.GROUP
    group = groups.table + (i_first + o_pair // SHAPE.GROUP) * GROUP_FIELDS
    b_end = tl.load(group, mask=o_pair < num_pairs, other=0) - INITIAL  # candidates of each pair's group, if any
    end = tl.minimum(tl.max(b_end, 0), begin + VOTE_SPLIT)
    if (begin < end) & is_read(i_kv, heads, num_heads, SHAPE.GROUP):
        b_head = i_kv * SHAPE.GROUP + o_pair % SHAPE.GROUP
        b_offset = tl.load(group + LIST_OFFSET, mask=o_pair < num_pairs, other=0)
        b_word = b_head.to(tl.int64) * groups.num_words + b_offset // WORD
        source = KeySource(keys, i_row, i_kv, INITIAL + end)
        row_voters = RowVoters(voters, groups.table + i_first * GROUP_FIELDS, num_pairs, i_kv * SHAPE.GROUP, num_tiles)
        most = 0
        if VOTE.ONE_PASS:
            b_q, b_anchor = _voters(row_voters, first_pair, 0, SHAPE, VOTE)
        else:
            most = tl.max(tl.load(group + NUM_TILES, mask=o_pair < num_pairs, other=0), 0) * SHAPE.VOTERS
        for candidate in range(begin, end, SHAPE.BLOCK_N):
            b_k = _load_block(source, INITIAL + candidate, SHAPE)
            if VOTE.ONE_PASS:
                b_lead = _leads(b_k, b_q, b_anchor, scale, PAIRS)
            else:
                b_lead = tl.full([SHAPE.BLOCK_N, PAIRS], float("-inf"), tl.float32)
                for i in range(0, most, VOTE.BLOCK_T):
                    b_q, b_anchor = _voters(row_voters, first_pair, i, SHAPE, VOTE)
                    b_lead = tl.maximum(b_lead, _leads(b_k, b_q, b_anchor, scale, PAIRS))
            b_lead = tl.reshape(b_lead, [SHAPE.BLOCK_N // WORD, WORD, PAIRS])
            if VOTE.WHOLE_WORDS:
                b_kept = tl.where(tl.max(b_lead, 1) >= 0, ALL_KEPT, 0)
            else:
                b_kept = tl.sum((b_lead >= 0).to(tl.int32) << tl.arange(0, WORD)[None, :, None], 1)
            o_word = candidate // WORD + tl.arange(0, SHAPE.BLOCK_N // WORD)
            tl.store(
                groups.words + b_word[None, :] + o_word[:, None], b_kept,
                mask=(candidate < b_end)[None, :] & (o_word >= 0)[:, None],
            )  # fmt: skip


@triton.jit
def _voters(row_voters, first_pair, first, SHAPE, VOTE):
    """Load voters ``first`` to ``first`` + BLOCK_T of each group of a set: queries [COLUMNS, BLOCK_D] and anchors.

    The first voters of all groups come first: maxima over the voters of one group then stay within a thread.
    """
    o_c = tl.arange(0, VOTE.COLUMNS)
    o_pair, o_t = first_pair + o_c % (VOTE.COLUMNS // VOTE.BLOCK_T), first + o_c // (VOTE.COLUMNS // VOTE.BLOCK_T)
    in_row = o_pair < row_voters.num_pairs
    group = row_voters.table + o_pair // SHAPE.GROUP * GROUP_FIELDS
    votes = in_row & (o_t < tl.load(group + NUM_TILES, mask=in_row, other=0) * SHAPE.VOTERS)
    o_tile = (row_voters.first_head + o_pair % SHAPE.GROUP).to(tl.int64) * row_voters.num_tiles
    o_tile += tl.load(group + FIRST_TILE, mask=in_row, other=0)
    o_voter = o_tile * SHAPE.VOTERS + o_t
    b_q = load_vectors(row_voters.voters.queries, o_voter, votes, SHAPE.BLOCK_D)
    return b_q, tl.load(row_voters.voters.anchors + o_voter, mask=votes, other=float("inf"))


@triton.jit
def _leads(b_k, b_q, b_anchor, scale, PAIRS: tl.constexpr):
    """Compute, for each key and pair, the largest excess of a score over x_a − θ of its voter: [keys, PAIRS].

    A key with an excess below 0 fails the test (equation 2).
    """
    b_s = tl.dot(widen(b_k), tl.trans(b_q), input_precision="ieee") * scale - b_anchor[None, :]
    return tl.max(tl.reshape(b_s, [b_k.shape[0], b_q.shape[0] // PAIRS, PAIRS]), 1)


@triton.jit(do_not_specialize=["num_tiles"])
def blocks_kernel(groups, index, heads, num_tiles, INDEX_N: tl.constexpr, ANY: tl.constexpr):
    """Write the list of blocks of a tile and head: the anchor region, and blocks of which the group keeps all keys.

    With ANY, a block is listed if the group keeps at least one of its keys, and the tile has no stripes.

    Grid: (tiles, n). Bound by the latency of dependent loads; it reads a bit for each key.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
    """
    i_tile, _, i_head = tile_and_head(0, heads)
    window = groups.tile_windows + i_tile * TILE_FIELDS
    words = groups.words + i_head * groups.num_words + tl.load(window + TILE_LIST_OFFSET) // WORD
    start = tl.load(window) // INDEX_N
    _, num_causal = tile_blocks(index.tiles, i_tile, INDEX_N)
    target = list_of(index, i_head, i_tile)
    count = 0
    for i in range(0, num_causal, CHUNK_BLOCKS):
        o_n = i + tl.arange(0, CHUNK_BLOCKS)
        o_candidate = o_n - INITIAL // INDEX_N
        b_voted = (o_candidate >= 0) & (o_n < start)
        b_words, b_whole = _block_words(words, o_candidate, b_voted, INDEX_N)
        if ANY:
            b_whole = tl.max((b_words != 0).to(tl.int32), 1) != 0
        count = append(target, count, o_n, (o_n < num_causal) & (b_whole | (b_voted == 0)))
    store_count(index.block_counts, i_head, i_tile, num_tiles, count)


@triton.jit
def _block_words(words, o_b, mask, INDEX_N: tl.constexpr):
    """Load the words of candidate blocks [blocks, words of a block], 0 if masked, and flag whole blocks."""
    b_words = load_vectors(words, o_b, mask, INDEX_N // WORD)
    return b_words, tl.min((b_words == ALL_KEPT).to(tl.int32), 1) != 0


@triton.jit
def _stripe_bits(words, o_b, num_blocks, INDEX_N: tl.constexpr):
    """Load a bit for each key of candidate blocks: 0 in whole blocks, and from ``num_blocks`` on."""
    b_words, b_whole = _block_words(words, o_b, o_b < num_blocks, INDEX_N)
    b_words = tl.where(b_whole[:, None], 0, b_words)
    b_bits = (b_words[:, :, None] >> tl.arange(0, WORD)[None, None, :]) & 1
    return tl.reshape(b_bits, [o_b.shape[0] * INDEX_N])


@triton.jit(do_not_specialize=["num_tiles"])
def stripes_kernel(groups, index, heads, num_tiles, INDEX_N: tl.constexpr):
    """Write a stretch of one group's stripes for one head.

    The program of the last stretch also writes the counts of all tiles.

    Grid: (stretches of the longest list, groups, n). Bound by memory: it reads a bit for each key, and writes 4 bytes
    for each stripe.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
    """
    i_head = tl.load(heads + tl.program_id(2))
    group = groups.table + tl.program_id(1) * GROUP_FIELDS
    num_candidates = tl.maximum(tl.load(group) - INITIAL, 0)
    o_tile = i_head.to(tl.int64) * num_tiles + tl.load(group + FIRST_TILE)
    begin = tl.program_id(0) * LIST_SPLIT
    if (begin == 0) | (begin < num_candidates):
        words = groups.words + i_head.to(tl.int64) * groups.num_words + tl.load(group + LIST_OFFSET) // WORD
        count = 0
        for i in range(0, begin // INDEX_N, LIST_SPLIT // INDEX_N):
            o_b = i + tl.arange(0, LIST_SPLIT // INDEX_N)
            count += tl.sum(_stripe_bits(words, o_b, begin // INDEX_N, INDEX_N), 0)
        target = index.stripe_positions + tl.load(index.stripe_offsets + o_tile)
        for i in range(begin, tl.minimum(begin + LIST_SPLIT, num_candidates), LIST_STEP):
            o_b = i // INDEX_N + tl.arange(0, LIST_STEP // INDEX_N)
            b_kept = _stripe_bits(words, o_b, num_candidates // INDEX_N, INDEX_N)
            count = append(target, count, i + tl.arange(0, LIST_STEP) + INITIAL, b_kept)
        if begin + LIST_SPLIT >= num_candidates:
            end = tl.load(group + NUM_TILES)
            for i in range(0, end, 32):
                o_t = i + tl.arange(0, 32)
                tl.store(index.stripe_counts + o_tile + o_t, count, mask=o_t < end)
