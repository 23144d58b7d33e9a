# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention (Zhang et al., 2025: "AnchorAttention: Difference-Aware Sparse Attention with Stripe Granularity").

Query and key blocks have b_q = b_kv = 128 tokens. ``step_tiles`` tiles of queries form a group, which keeps one list of
stripes (single keys).

1. Equation 1: x_a is the exact row maximum of q·k·scale over the anchor region. The anchor region is the initial block
   and the local window, which reaches from the start of the tile's group to the diagonal (Algorithm 1).
2. Equation 2: key j between the initial block and the group is kept for the whole group if for any tile of the group
   avgpool(x_a) − avgpool(q)·k_j·scale ≤ θ (section 3.4, Algorithm 2). θ is in natural units, before any exp2.
3. Attention runs over the anchor region (as blocks) and the stripes (Algorithm 3, here ``attend``).

Choices where the paper is ambiguous, and deviations from it:

* Algorithm 2 writes avgpool(Acc) for x_a. Equations 1 and 2 mean the row maxima, which Algorithm 1 returns in M. This
  module follows the equations.
* Algorithm 2 tests "<", equation 2 "≤". This module follows the equation.
* Algorithm 1 begins the window at 1-based block ⌊(i − 1)/step⌋·step, the last block before the group. Algorithm 2 also
  votes on that block, so its keys would count twice. Here the window begins with the group, and the block before it is
  subject to the vote.
* The partial softmax of Algorithm 1 is not reused in step 3: ``attend`` is shared by all methods and computes the
  anchor region again.
* Groups lie at absolute positions: group g covers [g · span, (g + 1) · span) with span = 128 · ``step_tiles``. Tiles
  are counted from the row's first query of this step, so they need not be aligned with groups. A tile belongs to the
  group of its first query, and its window begins where that group begins. Every query therefore sees at least the
  anchor region that it would see in aligned tiles, and every tile keeps at least the keys that its own vote selects.
* If a chunk ends within a group, only the tiles of the current step vote; votes of earlier chunks are not kept.
* A row's last tile may be short: averages are over the queries that it has.
* If a group keeps all keys of an index block, the block is listed as a block and not as stripes. The kept keys are the
  same, but a stripe costs ``attend`` about twice as much as a key of a block. Initial block and group starts are
  multiples of 128, so no block straddles a border, and a group that keeps everything has no stripes.

**The authors' released code** differs from the paper in five ways, none of which this module follows:

* It runs only on the first n − n mod span tokens of a prompt of n tokens, and computes the remaining queries densely.
  Of 48 questions inside a prompt of 12,000 tokens (code-lm-29m-128k, θ = 12, step 16) the paper's rule answers 6 and
  the released code 26: all 15 that are asked in the dense tail, all 6 whose fact lies in the first 2,048 tokens, and
  none of the 22 that need other distant keys. Tests that ask at a prompt's end mostly measure the tail.
* Its initial region is the first group (2,048 keys), not the first block (128 keys), also for x_a. It counts a key of
  the first group twice if the key also passes the vote.
* It never attends to the 128 keys before a group: its window begins with the group, and its vote ends 128 keys before.
  One of its kernels counts blocks from 1 as the paper does, and the other counts from 0. This is therefore a mistake:
  these keys are the nearest to the group's first queries, and leaving out 128 of thousands saves no measurable time.
* It compares scores and anchors in half precision and in units of log2. This module compares in float32.
* It accepts no prefix or chunk: all queries of a prompt run at once.

**Targets of single queries.** A mean query cannot show them. In the layer of a trained model that copies
(code-lm-29m-128k, layer 5; 6,144 tokens; queries that produce answers whose facts lie between initial block and group),
the key that two of the heads need scores 8 to 9 *above* the query's own anchor (median), but 4, 12, 16 and 25 below the
anchor of means of 4, 8, 16 and 128 queries. Of 8 such facts the paper's vote finds none at θ = 12 and at 16, and means
of 8 queries find 4 at a density of 0.85. Two options go beyond the paper; both are off by default:

* ``sample_tokens``: the last of every ``sample_tokens`` queries of a tile votes with its own score and its own x_a,
  instead of the tile's mean query (equation 2 for single queries). A key is kept for the group if any of these queries
  keeps it. Such scores need a far smaller θ, 2 to 4: a key e⁻⁴ times as heavy as the anchor adds little.
* ``whole_blocks``: a vote for a key keeps the index block around it. The block has 32 keys where all heads of a layer
  use this option and such blocks cost no more (``block_width.py``), else 64 or 128. Copied text is copied in order, so
  the keys that unsampled queries look for lie next to the keys that the sampled queries find. Keys of a block also cost
  half as much as stripes, and short groups, which would have long lists of stripes, need no room for them.

Of 19 such facts in 12,288 tokens, groups of 4 tiles that sample every 16th query and keep blocks of 32 find 18 at θ = 1
(perplexity 1.2 % above dense, density 0.23), 18 at θ = 2 (0.2 %, 0.31) and 19 at θ = 3 (0 %, 0.38). Each figure is from
one prompt, in float32 on a CPU.

The vote's matrix products grow by 128 / ``sample_tokens``; the anchors' shrink, because only voters need an anchor. A
group should have no more than ``MOST_VOTERS`` voters: ``step_tiles`` · 128 / ``sample_tokens``.

Mean queries are rounded to q's dtype for the matrix units; scores and thresholds are float32. There are no atomics: a
program that writes a stretch of a list first counts the kept keys before it, so lists are sorted and reproducible.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import triton

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import compile_time
from vllm_sparse_kernels.index import StripeLayout
from vllm_sparse_kernels.methods.anchor_attention.kernels import (
    INITIAL,
    LIST_SPLIT,
    VOTE_SPLIT,
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
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import padded_dim, query_args, wide_dtype
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div, round_up
from vllm_sparse_kernels.selection.parameters import require

VOTE_COLUMNS = 128
"""Voters of several heads and groups that one product multiplies with keys; a power of two for each head and group."""

MOST_VOTERS = 128
"""Largest number of a group's voters in one product. Groups with more voters need several passes, which load the voters
for each block of keys."""

MOST_THETA = 1e30
"""Replaces an infinite θ: an anchor of ∞ minus infinity is not a number."""


class Group(NamedTuple):
    """Tiles of one row that share a window start and a list of stripes."""

    row: int
    start: int
    first_tile: int
    num_tiles: int
    offset: int

    @property
    def num_candidates(self) -> int:
        """Keys between initial block and window, on which the group votes."""
        return max(self.start - INITIAL.value, 0)


def groups_of(rows: Rows, span_tokens: int) -> list[Group]:
    """Return the groups of all rows, by tile. A tile belongs to the group of its first query."""
    starts = [(tile.row, tile.position // span_tokens * span_tokens) for tile in rows.tile_list]
    groups: list[Group] = []
    offset = 0
    for (row, start), tiles in groupby(range(rows.num_tiles), starts.__getitem__):
        first_tile, *others = tiles
        groups.append(Group(row, start, first_tile, 1 + len(others), offset))
        offset += groups[-1].num_candidates
    return groups


class Groups(NamedTuple):
    """The groups of a step's rows on the device, and their sizes."""

    num_candidates: int  # of all groups
    most_candidates: int  # of a group
    most_groups: int  # of a row
    table: torch.Tensor
    row_starts: torch.Tensor
    tile_windows: torch.Tensor

    @staticmethod
    def of(rows: Rows, span_tokens: int) -> "Groups":
        """Copy the groups of a step to the device."""
        groups = groups_of(rows, span_tokens)
        sizes = [group.num_candidates for group in groups]
        in_row = Counter(group.row for group in groups)
        row_starts = [0, *accumulate(in_row[row] for row in range(rows.num_rows))]
        table = [(group.start, group.first_tile, group.num_tiles, group.offset) for group in groups]
        tile_windows = [(group.start, group.offset) for group in groups for _ in range(group.num_tiles)]
        return Groups(
            sum(sizes),
            max(sizes),
            max(in_row.values()),
            rows.to_device(table),
            rows.to_device(row_starts),
            rows.to_device(tile_windows),
        )


@dataclass(frozen=True)
class AnchorAttention(Method):
    """Parameters of AnchorAttention; the defaults are the paper's (section 4.1)."""

    block_tokens = 128
    differing = ("theta",)

    theta: float = 12.0
    step_tiles: int = 16
    sample_tokens: int = 0
    whole_blocks: bool = False

    def __post_init__(self) -> None:
        require(self.theta >= 0, "theta", self.theta, "a number >= 0, or infinity")
        is_count = isinstance(self.step_tiles, int) and self.step_tiles >= 1
        require(is_count, "step_tiles", self.step_tiles, "a whole number of tiles >= 1")
        sampled = isinstance(self.sample_tokens, int) and self.sample_tokens in (0, 1, 2, 4, 8, 16, 32, 64, 128)
        require(sampled, "sample_tokens", self.sample_tokens, "0, or a power of two from 1 to 128")

    @property
    def kernel_theta(self) -> float:
        """θ as a finite number."""
        return min(self.theta, MOST_THETA)

    @property
    def tile_voters(self) -> int:
        """Voters of a complete tile."""
        return TILE_TOKENS // self.sample_tokens if self.sample_tokens else 1

    @property
    def finest_block_tokens(self) -> int | None:
        """Blocks of 32 keys with ``whole_blocks``: narrow blocks keep less around a vote. Stripes do not need them."""
        return WORD.value if self.whole_blocks else None

    @property
    def span_tokens(self) -> int:
        """Positions that one group covers."""
        return self.step_tiles * TILE_TOKENS

    @property
    def least_prompt_tokens(self) -> int:
        """Start of the first group that votes."""
        return round_up(INITIAL.value + TILE_TOKENS, self.span_tokens)

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        if self.whole_blocks:
            return StripeLayout.none(rows)
        groups = groups_of(rows, self.span_tokens)
        offsets = tuple(group.offset for group in groups for _ in range(group.num_tiles))
        return StripeLayout(offsets, sum(group.num_candidates for group in groups))

    def least_shared_bytes(self, head_dim: int) -> int:
        block_d = padded_dim(head_dim)
        return 512 * block_d if block_d > 256 else 0

    def select(self, call: Call) -> None:
        index, rows, empty = call.index, call.rows, call.workspace.empty
        groups = rows.once(Groups.of, self.span_tokens)
        shape = index.num_heads, rows.num_tiles, self.tile_voters
        vectors = empty(*shape, call.cache.padded_head_dim, dtype=wide_dtype(call.q.dtype))
        voters = VoterArgs(vectors, empty(*shape))
        num_words = round_up(groups.num_candidates // WORD.value, 16)
        words = empty(index.num_heads, num_words, dtype=torch.int32)
        args = GroupArgs(groups.table, groups.row_starts, groups.tile_windows, words, num_words)
        self._vote(call, voters, groups, args)
        self._list(call, groups, args)

    def _vote(self, call: Call, voters: VoterArgs, groups: Groups, args: GroupArgs) -> None:
        """Compute the keys that each group keeps (equations 1 and 2), as the words of ``args``."""
        q, cache, rows, group, heads = call.q, call.cache, call.rows, call.group, call.head_ids
        block_d = cache.padded_head_dim
        narrow = block_d * wide_dtype(q.dtype).itemsize > 256  # bytes of a key, to fit shared memory
        block_n, columns = (64, VOTE_COLUMNS // 2) if narrow else (128, VOTE_COLUMNS)
        keys = call.key_args
        shape = compile_time(
            VoteShape(
                HEAD_DIM=cache.head_dim,
                BLOCK_D=block_d,
                GROUP=group,
                BLOCK_N=block_n,
                VOTERS=self.tile_voters,
            )
        )
        options = {
            "num_warps": 8,
            "num_stages": _num_stages(block_d, block_n, shared_bytes(q.device)),
            # Without a limit, Hopper's assembler converts the first queries of 256 channels before it loads the last.
            "maxnreg": 128 if narrow else None,
        }
        queries = max(self.tile_voters, 16) if self.sample_tokens else TILE_TOKENS
        voting = Voting(queries, self.sample_tokens)
        anchor_kernel[(rows.num_tiles, len(heads))](
            query_args(q), keys, rows.tiles, heads, call.parameters("kernel_theta"), voters, args,
            rows.num_tiles, call.scale,
            shape, compile_time(voting), **options,
        )  # fmt: skip
        # Rows that are too short to have candidates also launch it, so that warm-up compiles it for groups of any size.
        group_voters = self.step_tiles * self.tile_voters
        block_t = min(max(triton.next_power_of_2(group_voters), 4), MOST_VOTERS, columns)
        num_sets = ceil_div(groups.most_groups * group, columns // block_t)
        splits = max(ceil_div(groups.most_candidates, VOTE_SPLIT.value), 1)
        split = VoteSplit(
            COLUMNS=columns,
            BLOCK_T=block_t,
            ONE_PASS=group_voters <= block_t,
            WHOLE_WORDS=self.whole_blocks,
        )
        vote_kernel[(num_sets * cache.num_kv_heads, splits, rows.num_rows)](
            keys, args, voters, None if len(heads) == call.index.num_heads else heads, len(heads),
            rows.num_tiles, num_sets, call.scale,
            shape, compile_time(split), **options,
        )  # fmt: skip

    def _list(self, call: Call, groups: Groups, args: GroupArgs) -> None:
        """List the blocks and stripes of every tile from the votes."""
        index, rows, heads = call.index, call.rows, call.head_ids
        blocks_kernel[(rows.num_tiles, len(heads))](
            args, index.args, heads, rows.num_tiles,
            INDEX_N=index.block_tokens, ANY=self.whole_blocks,
        )  # fmt: skip
        if self.whole_blocks:
            return
        stripes_kernel[(max(ceil_div(groups.most_candidates, LIST_SPLIT.value), 1), len(groups.table), len(heads))](
            args, index.args, heads, rows.num_tiles,
            INDEX_N=index.block_tokens,
        )  # fmt: skip


def _num_stages(block_d: int, block_n: int, limit_bytes: int) -> int:
    """Return the pipeline stages of ``anchor_kernel`` for two buffers of ``block_n`` keys, or one if two do not fit."""
    two_buffers = 2 * block_d * (TILE_TOKENS + 2 * block_n) + 1024
    return 3 if two_buffers <= limit_bytes else 2
