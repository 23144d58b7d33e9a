# SPDX-License-Identifier: Apache-2.0
"""Each method with the parameters at which it must keep every causal key, so that attention is dense."""

from math import inf

from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.minference.method import AShape, BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

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
