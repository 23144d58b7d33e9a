# SPDX-License-Identifier: Apache-2.0
"""Each method with the parameters at which it must keep every causal key, so that attention is dense."""

from math import inf

from vllm_sparse_kernels.select.anchor_attention import AnchorAttention
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.select.dense import Dense
from vllm_sparse_kernels.select.flex_vertical_slash import FlexVerticalSlash
from vllm_sparse_kernels.select.minference import AShape, BlockSparse
from vllm_sparse_kernels.select.sale import Sale
from vllm_sparse_kernels.select.share_prefill import SharePrefill
from vllm_sparse_kernels.select.sparge_attn import SpargeAttn
from vllm_sparse_kernels.select.vertical_slash import VerticalSlash

EVERYTHING = 1 << 20
"""More tokens or blocks than any row here has."""

FULL_DENSITY: dict[str, Method] = {
    "a_shape": AShape(local_tokens=EVERYTHING),
    "anchor_attention": AnchorAttention(theta=inf),
    "block_sparse": BlockSparse(top_blocks=EVERYTHING),
    "dense": Dense(),
    "flex_vertical_slash": FlexVerticalSlash(gamma=1.0),
    "sale": Sale(tau=0.0),
    "share_prefill": SharePrefill(gamma=1.0, cluster=0),
    "sparge_attn": SpargeAttn(kept_mass=1.0),
    "vertical_slash": VerticalSlash(slash_tokens=EVERYTHING),
}
