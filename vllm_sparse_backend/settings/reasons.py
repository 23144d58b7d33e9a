# SPDX-License-Identifier: Apache-2.0
"""Why a layer or a row prefills dense: the reasons, what to do about them, and the test that a layer must pass."""

from enum import StrEnum
from typing import Self

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8
"""Kernels take any multiple of 8 in this range; a head_dim that is no power of two is padded to the next one."""

DTYPES = ("float16", "bfloat16")
CPU_DTYPES = (*DTYPES, "float32")

FP8_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's names of caches in e4m3 with one scale each for a layer's queries, keys and values."""

MIN_FP8_HEAD_DIM, FP8_HEAD_DIM_STEP = 32, 16
"""Products of fp8 take 32 elements at least, and FlashAttention rows of whole 16 bytes."""


class Fallback(StrEnum):
    """A reason to run dense. The value labels counters; ``explain`` says it to people, and what they can do."""

    explain: str

    def __new__(cls, value: str, explain: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.explain = explain
        return member

    # fmt: off
    # These hold for a layer from construction on.
    NOT_DECODER = ("not_decoder",
        "not a decoder's self-attention (encoder, cross-attention or no attention at all); nothing to do, such layers "
        "stay dense")
    SLIDING_WINDOW = ("sliding_window",
        "the layer attends within a sliding window, which is sparse already; nothing to do, its other layers can go "
        "sparse")
    ALIBI = ("alibi", "the layer adds ALiBi position biases; use a model with rotary positions")
    SOFTCAP = ("softcap", "the layer caps its logits (attn_logit_softcapping); use a model without soft cap")
    HEAD_SIZE = ("head_size",
        f"head_dim is no multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; use a model whose is")
    DTYPE = ("dtype",
        "the model runs in a dtype that kernels do not take; use --dtype bfloat16 or float16 (float32 on CPU only)")
    QUANTISED_CACHE = ("quantised_cache",
        "the KV cache is quantised in a way that is not read here, or of another dtype than the model; use "
        f"--kv-cache-dtype auto, or fp8 on an H100 or H200 with a head_dim from {MIN_FP8_HEAD_DIM} on that "
        f"{FP8_HEAD_DIM_STEP} divides")
    HEAD_SCALES = ("head_scales",
        "the checkpoint scales its fp8 KV cache head by head (kv_cache_scheme with strategy attn_head); use a "
        "checkpoint with one scale for each layer, or --kv-cache-dtype bfloat16")
    MLA = ("mla", "multi-head latent attention keeps compressed keys; use a model with plain keys and values")
    PREFILL_CONTEXT_PARALLEL = ("prefill_context_parallel",
        "prefill context parallelism spreads a row's keys over devices; use --prefill-context-parallel-size 1")
    DECODE_CONTEXT_PARALLEL = ("decode_context_parallel",
        "decode context parallelism spreads a row's keys over devices; use --decode-context-parallel-size 1")
    DENSE_LAYER = ("dense_layer", "the layer is listed in dense_layers; take it off that list to let it go sparse")
    OTHER_HEADS = ("other_heads",
        "the layer has another number of query heads than the model's config states; nothing to do, its other layers "
        "can go sparse")
    SHARED_MEMORY = ("shared_memory",
        "this GPU has too little shared memory for tiles of this head_dim; use one with more (head_dim 256 takes an "
        "A100 or H100)")
    # These are found out per row and step.
    NON_CAUSAL = ("non_causal", "the row attends in both directions; nothing to do, such rows stay dense")
    PREFIX_LM = ("prefix_lm",
        "part of the row (such as an image) attends in both directions; nothing to do, such rows stay dense")
    CASCADE = ("cascade", "vLLM runs this step as cascade attention over a shared prefix; use --disable-cascade-attn")
    TOO_SHORT = ("too_short", "the row ends within min_tokens; lower min_tokens if sparse still pays")
    SHORT_QUERY = ("short_query",
        "the row has fewer than min_query_tokens new tokens past min_tokens; lower that number if sparse still pays")
    GUARD = ("guard",
        "the online guard measured too large an error of the layer's output; use settings that keep more there, or "
        "list the layer in dense_layers")
    NEVER_FASTER = ("never_faster",
        "on this device the method was never measured to be faster than dense attention; see the log at start-up")
    UNNAMED = ("unnamed",
        "vLLM does not tell which request the row is of, and some request of its step asked for another level; please "
        "report it with the server's options and vLLM's version")
    NO_ROOM = ("no_room",
        "not even one tile of the row fits into the arena, whose size the log states at start-up; use another method")
    REQUESTED = ("requested",
        "the request asked for exact attention (sparse_prefill 0 or exact), or has it by the server's settings or "
        "switch; leave that out of it, or change these, to let it go sparse")
    # fmt: on


def layer_fallback(
    *,
    head_dim: int,
    dtype: str,
    attn_type: str = "decoder",
    sliding_window: int | None = None,
    alibi: bool = False,
    softcap: float | None = None,
    kv_cache_dtype: str = "auto",
    reads_fp8: bool = False,
    head_scales: bool = False,
    is_mla: bool = False,
    prefill_context_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
    device_type: str = "cuda",
) -> Fallback | None:
    """Why a layer with these properties can never go sparse, or None if it can.

    ``dtype`` is the queries' ("bfloat16" or "torch.bfloat16"); ``kv_cache_dtype`` is vLLM's option, ``reads_fp8``
    whether the device reads fp8, ``head_scales`` whether such a cache has scales for each head. No window is None or
    negative, no soft cap None or 0. ``dense_layers`` is the plan's business, not looked at here.
    """
    dtype, kv_cache_dtype = dtype.removeprefix("torch."), kv_cache_dtype.removeprefix("torch.")
    is_fp8 = kv_cache_dtype in FP8_CACHES
    fp8_fits = reads_fp8 and head_dim >= MIN_FP8_HEAD_DIM and head_dim % FP8_HEAD_DIM_STEP == 0
    checks = {
        Fallback.NOT_DECODER: attn_type != "decoder",
        Fallback.MLA: is_mla,
        Fallback.SLIDING_WINDOW: sliding_window is not None and sliding_window >= 0,
        Fallback.ALIBI: alibi,
        Fallback.SOFTCAP: bool(softcap),
        Fallback.HEAD_SIZE: not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP != 0,
        Fallback.DTYPE: dtype not in (CPU_DTYPES if device_type == "cpu" else DTYPES),
        Fallback.QUANTISED_CACHE: not fp8_fits if is_fp8 else kv_cache_dtype not in ("auto", dtype),
        Fallback.HEAD_SCALES: is_fp8 and head_scales,
        Fallback.PREFILL_CONTEXT_PARALLEL: prefill_context_parallel_size > 1,
        Fallback.DECODE_CONTEXT_PARALLEL: decode_context_parallel_size > 1,
    }
    return next((reason for reason, applies in checks.items() if applies), None)
