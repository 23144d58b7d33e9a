# SPDX-License-Identifier: Apache-2.0
"""SALE (Ji et al., 2025: "SALE: Low-bit Estimation for Efficient Sparse Attention in Long-context LLM Prefilling").

Blocks have b_q = 64 queries and b_k = 32 keys. Sink and local blocks are always kept. A block between them is kept if
any element's relative attention score, estimated from 4-bit queries and keys, is at least τ (Algorithm 1):

1. Quantisation (section 3.2 names SageAttention-2's; the details are from the authors' code): q − q̄ and k − k̄ become
   integers from −7 to 7, where q̄ is the head's mean query of this step and k̄ is the row's mean key. In a block of 32,
   keys j of equal (j mod 8) // 2 share a scale: the eight keys that one thread holds in the matrix instruction's
   result.
2. m̃ and l̃ are the row maximum and the sum of exponentials over the sink and local regions, in full precision.
3. S̃ = scale · (Q̃K̃ᵀ dequantised + q̄(k − k̄)ᵀ + q k̄ᵀ), and a block is kept if exp(S̃ − m̃)/l̃ ≥ τ (equation 3). Equation
   4 misplaces a parenthesis, "S̃ ≥ ln(τ·l̃ + m̃)". Taking logarithms gives S̃ ≥ ln τ + ln l̃ + m̃, which is tested here.
   Terms that do not change along a row, such as q k̄ᵀ, are part of one threshold per query.

Size of the local region (appendix C): blocks between the sink and the local region are divided into segments of four.
The remainder at the row's end (fewer than four blocks) joins the local region, which therefore has 128 to 224 tokens.

Choices where the paper is ambiguous, and deviations from it:

* Hopper has no 4-bit matrix instruction. The integers are exact in int8 and in e4m3, so no precision is lost. From
  Hopper on they are multiplied as e4m3, whose results need no conversion: a sum is an integer of at most 49 · head_dim
  ≤ 12,544 < 2^14, and Hopper's fp8 accumulator, though narrower than float32, keeps 14 bits (tests check this). Other
  devices use int8.
* Comparisons are the bottleneck on Hopper, so they run in half precision if that is safe. Half precision represents
  every integer up to 2,048, so sums of e4m3 products are exact while |q̃| · |k̃| is at most 2,048 (Cauchy-Schwarz).
  With q̄(k − k̄)ᵀ, also at most 2,048 in the same unit, scores are off by at most 2^-11 of themselves and 2^-10 of
  that term, a fraction of the error of 4 bits. Programs whose queries or keys may exceed these limits, and all other
  devices, use float32.
* The test multiplies every query with every key: 8.5e12 operations at 131,072 tokens for a chunk of 8,192 and 32 heads
  of 128 channels. This is half of FlashAttention's work at twice bf16's rate, so the lower limit on Hopper is about
  0.17 of FlashAttention-3's time. The paper's 0.11 relies on an RTX 4090, whose INT4 is 8 times as fast as its FP16.
* Heads with τ = 0 skip the test and keep every block.
* Query blocks are counted from the row's first query of this step, so they need not be aligned with absolute positions.
  A tile of 128 queries keeps the union of its two query blocks, so attention works on 128 × 32. On Hopper's engines an
  index has the paper's blocks of 32 keys where all heads of a layer run SALE (``block_width.py``). Elsewhere, a block
  of 64 keys is kept if either of its two halves is, and queries attend to more keys. The second query block's local
  region never begins before the first's, so only keys before the first's local region are tested.
* The mean query covers this step's queries, and the mean key all keys so far. Selection therefore depends on the chunk
  size, and on later queries and keys of the same chunk.
* The paper computes attention over the selected blocks in 8 bits (SageAttention). Here that is an option of ``attend``,
  ``int8_scores``, off by default.

**The authors' released code** differs from the paper and from this module in the following ways:

* Queries r and r + 8 of each 16 share a scale, because a thread of the matrix instruction holds both. Here each query
  has its own scale.
* q̄(k − k̄)ᵀ is rounded to an integer in units of both scales, and scores are compared in half precision.
* A score must exceed the threshold; the paper's Algorithm 1 has ≥, which is tested here.
* Prompts of at most 1,024 tokens run dense. Here that is the server's decision (``min_tokens``).
* Its calibration (section 3.3) stops halving at τ = 0.0001 and sets smaller thresholds to 0, which makes the head
  dense, as ``profile calibrate`` does. It has the paper's absolute bound (``abs``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import HOPPER_CAPABILITY
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.sale.means import row_means
from vllm_sparse_kernels.methods.sale.rounding import (
    KEY_BLOCK,
    round_keys,
    round_queries,
)
from vllm_sparse_kernels.methods.sale.scores import (
    first_flags,
    flag_blocks,
    marks_bytes,
)
from vllm_sparse_kernels.paged import padded_dim
from vllm_sparse_kernels.selection.engine import SelectEngine, hopper_refusal
from vllm_sparse_kernels.selection.lists import compact_blocks
from vllm_sparse_kernels.selection.parameters import require, require_blocks
from vllm_sparse_kernels.selection.slabs import slabs_of


@dataclass(frozen=True)
class Sale(Method):
    """Parameters of SALE; the defaults are the paper's (sections 3.2 and 4.1)."""

    differing = ("tau", "int8_scores")
    finest_block_tokens = 32
    """b_k. An index with blocks of 32 keeps the paper's blocks; with blocks of 64 or 128, it keeps the union over each
    block."""

    tau: float = 0.004
    """τ, in [0, 1): minimum relative attention score of a kept block. 0 keeps every block. The paper calibrates it
    per head, by halving it from 0.008."""

    sink_tokens: int = 32
    """Keys at the start of the sequence that are always kept, in whole 32-key blocks."""

    local_tokens: int = 128
    """l: at least this number of keys before a query block's end is always kept. The module docstring has the rule."""

    int8_scores: bool = False
    """Multiply queries and keys of the kept blocks in 8 bits."""

    def __post_init__(self) -> None:
        require(0 <= self.tau < 1, "tau", self.tau, "a number in [0, 1)")
        require_blocks("sink_tokens", self.sink_tokens, KEY_BLOCK.value, least=0)
        require_blocks("local_tokens", self.local_tokens, KEY_BLOCK.value, least=128)

    @property
    def log_tau(self) -> float:
        """Natural logarithm of τ; −∞ for a head that keeps everything."""
        return math.log(self.tau) if self.tau else -math.inf

    @property
    def select_engines(self) -> Sequence[SelectEngine]:
        """The engine for Hopper in half precision, then the portable engine in float32."""
        return (SelectEngine("hopper", hopper_refusal, partial(_select, in_half=True)), *super().select_engines)

    def least_shared_bytes(self, head_dim: int) -> int:
        block_d = padded_dim(head_dim)
        return 640 * block_d if block_d > 256 else 0

    def select(self, call: Call) -> None:
        _select(call, in_half=False)


def _select(call: Call, in_half: bool) -> None:
    """Fill the lists of the call's heads, comparing in half precision if that is exact, or in float32."""
    if not any(method.tau for method in call.heads.methods):
        compact_blocks(None, call)
        return
    workspace, dtype = call.workspace, integer_dtype(call.q.device)
    with workspace.frame():
        # Flags of all blocks, in the order of ``block_ids``.
        kept = workspace.empty(call.num_selected, call.index.block_ids.shape[1], dtype=torch.uint8)
        first_flags(call, kept)
        means = row_means(call)
        queries = round_queries(call, means, dtype)
        for slab in call.rows.once(slabs_of, call.num_selected, marks_bytes):
            with workspace.frame():
                keys = round_keys(call, means, slab, dtype)
                for run in slab.runs:
                    flag_blocks(call, queries, keys, kept, run, in_half)
        compact_blocks(kept, call)


def integer_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which the 4-bit integers are multiplied."""
    adds_fp8_exactly = capability_of(device) >= HOPPER_CAPABILITY
    return torch.float8_e4m3fn if adds_fp8_exactly else torch.int8
