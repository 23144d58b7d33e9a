# SPDX-License-Identifier: Apache-2.0
"""The methods by name. A new one is a file here, its reference, its test, and one line of this table."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.anchor_attention.reference import select_anchor_attention
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.dense.reference import select_dense
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.flex_prefill.reference import select_flex_vertical_slash
from vllm_sparse_kernels.methods.minference.method import AShape, BlockSparse
from vllm_sparse_kernels.methods.minference.reference import select_a_shape, select_block_sparse, select_vertical_slash
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.reference import select_sale
from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill
from vllm_sparse_kernels.methods.share_prefill.reference import select_share_prefill
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.methods.sparge_attn.reference import select_sparge_attn


class Registered(NamedTuple):
    """A method's parameters, which select on a GPU, and the reference that does the same anywhere."""

    parameters: type[Method]
    reference: Callable[..., None]


METHODS: dict[str, Registered] = {
    "a_shape": Registered(AShape, select_a_shape),
    "anchor_attention": Registered(AnchorAttention, select_anchor_attention),
    "block_sparse": Registered(BlockSparse, select_block_sparse),
    "dense": Registered(Dense, select_dense),
    "flex_vertical_slash": Registered(FlexVerticalSlash, select_flex_vertical_slash),
    "sale": Registered(Sale, select_sale),
    "share_prefill": Registered(SharePrefill, select_share_prefill),
    "sparge_attn": Registered(SpargeAttn, select_sparge_attn),
    "vertical_slash": Registered(VerticalSlash, select_vertical_slash),
}


@lru_cache(maxsize=4096)
def name_of(method: Method) -> str:
    """The name under which a method's class is registered, or that of the methods that were merged into it."""
    return next(name for name, entry in METHODS.items() if entry.parameters is type(method.alike))
