# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill (Lai et al., 2025): vertical and slash lines until they hold a share of the mass."""

from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.flex_prefill.reference import select_flex_vertical_slash
from vllm_sparse_kernels.methods.spec import MethodSpec

SPECS = (
    MethodSpec(
        "flex_vertical_slash",
        FlexVerticalSlash,
        select_flex_vertical_slash,
        full=FlexVerticalSlash(gamma=1.0),
        demo={"gamma": 0.5},
    ),
)
