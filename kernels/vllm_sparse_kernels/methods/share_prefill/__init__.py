# SPDX-License-Identifier: Apache-2.0
"""SharePrefill (Peng et al., 2025): heads of a cluster share the pattern of their first head, which is dense."""

from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill
from vllm_sparse_kernels.methods.share_prefill.reference import select_share_prefill
from vllm_sparse_kernels.methods.spec import MethodSpec

GAMMAS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995)
"""The paper uses 0.9 for all heads."""
SPREAD = {"estimating": "spread", "last_queries": 256}
"""Beyond the paper: heads that share nothing estimate their lines from queries spread over the chunk."""

SPECS = (
    MethodSpec(
        "share_prefill",
        SharePrefill,
        select_share_prefill,
        full=SharePrefill(gamma=1.0, cluster=0),
        demo={"gamma": 0.5, "cluster": 0},  # all heads in one cluster: similar heads share
        ladder=(*({"gamma": gamma} for gamma in GAMMAS), *({"gamma": gamma, **SPREAD} for gamma in GAMMAS)),
        cost=0.08,
        paper="[SharePrefill](https://arxiv.org/abs/2505.19578)",
        summary="the keys of a similar head that is computed in full; needs a profile with clusters of similar heads",
        control="share",
        main_parameters=("gamma", "max_distance", "max_sparsity"),
    ),
)
