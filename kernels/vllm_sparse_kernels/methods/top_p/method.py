# SPDX-License-Identifier: Apache-2.0
"""``top_p``, a method of this project: the fewest blocks that hold the share p of a tile's attention, and peaks.

Blocks have 32 keys, and tiles 128 queries.

p has the same meaning for every head and layer; 1 is dense. For queries q and keys k of a row, with the softmax
scale s:

1. Round to 8 bits. k̂ is k minus the row's mean key, which shifts all scores of a query equally; q̂ is q. Each query and
   each block of 32 keys has its own scale, which maps the largest magnitude to 15, and is rounded to e4m3. Sums of
   products are at most 15 · 15 · 256 and therefore fit half precision.
2. Compute the largest score of each query and block b, m[q, b] = max over the keys k of b up to q of s q̂ k̂. This takes
   one exponential for 32 products. The query's share in the block is a[q, b] = exp(m[q, b]) / Σ_b' exp(m[q, b']). The
   sum is over all blocks. If it were estimated from sampled keys, a query with heavy keys outside the sample would
   outweigh its tile; this lost answers.
3. Average over the tile's scored queries: A[b]. Keep sink blocks, local region and diagonal, and the fewest other
   blocks with which the kept blocks hold the share 1 − (1 − p) min(t / ``ramp_tokens``, 1) of Σ_b A[b], where t is
   the position of the tile's first query. In shorter contexts less is dropped, because there are fewer keys to pay
   for. Ties go to the first blocks. At most ``most_tokens``
   keys are kept for their mass, heaviest blocks first: if attention is that flat, part of the keys represents all of
   them. The number does not grow with the context, because such tiles do not need more keys in longer contexts.
4. Also keep every block in which some query has a[q, b] >= ``peak_share``. The target of a single query has at most
   1/128 of its tile's mass, and answers depend on such targets. A query has at most 1 / ``peak_share`` of them.

docs/research/quality.md has densities and losses on trained models, also for other rules.

* The second of each two neighbouring queries is scored (``scored.py``), which halves the product, and the work on its
  scores. Neighbours look at similar blocks, so the means hardly change. Step 4 applies to scored queries only. A
  quarter of the queries is too few: answers are lost.
* Only the half of each kv head's channels is multiplied that affects scores most in this step, by variance of keys
  times mean square of queries, over all heads that share the keys, but at least 64 channels. This halves the product,
  which takes most of the method's time.
* Mean key and channel weights come from samples of keys and queries by position. They depend on the tokens of this
  step, so selection depends on the chunking and on later queries of the same chunk, but never on other rows.
* An index with wider blocks keeps the union of their 32-key blocks (``block_width.py``).
* On Hopper (``hopper.py``), products are computed in e4m3, and a share is stored as one byte between its two uses.
  Elsewhere (``portable.py``), a score is stored in half precision. Rounding is unbiased, and its errors average out
  over 128 queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm_sparse_kernels.call import MOST, Call
from vllm_sparse_kernels.engine_choice import MISSING_GLUON, capability_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.top_p import portable
from vllm_sparse_kernels.methods.top_p.choice import (
    KEY_BLOCK,
    mass_width,
    write_block_lists,
)
from vllm_sparse_kernels.methods.top_p.rounding import (
    LEAST_CHANNELS,
    Rounded,
    RoundedFormat,
    round_keys,
    round_queries,
    rounding_bytes,
    row_moments,
)
from vllm_sparse_kernels.methods.top_p.scored import SET_TILES
from vllm_sparse_kernels.paged import padded_dim
from vllm_sparse_kernels.selection.engine import SelectEngine, hopper_refusal
from vllm_sparse_kernels.selection.lists import compact_blocks
from vllm_sparse_kernels.selection.parameters import require, require_blocks
from vllm_sparse_kernels.selection.slabs import slabs_of

hopper: Any = None
if MISSING_GLUON is None:
    from vllm_sparse_kernels.methods.top_p import hopper


@dataclass(frozen=True)
class TopP(Method):
    """Parameters of ``top_p``; the module's docstring describes the algorithm."""

    differing = ("kept_mass", "most_tokens")
    finest_block_tokens = KEY_BLOCK.value

    kept_mass: float = 0.9
    """p, in (0, 1]: share of each tile's estimated attention that its kept blocks hold. 1 keeps every block."""

    ramp_tokens: int = 49152
    """The kept share falls linearly from 1 at position 0 to p at this position. With 1, it is p everywhere."""

    sink_tokens: int = 128
    """Keys at the beginning of the sequence that are always kept, in whole blocks."""

    local_tokens: int = 160
    """Keys before a tile's first query that are always kept, in addition to all keys between its queries."""

    most_tokens: int | None = 2048
    """Maximum number of a tile's keys that are kept for their mass, in whole blocks. With ``null``, only p limits their
    number."""

    peak_share: float = 0.05
    """Blocks with at least this share, in (0, 1], of a single scored query's attention are kept. 1 turns this off."""

    def __post_init__(self) -> None:
        require(0 < self.kept_mass <= 1, "kept_mass", self.kept_mass, "a number in (0, 1]")
        require(self.ramp_tokens > 0, "ramp_tokens", self.ramp_tokens, "a number > 0")
        require_blocks("sink_tokens", self.sink_tokens, KEY_BLOCK.value, least=0)
        require_blocks("local_tokens", self.local_tokens, KEY_BLOCK.value, least=128)
        has_most = self.most_tokens is None or (self.most_tokens > 0 and self.most_tokens % KEY_BLOCK.value == 0)
        require(has_most, "most_tokens", self.most_tokens, f"null or a multiple of {KEY_BLOCK.value} > 0")
        require(0 < self.peak_share <= 1, "peak_share", self.peak_share, "a number in (0, 1]")

    @property
    def share_kept(self) -> float:
        """p, ``kept_mass``."""
        return self.kept_mass

    @property
    def most_blocks(self) -> int:
        """Maximum number of a tile's blocks of 32 keys that are kept for their mass."""
        return MOST if self.most_tokens is None else self.most_tokens // KEY_BLOCK.value

    @property
    def in_short_contexts(self) -> "TopP":
        """The method with p at every position."""
        return replace(self, ramp_tokens=1)

    def with_kept_mass(self, share: float) -> "TopP":
        """Return the method with p = ``share`` and without ``most_tokens``."""
        return replace(self, kept_mass=share, most_tokens=None)

    @property
    def least_peak(self) -> float:
        """Minimum share of a peak; 2 if ``peak_share`` is 1, because an 8-bit share may slightly exceed 1."""
        return self.peak_share if self.peak_share < 1 else 2.0

    @property
    def select_engines(self) -> Sequence[SelectEngine]:
        """The engine for Hopper, then the portable engine."""
        return (SelectEngine("hopper", hopper_refusal, partial(_select, hopper)), *super().select_engines)

    def least_shared_bytes(self, head_dim: int) -> int:
        return rounding_bytes(padded_dim(head_dim), estimate_channels(head_dim))

    def select(self, call: Call) -> None:
        _select(portable, call)


def _select(kernels: Any, call: Call) -> None:
    """Fill the lists of the call's heads. The module ``kernels``, ``hopper`` or ``portable``, computes the masses."""
    if all(method.kept_mass == 1 for method in call.heads.methods):
        compact_blocks(None, call)
        return
    workspace = call.index.workspace
    storage = RoundedFormat(estimate_channels(call.cache.head_dim), stored_dtype(call.q.device))
    with workspace.frame():
        moments = row_moments(call, storage)
        queries, query_scales = round_queries(call, moments, storage)
        for slab in call.rows.once(slabs_of, len(call.heads), kernels.tile_bytes, SET_TILES.value):
            with workspace.frame():
                keys, key_scales = round_keys(call, slab, moments, storage, kernels.PERMUTED)
                workspace.expect(slab.run_bytes)
                rounded = Rounded(queries, query_scales, queries.shape[1], keys, key_scales, keys.shape[1])
                for run in slab.runs:
                    with workspace.frame():
                        masses = workspace.empty(len(call.heads), run.num_tiles, mass_width(run.reach))
                        kernels.compute_masses(call, rounded, run, masses)
                        write_block_lists(call, masses, run.first_tile)


def estimate_channels(head_dim: int) -> int:
    """Return the number of channels that the estimate multiplies, including those that pad head_dim."""
    block_d = padded_dim(head_dim)
    return min(block_d, max(block_d // 2, LEAST_CHANNELS))


def stored_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which e4m3 numbers are stored and multiplied."""
    return torch.float8_e4m3fn if capability_of(device) >= (8, 9) else torch.float16
