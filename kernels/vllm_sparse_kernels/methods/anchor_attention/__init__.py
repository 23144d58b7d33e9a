# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention (Zhang et al., 2025): keep single keys whose scores are close to an anchor, the best nearby score."""

from math import inf

from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.anchor_attention.reference import select_anchor_attention
from vllm_sparse_kernels.methods.spec import MethodSpec

SAMPLED = {"step_tiles": 4, "sample_tokens": 8, "whole_blocks": True}
"""Beyond the paper: votes of single queries, because a mean query does not show the targets of single queries. Of the
measured settings, this one keeps the most answers inside a prompt for its cost (docs/research/quality.md)."""

THETAS = (4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 18.0)
"""θ of mean queries; the paper uses 12 for all heads of all models."""
SAMPLED_THETAS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
"""θ of single queries, whose scores are closer to their anchors."""

SPECS = (
    MethodSpec(
        "anchor_attention",
        AnchorAttention,
        select_anchor_attention,
        full=AnchorAttention(theta=inf),
        demo={"theta": 5.0, "step_tiles": 4},
        ladder=(*({"theta": theta} for theta in THETAS), *({"theta": theta, **SAMPLED} for theta in SAMPLED_THETAS)),
    ),
)
