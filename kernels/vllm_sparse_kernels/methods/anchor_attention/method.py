# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention (Zhang et al., 2025: "AnchorAttention: Difference-Aware Sparse Attention with Stripe Granularity").

Blocks of b_q = b_kv = 128; ``step_tiles`` tiles of queries form a group and keep one list of stripes.

1. Equation 1: x_a, the exact row maximum of q·k·scale over the anchor region, which is the initial block and the local
   window from the start of the tile's group to the diagonal (Algorithm 1).
2. Equation 2: key j between initial block and group start is kept for the whole group if for any tile of it
   avgpool(x_a) − avgpool(q)·k_j·scale ≤ θ (section 3.4, Algorithm 2). θ is in natural units, before any exp2.
3. Anchor region (blocks) and stripes (keys) are attended (Algorithm 3, here ``attend``).

Where the paper leaves a choice, or this departs from it:

* Algorithm 2 writes avgpool(Acc) for x_a; equations 1 and 2 mean the row maxima, as Algorithm 1 returns them in M.
* Algorithm 2 tests "<", equation 2 "≤": the equation is followed.
* Algorithm 1 begins the window at 1-based block ⌊(i − 1)/step⌋·step, the last one before the group, which Algorithm 2
  visits too. Here the window begins at the group's start, so that no key counts twice; that block is left to the vote,
  unless ``window_tokens`` asks for it, or for more. It matters for short groups, whose window is short.
* Algorithm 1's partial softmax is not kept for step 3: ``attend`` computes the region again and knows no paper.
* Groups lie at absolute positions: group g covers [g · span, (g + 1) · span), span = 128 · ``step_tiles``. Tiles are
  counted from the row's first query of this step and may lie askew. A tile belongs to the group of its first query, and
  its window begins at that group's start, for its queries past the group's end too. For none of them is the region that
  is attended whole smaller than with aligned tiles, and every tile keeps at least what its own vote selects.
* Of a group cut by a chunk's border, the tiles of this step alone vote: what earlier chunks selected is not kept.
* A row's last tile may be short: averages run over the queries that are there.
* A block of the index whose every key the group keeps is listed as a block and not as stripes: the same keys, but a
  gathered key costs ``attend`` about twice one of a block. Initial block and group starts are multiples of 128, so that
  no block has keys on both sides of a border, and a group that keeps everything has no stripes.

**What one query looks for.** A tile's mean query cannot see it. In the layer of a trained model that copies
(code-lm-29m-128k, layer 5; 6,144 tokens; queries that produce answers whose facts lie between initial block and group),
the key that two of the heads need scores 8 to 9 *above* the query's own anchor (median). The mean of 4, 8, 16 and 128
queries has it 4, 12, 16 and 25 under the mean anchor: of 8 such facts the paper's vote finds none, at θ = 12 and at 16,
and means of 8 queries find 4 at a density of 0.85. So, beyond the paper and off by default:

* ``sample_tokens``: the last of every so many queries of a tile votes by its own score, held against its own x_a, not
  against a mean (equation 2 for single queries). A key is kept for the group if any of them wants it. Such scores need
  a far smaller θ, 2 to 4: a key e⁻⁴ times as heavy as the anchor adds little.
* ``whole_blocks``: a vote for one key keeps the block of the index around it: of 32 keys where all heads of a layer ask
  for it and such blocks cost no more (``block_width.py``), of 64 or 128 elsewhere. What is copied is copied in order:
  the keys that the unsampled queries between look for lie beside those that the sampled ones find. A block's keys also
  cost half of what stripes do, and short groups, which make for long lists of stripes, need no room for them.

With one tile a group and ``window_tokens`` = 512, the same prompt: sampled every 16 with blocks of 32, θ = 2, finds all
8 facts, perplexity 0.6 % above dense at a density of 0.28 (the paper's: none, 5.8 %, 0.65). Sampled without blocks, θ =
3, finds none (0.21); blocks without sampling, θ = 9, find all, at 5.3 % and 0.40; without the 512 keys of window
perplexity is 8 % up. Of 19 such facts in 12,288 tokens, groups of 4 tiles find 18 at θ = 1 (perplexity +1.2 %, density
0.23), 18 at θ = 2 (+0.2 %, 0.31), 19 at θ = 3 (0 %, 0.38); single tiles 16 at θ = 3 (0.31), every 8 sampled 17 (0.32).
One prompt each, float32 on a CPU.

The vote's products grow by 128 / ``sample_tokens``; the anchors' shrink, as only voters need one. A group's voters,
``step_tiles`` · 128 / ``sample_tokens``, should be no more than ``MOST_VOTERS``.

The mean queries are rounded to q's dtype for the matrix units, scores and thresholds are float32. No atomics: whoever
writes a stretch of a list adds up what is kept before it, so that lists come out sorted and the same every time.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_sparse_kernels.attention.portable.engine import MatrixArgs, descriptors_of, matrix_args, supports_bulk
from vllm_sparse_kernels.compile_time import compile_time
from vllm_sparse_kernels.index import LayerShape, SparseIndex, StripeLayout
from vllm_sparse_kernels.methods.anchor_attention.kernels import (
    WORD,
    GroupArgs,
    VoterArgs,
    VoteShape,
    VoteSplit,
    Voting,
    anchor_kernel,
    blocks_kernel,
    stripes_kernel,
    vote_kernel,
)
from vllm_sparse_kernels.methods.base import PerHead
from vllm_sparse_kernels.paged import PagedCache, key_args, query_args, wide_dtype
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div, to_device
from vllm_sparse_kernels.selection.footprint import voted_bytes
from vllm_sparse_kernels.selection.lists import CHUNK_BLOCKS
from vllm_sparse_kernels.selection.parameters import on_device, require
from vllm_sparse_kernels.workspace import SPARE_BYTES

INITIAL_TOKENS = TILE_TOKENS
"""Keys of the initial block, attended by every query."""

VOTE_COLUMNS = 128
"""Voters that keys meet in one product: those of several heads and groups at once, a power of two for each."""

MOST_VOTERS = 128
"""Voters of a group among them, at most; groups with more take several passes, in which they are loaded for each block
of keys."""

VOTE_SPLIT = 1024
"""Candidate keys on which one program lets vote."""

SPLIT_TOKENS = 4096
"""Candidate keys that one program turns into a stretch of a list, ``CHUNK_TOKENS`` at a time."""

CHUNK_TOKENS = 1024

MOST_THETA = 1e30
"""Stands for infinity, which an anchor of ∞ less it would make no number."""

GROUP_FIELDS = 4
"""Columns of the groups' table on the device: start of the window, first tile, number of tiles, offset."""


class Group(NamedTuple):
    """Tiles of one row whose first queries lie in one span: they share one window start and one list of stripes."""

    start: int  # position where the window begins; of a row's first groups it may be negative
    first_tile: int  # in Rows.tile_list
    num_tiles: int
    offset: int  # of the list, in a head's stripes

    @property
    def num_candidates(self) -> int:
        """Keys between initial block and window: what the group votes on, and the capacity of its list."""
        return max(self.start - INITIAL_TOKENS, 0)


def group_tiles(rows: Rows, span_tokens: int, window_tokens: int) -> list[list[Group]]:
    """Return the groups of every row, in the order of their tiles.

    Groups of a row begin at consecutive multiples of the span, and windows ``window_tokens`` before them.

    Args:
        rows: The rows of a step.
        span_tokens: Positions that a group covers.
        window_tokens: Keys of the window that lie before the group.

    Returns:
        Groups, by row.
    """
    offset, grouped = 0, []
    for row, (context_len, seq_len) in enumerate(zip(rows.context_lens, rows.seq_lens)):
        groups, first_tile = [], rows.tile_starts[row]
        for i_group in range(context_len // span_tokens, ceil_div(seq_len, span_tokens)):
            tiles_until = ceil_div((i_group + 1) * span_tokens - context_len, TILE_TOKENS)
            end_tile = min(rows.tile_starts[row] + tiles_until, rows.tile_starts[row + 1])
            if first_tile < end_tile:
                start = i_group * span_tokens - window_tokens
                groups.append(Group(start, first_tile, end_tile - first_tile, offset))
                offset += groups[-1].num_candidates
                first_tile = end_tile
        grouped.append(groups)
    return grouped


class Groups(NamedTuple):
    """The groups of a step's rows, on the host and on the device."""

    of_rows: list[list[Group]]
    table: torch.Tensor  # [num_groups, GROUP_FIELDS] int32
    row_starts: torch.Tensor  # [num_rows + 1] int32, a row's first group

    @property
    def num_candidates(self) -> int:
        """Keys that all groups vote on."""
        return sum(group.num_candidates for of_row in self.of_rows for group in of_row)

    @property
    def largest(self) -> int:
        """Keys that any group votes on at most."""
        return max(group.num_candidates for of_row in self.of_rows for group in of_row)

    @staticmethod
    def of(rows: Rows, span_tokens: int, window_tokens: int) -> "Groups":
        """Return the groups of a step, copied to the device.

        Args:
            rows: The rows of a step.
            span_tokens: Positions that a group covers.
            window_tokens: Keys of the window that lie before the group.

        Returns:
            Groups on the host and on the device.
        """
        of_rows = group_tiles(rows, span_tokens, window_tokens)
        row_starts = [0, *accumulate(len(groups) for groups in of_rows)]
        flat = [field for groups in of_rows for group in groups for field in group]
        on_device = to_device(flat + row_starts, torch.int32, rows.device)
        return Groups(of_rows, on_device[: len(flat)].view(-1, GROUP_FIELDS), on_device[len(flat) :])


@dataclass(frozen=True)
class AnchorAttention(PerHead):
    """Parameters of AnchorAttention; the defaults are the paper's (section 4.1).

    theta: θ, how far under the anchor a key's score may lie, in units of q·k·scale; infinity keeps every key.
    step_tiles: step, tiles of 128 queries that share one selection.
    use_anchor: False sets x_a = 0, the paper's ablation "without anchor" (table 4).

    window_tokens: keys before the group that belong to its window as well, a multiple of 128. Algorithm 1 read with
        1-based blocks has 128.

    Beyond the paper, and off by default:

    sample_tokens: every so-many-th query of a tile votes, with its own score and its own anchor, instead of the tile's
        mean query; a power of two up to 128, or 0 for the mean.
    whole_blocks: a vote for one key keeps the index's whole block around it, and no list has stripes.
    """

    block_tokens = 128
    differing = ("theta",)

    theta: float = 12.0
    step_tiles: int = 16
    use_anchor: bool = True
    window_tokens: int = 0
    sample_tokens: int = 0
    whole_blocks: bool = False

    def __post_init__(self) -> None:
        require(self.theta >= 0, "theta", self.theta, "a number >= 0, or infinity")
        is_count = isinstance(self.step_tiles, int) and self.step_tiles >= 1
        require(is_count, "step_tiles", self.step_tiles, "a whole number of tiles >= 1")
        in_blocks = self.window_tokens >= 0 and self.window_tokens % TILE_TOKENS == 0
        require(in_blocks, "window_tokens", self.window_tokens, "a multiple of 128 >= 0")
        sampled = isinstance(self.sample_tokens, int) and self.sample_tokens in (0, 1, 2, 4, 8, 16, 32, 64, 128)
        require(sampled, "sample_tokens", self.sample_tokens, "0, or a power of two from 1 to 128")

    @property
    def tile_voters(self) -> int:
        """Voters of a complete tile."""
        return TILE_TOKENS // self.sample_tokens if self.sample_tokens else 1

    @property
    def finest_block_tokens(self) -> int | None:
        """Narrow blocks keep less around a vote; single keys do not care."""
        return WORD.value if self.whole_blocks else None

    @property
    def span_tokens(self) -> int:
        """Positions that one group covers."""
        return self.step_tiles * TILE_TOKENS

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        """Return the room for one head's stripes: see ``Method.stripe_layout``.

        Args:
            rows: The rows of a step.

        Returns:
            Offsets of the tiles' lists.
        """
        if self.whole_blocks:
            return StripeLayout.none(rows)
        groups = [group for of_row in group_tiles(rows, self.span_tokens, self.window_tokens) for group in of_row]
        offsets = tuple(group.offset for group in groups for _ in range(group.num_tiles))
        return StripeLayout(offsets, sum(group.num_candidates for group in groups))

    def workspace_bytes(self, rows: Rows, shape: LayerShape, num_selected: int, stripe_capacity: int) -> int:
        """Return what ``select`` takes: see ``Method.workspace_bytes``.

        Args:
            rows: The rows of a step.
            shape: Sizes of the layer.
            num_selected: Number of query heads to select.
            stripe_capacity: Positions of all lists of stripes of one head.

        Returns:
            An upper bound, in bytes.
        """
        of_rows = group_tiles(rows, self.span_tokens, self.window_tokens)
        num_candidates = sum(group.num_candidates for of_row in of_rows for group in of_row)
        voted = voted_bytes(rows, shape, num_candidates, self.tile_voters) + SPARE_BYTES
        return max(voted, super().workspace_bytes(rows, shape, num_selected, stripe_capacity))

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        """Fill the lists of ``heads``: see ``Method.select``.

        Args:
            q: [num_tokens, num_heads, head_dim], in the cache's dtype.
            cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
            index: The index, whose lists of ``heads`` are overwritten.
            heads: [n] int32 on the device, numbers of the selected query heads.
            scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
        """
        rows, empty = index.rows, index.workspace.empty
        settings = self.span_tokens, self.window_tokens
        groups = rows.once((Groups, *settings), lambda: Groups.of(rows, *settings))
        shape, block_d = (index.num_heads, rows.num_tiles, self.tile_voters), triton.next_power_of_2(cache.head_dim)
        voters = VoterArgs(empty(*shape, block_d, dtype=wide_dtype(q.dtype)), empty(*shape))
        num_words = ceil_div(groups.num_candidates // WORD.value, 16) * 16
        words = empty(index.num_heads, num_words, dtype=torch.int32)
        args = GroupArgs(groups.table, groups.row_starts, words, num_words)
        self._vote(q, cache, index, heads, scale, voters, groups, args)
        self._list(index, heads, groups, args)

    def _vote(
        self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float,
        voters: VoterArgs, groups: Groups, args: GroupArgs,
    ) -> None:  # fmt: skip
        """Equations 1 and 2: what each group keeps, as the words of ``args``."""
        rows, group = index.rows, index.num_heads // cache.num_kv_heads
        block_d = triton.next_power_of_2(cache.head_dim)
        narrow = block_d * wide_dtype(q.dtype).itemsize > 256  # bytes of a key, for what fits into shared memory
        block_n, columns = (64, VOTE_COLUMNS // 2) if narrow else (128, VOTE_COLUMNS)
        matrix, descriptor = _matrix(cache, block_n)
        keys = key_args(cache, rows.block_table), descriptor, matrix
        shape = compile_time(
            VoteShape(
                HEAD_DIM=cache.head_dim,
                BLOCK_D=block_d,
                GROUP=group,
                INITIAL=INITIAL_TOKENS,
                PAGE=cache.page_size,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                BLOCK_N=block_n,
            )
        )
        # Two programs on a multiprocessor: one multiplies while the other takes maxima.
        options = {
            "num_warps": 8,
            "num_stages": 2 if descriptor else 3,
            "maxnreg": 128 if descriptor else None,
        }
        thetas = on_device(tuple(min(head.theta, MOST_THETA) for head in self.of_heads(len(heads))), q.device)
        queries = max(self.tile_voters, 16) if self.sample_tokens else TILE_TOKENS
        voting = Voting(self.use_anchor, queries, self.sample_tokens, self.tile_voters)
        anchor_kernel[(rows.num_tiles, len(heads))](
            query_args(q), *keys, rows.tiles, heads, thetas, voters,
            rows.num_tiles, scale, self.span_tokens, self.window_tokens,
            shape, compile_time(voting), **options,
        )  # fmt: skip
        # Launched for rows too short to have candidates as well: warming up then compiles it for groups of any size.
        group_voters = self.step_tiles * self.tile_voters
        block_t = min(max(triton.next_power_of_2(group_voters), 4), MOST_VOTERS, columns)
        num_pairs = max(len(of_row) for of_row in groups.of_rows) * group
        num_sets = ceil_div(num_pairs, columns // block_t)
        splits = max(ceil_div(groups.largest, VOTE_SPLIT), 1)
        split = VoteSplit(
            SPLIT=VOTE_SPLIT,
            COLUMNS=columns,
            BLOCK_T=block_t,
            ONE_PASS=group_voters <= block_t,
            VOTERS=self.tile_voters,
            WHOLE_WORDS=self.whole_blocks,
            FIELDS=GROUP_FIELDS,
        )
        vote_kernel[(num_sets * cache.num_kv_heads, splits, rows.num_rows)](
            *keys, args, voters, None if len(heads) == index.num_heads else heads, len(heads),
            rows.num_tiles, num_sets, scale,
            shape, compile_time(split), **options,
        )  # fmt: skip

    def _list(self, index: SparseIndex, heads: torch.Tensor, groups: Groups, args: GroupArgs) -> None:
        """Blocks and stripes of every tile from the votes."""
        rows = index.rows
        blocks_kernel[(rows.num_tiles, len(heads))](
            args, index.args, heads, rows.num_tiles, self.span_tokens, self.window_tokens,
            INITIAL=INITIAL_TOKENS, INDEX_N=index.block_tokens, CHUNK=CHUNK_BLOCKS, ANY=self.whole_blocks,
            GROUP_FIELDS=GROUP_FIELDS,
        )  # fmt: skip
        if self.whole_blocks:
            return
        stripes_kernel[(max(ceil_div(groups.largest, SPLIT_TOKENS), 1), len(groups.table), len(heads))](
            args, index.args, heads, rows.num_tiles,
            INITIAL=INITIAL_TOKENS, INDEX_N=index.block_tokens, SPLIT=SPLIT_TOKENS, CHUNK=CHUNK_TOKENS,
            FIELDS=GROUP_FIELDS,
        )  # fmt: skip


def _matrix(cache: PagedCache, block_tokens: int) -> tuple[MatrixArgs | None, TensorDescriptor | None]:
    """Return descriptors of the keys for bulk copies of ``block_tokens`` rows.

    They are (None, None) if blocks or cache do not allow such copies.
    """
    matrix = matrix_args(cache) if cache.page_size % block_tokens == 0 and supports_bulk(cache) else None
    if matrix is None:
        return None, None
    return matrix, descriptors_of(cache, matrix, block_tokens)[0]
