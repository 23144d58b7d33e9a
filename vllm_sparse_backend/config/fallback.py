# SPDX-License-Identifier: Apache-2.0
"""Reasons why a layer or a row prefills dense, with the remedy for each, and the check of a layer."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from vllm_sparse_backend.identity import FLAG, MLA_FLAG

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8
"""The backend supports multiples of 8 in this range. Kernels pad head_dim to a power of two."""

DTYPES = ("float16", "bfloat16")
CPU_DTYPES = (*DTYPES, "float32")

FP8_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's names of e4m3 caches, with one scale each for a layer's queries, keys and values."""

MIN_FP8_HEAD_DIM, FP8_HEAD_DIM_STEP = 32, 16
"""fp8 matrix products need at least 32 elements, and FlashAttention needs rows of a multiple of 16 bytes."""


class Fallback(StrEnum):
    """A reason to run dense. The value is a metric label."""

    explain: str

    def __new__(cls, value: str, explain: str) -> Self:
        """Create a member."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.explain = explain
        return member

    # fmt: off
    # Reasons of a layer, known once vLLM has built it.
    NOT_DECODER = ("not_decoder",
        "not a decoder's self-attention (encoder, cross-attention, linear attention, Mamba or no attention at all); no "
        "action, such layers stay as they are")
    SLIDING_WINDOW = ("sliding_window",
        "the layer attends within a sliding window, which is sparse already; no action, the model's other layers can "
        "run sparse")
    ALIBI = ("alibi", "the layer adds ALiBi position biases; use a model with rotary position embeddings")
    SOFTCAP = ("softcap", "the layer caps its logits (attn_logit_softcapping); use a model without soft capping")
    HEAD_SIZE = ("head_size",
        f"head_dim is not a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; use a model whose "
        "head_dim is")
    DTYPE = ("dtype",
        "the kernels do not support the model's dtype; use --dtype bfloat16 or float16 (float32 works on CPUs only)")
    QUANTISED_CACHE = ("quantised_cache",
        "the KV cache's quantisation is not supported, or its dtype differs from the model's; use --kv-cache-dtype "
        f"auto, or fp8 on an H100 or H200 with a head_dim of at least {MIN_FP8_HEAD_DIM} that is a multiple of "
        f"{FP8_HEAD_DIM_STEP}")
    HEAD_SCALES = ("head_scales",
        "the checkpoint has one scale per head for its fp8 KV cache (kv_cache_scheme with strategy attn_head); use a "
        "checkpoint with one scale per layer, or --kv-cache-dtype bfloat16")
    MLA = ("mla",
        f"multi-head latent attention caches compressed keys, and has a flag of its own; pass {MLA_FLAG} in place of "
        f"{FLAG} (docs/research/mla.md)")
    PREFILL_CONTEXT_PARALLEL = ("prefill_context_parallel",
        "prefill context parallelism distributes a row's keys over devices; use --prefill-context-parallel-size 1")
    DECODE_CONTEXT_PARALLEL = ("decode_context_parallel",
        "decode context parallelism distributes a row's keys over devices; use --decode-context-parallel-size 1")
    DENSE_LAYER = ("dense_layer", "the layer is listed in dense_layers; remove it there to let it run sparse")
    OTHER_HEADS = ("other_heads",
        "the layer's number of query heads differs from the model's config; no action needed: the model's other layers "
        "can run sparse")
    SHARED_MEMORY = ("shared_memory",
        "this GPU has too little shared memory for the method's kernels at this head_dim; use another method, such as "
        "top_p, or a GPU with more shared memory (A100, H100)")
    # Reasons of a row in a step.
    NON_CAUSAL = ("non_causal", "the row attends in both directions; no action, such rows stay dense")
    CASCADE = ("cascade", "vLLM runs this step as cascade attention over a shared prefix; use --disable-cascade-attn")
    TOO_SHORT = ("too_short",
        "the row ends within min_tokens, or begins within it in a model with multi-head latent attention; lower "
        "min_tokens if sparse attention is still faster")
    SHORT_QUERY = ("short_query",
        "the row has fewer than min_query_tokens new tokens past min_tokens; lower that number if sparse attention is "
        "still faster")
    FEW_PAIRS = ("few_pairs",
        "the row's new tokens past min_tokens have fewer pairs with earlier keys than were measured to pay for "
        "selection; set min_tokens and min_query_tokens to numbers if sparse attention is still faster")
    NEVER_FASTER = ("never_faster",
        "in measurements on this device the method was never faster than dense attention; see the log at start-up")
    UNNAMED = ("unnamed",
        "vLLM does not say which request the row belongs to, and some request of its step chose another level; report "
        "this with the server's options and vLLM's version")
    REQUESTED = ("requested",
        "the request chose exact attention (sparse_prefill 0 or exact), or gets it by the server's settings; change "
        "that to let it run sparse")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """Properties of an attention layer that decide whether it can run sparse."""

    head_dim: int
    dtype: str = "bfloat16"
    attn_type: str = "decoder"
    sliding_window: int | None = None
    alibi: bool = False
    softcap: float | None = None
    kv_cache_dtype: str = "auto"
    reads_fp8: bool = False
    head_scales: bool = False
    is_mla: bool = False
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    device_type: str = "cuda"


def layer_fallback(layer: LayerTraits) -> Fallback | None:
    """Return why a layer can never run sparse.

    The configuration's ``dense_layers`` is not considered here: the plan applies it.
    """
    dtype, kv_cache_dtype = layer.dtype.removeprefix("torch."), layer.kv_cache_dtype.removeprefix("torch.")
    head_dim = layer.head_dim
    has_window = layer.sliding_window is not None and layer.sliding_window >= 0
    is_fp8 = kv_cache_dtype in FP8_CACHES
    fp8_fits = layer.reads_fp8 and head_dim >= MIN_FP8_HEAD_DIM and head_dim % FP8_HEAD_DIM_STEP == 0
    cache_is_readable = fp8_fits if is_fp8 else kv_cache_dtype in ("auto", dtype)
    checks = {
        Fallback.NOT_DECODER: layer.attn_type != "decoder",
        Fallback.MLA: layer.is_mla,
        Fallback.SLIDING_WINDOW: has_window,
        Fallback.ALIBI: layer.alibi,
        Fallback.SOFTCAP: bool(layer.softcap),
        Fallback.HEAD_SIZE: not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP != 0,
        Fallback.DTYPE: dtype not in (CPU_DTYPES if layer.device_type == "cpu" else DTYPES),
        Fallback.QUANTISED_CACHE: not cache_is_readable,
        Fallback.HEAD_SCALES: is_fp8 and layer.head_scales,
        Fallback.PREFILL_CONTEXT_PARALLEL: layer.prefill_context_parallel_size > 1,
        Fallback.DECODE_CONTEXT_PARALLEL: layer.decode_context_parallel_size > 1,
    }
    return next((reason for reason, applies in checks.items() if applies), None)
