# SPDX-License-Identifier: Apache-2.0
"""SharePrefill (Peng et al., 2025): heads of a cluster share the pattern that one of them computes."""

from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill
from vllm_sparse_kernels.methods.share_prefill.reference import select_share_prefill
from vllm_sparse_kernels.methods.spec import MethodSpec

SPECS = (
    MethodSpec(
        "share_prefill",
        SharePrefill,
        select_share_prefill,
        full=SharePrefill(gamma=1.0, cluster=0),
        demo={"gamma": 0.5, "cluster": 0},  # all heads in one cluster: they share as far as they are alike
    ),
)
