# SPDX-License-Identifier: Apache-2.0
"""Captured prompts for timings: their layers, with heads repeated to fill a card, and plans of profiles for them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.method_specs import plan_of_heads
from vllm_sparse_backend.calibration.capture import Capture
from vllm_sparse_backend.calibration.judge import PAGE_TOKENS, paged
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import load_profile
from vllm_sparse_backend.evaluation.attention_prompts import AttentionPrompt, without_nan
from vllm_sparse_kernels import PagedCache, Rows
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill
from vllm_sparse_kernels.rows import ceil_div

FURTHEST_CLUSTER = 10_000
"""Upper bound of a model's number of heads."""


def captured_prompts(captured: Capture, copies: int, device: torch.device) -> list[AttentionPrompt]:
    """Return the captured layers in order, with their heads repeated ``copies`` times: few heads do not fill a card."""
    table = torch.arange(ceil_div(captured.num_tokens, PAGE_TOKENS), dtype=torch.int32, device=device)[None]
    prompts = []
    for layer in sorted(captured.scales):
        q, k, v = (x.repeat(1, copies, 1) for x in captured.read(layer, device))
        rows = Rows((0,), (captured.num_tokens,), (0,), table)
        prompts.append(
            AttentionPrompt(without_nan(Batch(q, PagedCache(paged(k), paged(v)), rows, captured.scales[layer])))
        )
    return prompts


def plan_of_profile(name_or_path: str, shape: ModelShape, copies: int, captured: Sequence[int] | None = None) -> Plan:
    """Return a profile's plan for a model whose heads are repeated ``copies`` times.

    Dense layers get the method that keeps everything. Each copy has its own clusters of SharePrefill. ``captured`` are
    the layers of the plan, by default all.
    """
    profile = load_profile(name_or_path, "--profile")
    profile.check_model(shape, f"--profile {name_or_path}")
    every: list[list[Method]] = []
    numbers = range(shape.num_layers) if captured is None else captured
    for layer in numbers:
        dense = layer in profile.dense_layers
        methods = [Dense()] * shape.num_heads if dense else list(profile.methods_of(layer, shape.num_heads))
        every.append([_of_copy(method, copy) for copy in range(copies) for method in methods])
    num_heads, num_kv_heads = copies * shape.num_heads, copies * shape.num_kv_heads
    whole = replace(shape, num_layers=len(numbers), num_heads=num_heads, num_kv_heads=num_kv_heads)
    return plan_of_heads(every, whole, f"profile {name_or_path}")


def _of_copy(method: Method, copy: int) -> Method:
    if isinstance(method, SharePrefill) and method.cluster != NOISE:
        return replace(method, cluster=method.cluster + copy * FURTHEST_CLUSTER)
    return method
