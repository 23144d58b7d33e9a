# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill (Lai et al., 2025): keep vertical and slash lines until they hold a share of the mass."""

from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.flex_prefill.reference import select_flex_vertical_slash
from vllm_sparse_kernels.methods.spec import MethodSpec

GAMMAS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995)
SPREAD = {"estimating": "spread", "last_queries": 256}
"""Beyond the paper: lines estimated from queries all over the chunk. With the chunk's last queries only, retrieval
heads keep only the keys that these queries look for (docs/research/quality.md)."""

SPECS = (
    MethodSpec(
        "flex_vertical_slash",
        FlexVerticalSlash,
        select_flex_vertical_slash,
        full=FlexVerticalSlash(gamma=1.0),
        demo={"gamma": 0.5},
        ladder=(*({"gamma": gamma} for gamma in GAMMAS), *({"gamma": gamma, **SPREAD} for gamma in GAMMAS)),
    ),
)
