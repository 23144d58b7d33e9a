# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention (Zhang et al., 2025): single keys, found by what they score beside an anchor of near keys."""

from math import inf

from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.anchor_attention.reference import select_anchor_attention
from vllm_sparse_kernels.methods.spec import MethodSpec

SPECS = (
    MethodSpec(
        "anchor_attention",
        AnchorAttention,
        select_anchor_attention,
        full=AnchorAttention(theta=inf),
        demo={"theta": 5.0, "step_tiles": 4},
    ),
)
