# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn (Zhang et al., 2025): the fewest blocks that hold a share of the mass of pooled scores."""

from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.methods.sparge_attn.reference import select_sparge_attn
from vllm_sparse_kernels.methods.spec import MethodSpec

SPECS = (
    MethodSpec(
        "sparge_attn",
        SpargeAttn,
        select_sparge_attn,
        full=SpargeAttn(kept_mass=1.0),
        demo={"kept_mass": 0.5, "min_similarity": 0.0},
        ladder=tuple({"kept_mass": tau} for tau in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998)),
    ),
)
