# SPDX-License-Identifier: Apache-2.0
"""SharePrefill (Peng et al., 2025): heads of a cluster share the pattern of their first head, which is dense."""

from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill
from vllm_sparse_kernels.methods.share_prefill.reference import select_share_prefill
from vllm_sparse_kernels.methods.spec import MethodSpec

SPECS = (
    MethodSpec(
        "share_prefill",
        SharePrefill,
        select_share_prefill,
        full=SharePrefill(gamma=1.0, cluster=0),
        demo={"gamma": 0.5, "cluster": 0},  # all heads in one cluster: similar heads share
    ),
)
