# SPDX-License-Identifier: Apache-2.0
"""SALE (Ji et al., 2025: "SALE: Low-bit Estimation for Efficient Sparse Attention in Long-context LLM Prefilling").

Blocks of b_q = 64 queries × b_k = 32 keys. Sink and local blocks are kept; of the blocks between them, those with an
element whose relative attention score, estimated from 4-bit queries and keys, is τ or more (Algorithm 1):

1. Quantisation (section 3.2 names SageAttention-2's; the rest is from the authors' code): q − q̄ and k − k̄, with q̄ the
   head's mean query of this step and k̄ the row's mean key, become integers −7 … 7. In a block of 32, keys j of equal
   (j mod 8) // 2 share a scale: eight keys, those that one thread holds in the matrix instruction's result.
2. m̃ and l̃: row maximum and sum of exponentials over sink and local region, in full precision.
3. S̃ = scale · (Q̃K̃ᵀ dequantised + q̄(k − k̄)ᵀ + q k̄ᵀ) and exp(S̃ − m̃)/l̃ ≥ τ (equation 3). Equation 4 misplaces a
   parenthesis, "S̃ ≥ ln(τ·l̃ + m̃)": taking logarithms gives S̃ ≥ ln τ + ln l̃ + m̃, which is what is tested. The terms
   that do not change along a row, q k̄ᵀ with them, go into one threshold per query.

What decides the local region's size (appendix C): blocks between sink and local region are taken in segments of four,
and those left over at the row's end (fewer than four) join the local region, which so has 128 to 224 tokens.

Where the paper leaves a choice, or this departs from it:

* Every query has a scale of its own. The authors' queries share one by pairs, r and r + 8 of each 16, because a thread
  of their instruction holds both.
* Hopper has no 4-bit matrix instruction. The integers are exact in int8 and in e4m3: nothing of the arithmetic is lost.
  From Hopper on they are multiplied as e4m3, whose results need no conversion: a sum is an integer of at most
  49 · head_dim ≤ 12,544 < 2^14, and Hopper's fp8 accumulator, though narrower than float32, keeps 14 bits (tests hold
  it to that). Elsewhere they are int8.
* The authors round q̄(k − k̄)ᵀ to an integer and compare in half precision. On Hopper comparing is what costs, and what
  they do is done here too where it is safe: e4m3 products are added up in half precision, which has every integer
  up to 2,048, and so has all sums exactly while |q̃| · |k̃| is no more (Cauchy and Schwarz); with q̄(k − k̄)ᵀ, at most
  2,048 steps as well, scores are off by 2^-11 of themselves and 2^-10 of it at most, a fraction of what 4 bits lose.
  A program whose queries or keys may exceed this compares in float32, and so do all elsewhere.
* The test multiplies every query with every key: at 131,072 tokens 8.5e12 operations for a chunk of 8,192 and 32 heads
  of 128. Half of FlashAttention's work at twice bf16's rate, less what FlashAttention itself leaves unused: on Hopper
  0.17 of FlashAttention-3's time is the floor. The paper's 0.11 rests on a 4090's INT4 at 8 times its FP16 rate.
* Beyond the paper, and off unless ``channels`` is "half": scores are estimated from the half of each kv head's channels
  that moves them most in this step (``means.py``), so that the product is half as long. q̄(k − k̄)ᵀ and q k̄ᵀ keep all
  channels, so what is left out, (q − q̄)(k − k̄)ᵀ of the other half, is 0 on average over a row's keys. A key is not to
  be lost for it: every query's threshold is lower by its standard deviation, √(Σ (q − q̄)² var k) over the channels
  left out. So the paper's τ keeps the density and the recall that it has with all channels: on a trained model of 128
  channels, where half hold 0.66 to 0.99 of the energy, 0.70 of the pairs and 0.996 either way; at τ = 0.03 0.49 and
  0.961 against 0.51 and 0.970, at 0.1 0.29 and 0.857 against 0.33 and 0.890.
* Heads with τ = 0 test nothing: they keep every block.
* Query blocks are counted from the row's first query of this step and lie askew of absolute positions. A tile of 128
  queries keeps the union of its two, so that attention is over 128 × 32. An index has the paper's blocks of 32 keys
  where all heads of a layer run SALE, on Hopper's engines (``block_width.py``); elsewhere a block of 64 keys keeps the
  union of its two, and attention is over more. As the second query block's local region begins no earlier than the
  first's, only keys before the first's are tested.
* Both means, and the choice of channels, are over what this step sees, so selection depends on the chunking, and on
  later queries of the same chunk.
* The authors run prompts of at most 1,024 tokens dense. That is for the backend to decide.
* The paper computes attention over the selected blocks in 8 bits (SageAttention). That is ``attend``'s option, off
  unless ``int8_scores`` asks for it: attention over what was kept is then exact to rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.methods.base import PerHead
from vllm_sparse_kernels.methods.sale.means import LEAST_CHANNELS, row_means
from vllm_sparse_kernels.methods.sale.rounding import (
    KEY_BLOCK,
    SEGMENT,
    IntegerFormat,
    Regions,
    Selected,
    room_for_keys,
    round_keys,
    round_queries,
)
from vllm_sparse_kernels.methods.sale.scores import first_flags, flag_blocks, half_refusal, marks_bytes
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.selection.channels import kept_channels
from vllm_sparse_kernels.selection.engine import (
    PORTABLE,
    SelectEngine,
    SelectSpec,
    choose_select_engine,
    never_refuses,
)
from vllm_sparse_kernels.selection.lists import compact_blocks
from vllm_sparse_kernels.selection.parameters import on_device, require
from vllm_sparse_kernels.selection.slabs import slabs_of

CHANNELS = Literal["all", "half"]


@dataclass(frozen=True)
class Sale(PerHead):
    """Parameters of SALE; the defaults are the paper's (sections 3.2 and 4.1)."""

    differing = ("tau", "int8_scores")
    finest_block_tokens = 32
    """b_k. An index of blocks of 32 keeps what the paper keeps, one of 64 or 128 the union over each of its blocks."""

    tau: float = 0.004
    """τ, in [0, 1): relative attention score from which a block is kept. 0 keeps every block. The paper calibrates it
    per head, from 0.008 downwards by halves."""

    sink_tokens: int = 32
    """Keys at the sequence's begin that are always kept, in whole 32-key blocks."""

    local_tokens: int = 128
    """l, the least number of keys before a query block's end that are always kept; the module says when more are."""

    int8_scores: bool = False
    """Multiply queries and keys of the kept blocks in 8 bits."""

    channels: CHANNELS = "all"
    """What is multiplied in 4 bits. ``half`` goes beyond the paper: of each kv head the half of the channels that holds
    most of the energy, and a threshold lower by the standard deviation of the rest. Half the product."""

    SEGMENT_TOKENS: ClassVar[int] = SEGMENT.value
    """Four 32-key blocks: what lies between sink and local region is a multiple of this."""

    def __post_init__(self) -> None:
        require(0 <= self.tau < 1, "tau", self.tau, "a number in [0, 1)")
        for name, value, least in (("sink_tokens", self.sink_tokens, 0), ("local_tokens", self.local_tokens, 128)):
            whole = isinstance(value, int) and value >= least and value % KEY_BLOCK.value == 0
            require(whole, name, value, f"a multiple of {KEY_BLOCK.value} >= {least}")
        require(self.channels in get_args(CHANNELS), "channels", self.channels, f"one of {get_args(CHANNELS)}")

    @property
    def select_engines(self) -> Sequence[SelectEngine]:
        """The engine for Hopper in half precision, then the portable one in float32."""
        return (
            SelectEngine("hopper", half_refusal, select_on_hopper),
            SelectEngine(PORTABLE, never_refuses, select_on_portable),
        )

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        """Fill the lists of ``heads`` on the first engine that does not refuse: see ``Method.select``.

        A server tries engines first, and calls the chosen one itself.

        Args:
            q: [num_tokens, num_heads, head_dim], in the cache's dtype.
            cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
            index: The index, whose lists of ``heads`` are overwritten.
            heads: [n] int32 on the device, numbers of the selected query heads.
            scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
        """
        engine = choose_select_engine(SelectSpec(self, q.device, cache.head_dim)).engine
        engine.select(self, q, cache, index, heads, scale)


def select_on_hopper(
    method: Sale, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    """Fill the lists of ``heads``, comparing in half precision where that is exact.

    Args:
        method: The merged method of the heads.
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
        index: The index, whose lists of ``heads`` are overwritten.
        heads: [n] int32 on the device, numbers of the selected query heads.
        scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
    """
    _select(method, LayerInputs(q, cache, index.rows, scale), index, heads, by_half=True)


def select_on_portable(
    method: Sale, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    """Fill the lists of ``heads``, comparing in float32.

    Args:
        method: The merged method of the heads.
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
        index: The index, whose lists of ``heads`` are overwritten.
        heads: [n] int32 on the device, numbers of the selected query heads.
        scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
    """
    _select(method, LayerInputs(q, cache, index.rows, scale), index, heads, by_half=False)


def _select(method: Sale, inputs: LayerInputs, index: SparseIndex, heads: torch.Tensor, by_half: bool) -> None:
    index.clear_stripes(heads)
    taus = [head.tau for head in method.of_heads(len(heads))]
    if not any(taus):
        compact_blocks(None, index, heads)
        return
    log_taus = on_device(tuple(math.log(tau) if tau else -math.inf for tau in taus), inputs.q.device)
    with index.workspace.frame():
        kept = index.workspace.empty(len(heads), index.block_ids.shape[1], dtype=torch.uint8)
        _flag(method, inputs, index, Selected(heads, log_taus, len(heads)), kept, by_half)
        compact_blocks(kept, index, heads)


def _flag(
    method: Sale, inputs: LayerInputs, index: SparseIndex, selected: Selected, kept: torch.Tensor, by_half: bool
) -> None:
    """Compute the flags of all blocks: [num_selected, block_capacity] uint8, laid out like ``block_ids``."""
    cache, rows, workspace = inputs.cache, inputs.rows, index.workspace
    regions = Regions(method.sink_tokens, method.local_tokens)
    kept_d = kept_channels(cache.head_dim, method.channels == "half", LEAST_CHANNELS)
    integers = IntegerFormat(kept_d, integer_dtype(inputs.q.device))
    first_flags(kept, index, selected, regions)
    means = row_means(inputs.q, cache, rows, kept_d, workspace)
    queries = round_queries(inputs, means, selected, regions, integers, workspace)
    for slab in slabs_of(rows, selected.num_selected, marks_bytes):
        with workspace.frame():
            keys = room_for_keys(selected.num_selected, cache.num_kv_heads, slab.num_keys, integers, workspace)
            round_keys(inputs, means, selected, slab, keys)
            for run in slab.runs:
                flag_blocks(queries, keys, kept, index, selected, regions, run, by_half)


def integer_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which the 4-bit integers are multiplied.

    Args:
        device: Device of the tensors.

    Returns:
        e4m3 on Hopper and later, int8 elsewhere.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return torch.float8_e4m3fn if hopper else torch.int8
