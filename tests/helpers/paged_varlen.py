# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's function for paged caches in plain torch, for machines without it. It checks its arguments
strictly."""

import math
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F

from vllm_sparse_kernels.attention.flash.engine import FlashAttention
from vllm_sparse_kernels.paged import FP8

STEP_TOKENS = 128


class VarlenArguments(TypedDict):
    """Keywords of vLLM's ``flash_attn_varlen_func`` that the engine passes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    seqused_k: torch.Tensor
    max_seqlen_k: int
    softmax_scale: float
    causal: bool
    block_table: torch.Tensor
    return_softmax_lse: bool


def paged_varlen(**arguments: Unpack[VarlenArguments]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, log-sum-exp [num_heads, num_tokens]), as vLLM's ``flash_attn_varlen_func`` does with these
    arguments.

    Like FlashAttention-3, it multiplies values past a sequence's last key, on the same page, by zero. A sequence
    without keys gives zeros and −∞. It raises AssertionError if FlashAttention would read or write out of bounds.
    """
    assert arguments.keys() == VarlenArguments.__required_keys__, "missing or unknown arguments"
    q, k, v, out = (arguments[name] for name in ("q", "k", "v", "out"))
    cu_seqlens_q, seqused_k, block_table = (arguments[name] for name in ("cu_seqlens_q", "seqused_k", "block_table"))
    max_seqlen_q, max_seqlen_k = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    num_sequences, page_size = len(seqused_k), k.shape[1]
    ends, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert ends[0] == 0, "cu_seqlens_q must begin with 0"
    assert ends[-1] == len(q) == len(out), "cu_seqlens_q must end with the number of queries"
    assert len(ends) == num_sequences + 1 == len(block_table) + 1, "one sequence each in all arguments"
    assert all(x.dtype == torch.int32 for x in (cu_seqlens_q, seqused_k, block_table)), "int32 expected"
    assert all(x.stride(-1) == 1 for x in (q, k, v, out, block_table)), "the last dimension must be contiguous"
    assert max(lengths) <= max_seqlen_k <= block_table.shape[1] * page_size, "more keys than announced, or than pages"
    assert q.dtype == k.dtype == v.dtype, "queries, keys and values must be of one dtype"
    out_dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    assert out.dtype == out_dtype, "the result has q's dtype, bf16 where it is fp8"
    assert arguments["return_softmax_lse"]
    lse = torch.full((q.shape[1], len(q)), -math.inf, device=q.device)
    group = q.shape[1] // k.shape[2]
    for i, num_keys in enumerate(lengths):
        tokens = slice(ends[i], ends[i + 1])
        num_queries = ends[i + 1] - ends[i]
        assert 0 < num_queries <= max_seqlen_q, f"sequence {i}: {num_queries} queries, {max_seqlen_q} announced"
        if num_keys == 0:
            out[tokens] = 0
            continue
        pages = block_table[i, : -(-num_keys // page_size)].long()
        assert 0 <= int(pages.min()) <= int(pages.max()) < len(k), f"sequence {i}: pages {pages.tolist()} of {len(k)}"
        keys, values = (_padded(x[pages].flatten(0, 1).float()).repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), keys) * arguments["softmax_scale"]
        last_seen = torch.full((num_queries, 1), num_keys - 1, device=q.device)
        if arguments["causal"]:
            last_seen -= torch.arange(num_queries, device=q.device).flip(0)[:, None]
        scores.masked_fill_(torch.arange(scores.shape[2], device=q.device) > last_seen, -math.inf)
        out[tokens] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        lse[:, tokens] = scores.logsumexp(-1)
    return out, lse


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Pad the keys to whole steps, so sums have the same order for every page size."""
    return F.pad(x, (0, 0, 0, 0, 0, -len(x) % STEP_TOKENS))


STAND_IN = FlashAttention(paged_varlen, dtypes=(torch.float32, torch.float16, torch.bfloat16, FP8))
