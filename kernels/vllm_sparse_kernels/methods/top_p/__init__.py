# SPDX-License-Identifier: Apache-2.0
"""``top_p``, our own: the fewest blocks that hold a share p of what 8-bit scores say of attention."""

from vllm_sparse_kernels.methods.spec import MethodSpec
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import select_top_p

SPECS = (
    MethodSpec(
        "top_p",
        TopP,
        select_top_p,
        full=TopP(kept_mass=1.0),
        demo={"kept_mass": 0.5},
        ladder=tuple({"kept_mass": p} for p in (0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)),
        cost=0.17,
    ),
)
