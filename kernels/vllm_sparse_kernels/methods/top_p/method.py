# SPDX-License-Identifier: Apache-2.0
"""``top_p``, our own: of each tile of 128 queries the fewest blocks of 32 keys that hold p of its attention, and peaks.

p is the share of attention that a tile keeps, so one knob means the same for every head, layer and length, and 1 is
dense. For a row's query q and key k, with s the softmax's scale:

1. Scores in 8 bits. k̂ is k less the row's mean key (which shifts all scores of a query alike), q̂ is q as it is; each
   query, and each block of 32 keys, has a scale of its own, by which the largest magnitude becomes 15, and is rounded
   to e4m3. Sums of products stay below 15 · 15 · 256, so they fit half precision whatever was multiplied.
2. Of query and block b the largest score, m[q, b] = max over the keys k of b up to q of s q̂ k̂: one exponential for 32
   products. The query's share in the block is a[q, b] = exp(m[q, b]) / Σ_b' exp(m[q, b']): each query is divided by its
   own sum over all blocks. A sum estimated from sampled keys lost answers: a query whose heavy keys the sample
   misses outweighs its tile.
3. A[b] is the mean of a[q, b] over the tile's queries, as many as it has. Sink blocks, local region and diagonal are
   kept, and of the others the fewest with which what is kept holds p of Σ_b A[b], of equals the first; but no more
   than ``most_share`` of the tile's blocks, the heaviest. Where attention is that flat, a part of the keys says what
   all would.
4. And every block of which some query has a[q, b] >= ``peak_share``: what a single query looks for weighs at most 1 in
   128 of its tile, and is what answers are made of.

What it keeps and loses on trained models, and what other rules lost: docs/quality.md.

* ``channels`` "half" multiplies the half of each kv head's channels that moves scores most in this step: variance of
  keys times mean square of queries, of all heads that share the keys. That halves the product, the greater part of the
  method's time.
* Mean key and channel weights are of samples by position: one group of 64 keys in eight, and of each tile the first
  32 queries. Any vector would do for the mean. Both are of what this step sees, so selection depends on the chunking,
  and on later queries of the same chunk; never on other rows.
* An index of wider blocks keeps the union of their 32-key blocks (``width.py``).
* On Hopper (``hopper.py``) products are of e4m3, and a share is kept as one byte between its two uses; elsewhere
  (``portable.py``) a score as half precision. Both are means over 128 queries of what is rounded as often up as down.
"""

import logging
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, get_args

import torch

from vllm_sparse_kernels.index import LayerShape, SparseIndex
from vllm_sparse_kernels.methods.base import PerHead
from vllm_sparse_kernels.methods.top_p import portable
from vllm_sparse_kernels.methods.top_p.choice import KEY_BLOCK, choose
from vllm_sparse_kernels.methods.top_p.footprint import most_bytes
from vllm_sparse_kernels.methods.top_p.rounding import (
    LEAST_CHANNELS,
    Moments,
    Rounded,
    moments,
    round_keys,
    round_queries,
)
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.select.channels import kept_channels
from vllm_sparse_kernels.select.lists import compact_blocks
from vllm_sparse_kernels.select.parameters import on_device, require
from vllm_sparse_kernels.select.slabs import Slab, slabs_of

hopper: ModuleType | None
try:
    from vllm_sparse_kernels.methods.top_p import hopper
except (ImportError, AttributeError):  # this Triton's Gluon lacks a name
    hopper = None

CHANNELS = Literal["all", "half"]

UNUSABLE: list[str] = []
"""Why ``hopper`` is not used in this process, once it has failed to compile: at start-up, when kernels warm up."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TopP(PerHead):
    """Parameters of ``top_p``; the module says what each does."""

    differing = ("kept_mass", "most_share")
    finest_block_tokens = KEY_BLOCK.value

    kept_mass: float = 0.9
    """p, in (0, 1]: share of each tile's estimated attention that its kept blocks hold. 1 keeps every block."""

    sink_tokens: int = 128
    """Keys at the sequence's begin that are always kept, in whole blocks."""

    local_tokens: int = 160
    """Keys before a tile's first query that are always kept, and all between its queries."""

    most_share: float = 0.2
    """In (0, 1]: of a tile's blocks no more than this share is kept for its mass. 1: as many as hold p."""

    channels: CHANNELS = "half"
    """What is multiplied: ``half`` is half the product, ``all`` keeps a little fewer blocks for the same loss. No
    fewer than 64 channels are: ``half`` is all of them in heads of 64."""

    peak_share: float = 0.2
    """In (0, 1]: a block is kept too if some query has this share of its attention there. 1: none is for that."""

    def __post_init__(self) -> None:
        require(0 < self.kept_mass <= 1, "kept_mass", self.kept_mass, "a number in (0, 1]")
        for name, value, least in (("sink_tokens", self.sink_tokens, 0), ("local_tokens", self.local_tokens, 128)):
            whole = isinstance(value, int) and value >= least and value % KEY_BLOCK.value == 0
            require(whole, name, value, f"a multiple of {KEY_BLOCK.value} >= {least}")
        require(0 < self.most_share <= 1, "most_share", self.most_share, "a number in (0, 1]")
        require(0 < self.peak_share <= 1, "peak_share", self.peak_share, "a number in (0, 1]")
        require(self.channels in get_args(CHANNELS), "channels", self.channels, f"one of {get_args(CHANNELS)}")

    @property
    def share_kept(self) -> float:
        return self.kept_mass

    def with_kept_mass(self, share: float) -> "TopP":
        """As many blocks as that takes."""
        return replace(self.group_key, kept_mass=share, most_share=1.0)

    def kept_channels(self, head_dim: int) -> int:
        """Channels that are multiplied."""
        return kept_channels(head_dim, self.channels == "half", LEAST_CHANNELS)

    @property
    def least_peak(self) -> float:
        """What a share is compared with. In eight bits a share of all may be a little more than 1."""
        return self.peak_share if self.peak_share < 1 else 2.0

    def workspace_bytes(self, rows: Rows, shape: LayerShape, num_selected: int, stripe_capacity: int) -> int:
        return most_bytes(rows, shape, num_selected, self.kept_channels(shape.head_dim))

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        index.clear_stripes(heads)
        of_heads = self.of_heads(len(heads))
        shares = tuple(one.kept_mass for one in of_heads)
        if min(shares) == 1:
            compact_blocks(None, index, heads)
            return
        kept = on_device(shares, q.device), on_device(tuple(one.most_share for one in of_heads), q.device)
        if on_hopper(q.device, self.kept_channels(cache.head_dim)):
            try:
                self._fill(hopper, q, cache, index, heads, kept, scale)  # type: ignore[arg-type]
                return
            except Exception as error:  # whatever a compiler or a launch raises is the reason
                UNUSABLE.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
                logger.warning("top_p runs without its Hopper kernels, slower: %s", UNUSABLE[-1])
        self._fill(portable, q, cache, index, heads, kept, scale)

    def _fill(
        self, engine: ModuleType, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor,
        kept: tuple[torch.Tensor, torch.Tensor], scale: float,
    ) -> None:  # fmt: skip
        """``engine``: the module whose kernels find the masses. ``kept``: p and the most, of each head."""
        rows, room, group = index.rows, index.workspace, q.shape[1] // cache.num_kv_heads
        kept_d, dtype = self.kept_channels(cache.head_dim), stored_dtype(q.device)
        with room.frame():
            found = moments(q, cache, rows, kept_d, room)
            queries, factors = round_queries(q, rows, found, heads, group, scale, kept_d, dtype, room)
            for slab in slabs_of(rows, len(heads), engine.scratch_bytes):
                with room.frame():
                    keys, steps = _round_slab(cache, index, slab, found, kept_d, dtype, engine.PERMUTED)
                    rounded = Rounded(queries, factors, queries.shape[1], keys, steps, keys.shape[1])
                    self._choose(engine, rounded, index, slab, heads, kept, group)

    def _choose(
        self, engine: ModuleType, rounded: Rounded, index: SparseIndex, slab: Slab, heads: torch.Tensor,
        kept: tuple[torch.Tensor, torch.Tensor], group: int,
    ) -> None:  # fmt: skip
        room = index.workspace
        for run in slab.runs:
            with room.frame():
                scratch = engine.room(len(heads), run.num_tiles, run.reach, room)
                masses = room.empty(len(heads), run.num_tiles, ceil_div(run.reach, 512) * 16)
                engine.masses(
                    rounded, heads, kept[0], self.least_peak, group, index.rows.tiles, run.first_tile, run.pairs,
                    scratch, masses,
                )  # fmt: skip
                choose(masses, index, run.first_tile, heads, *kept, self.sink_tokens, self.local_tokens)


def on_hopper(device: torch.device, kept_d: int) -> bool:
    if hopper is None or UNUSABLE or device.type != "cuda" or kept_d > hopper.WIDEST:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def stored_dtype(device: torch.device) -> torch.dtype:
    """What the numbers of e4m3 are kept and multiplied as."""
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return torch.float8_e4m3fn if has_fp8 else torch.float16


def _round_slab(
    cache: PagedCache, index: SparseIndex, slab: Slab, found: Moments, kept_d: int, dtype: torch.dtype, permuted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    room = index.workspace
    keys = room.empty(cache.num_kv_heads, slab.num_keys, kept_d, dtype=dtype)
    steps = room.empty(cache.num_kv_heads, slab.num_keys // KEY_BLOCK.value)
    round_keys(cache, index.rows, slab.first_row, slab.key_starts, slab.longest, found, keys, steps, permuted)
    return keys, steps
