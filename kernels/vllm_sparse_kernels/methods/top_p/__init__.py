# SPDX-License-Identifier: Apache-2.0
"""``top_p``, a method of this project: the fewest blocks that hold the share p of attention, from 8-bit scores."""

from vllm_sparse_kernels.methods.spec import MethodSpec
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import select_top_p

LADDER = (
    *((0.7, 0.1), (0.75, 0.1), (0.8, 0.1), (0.85, 0.1), (0.9, 0.1), (0.9, 0.12), (0.9, 0.14), (0.9, 0.17), (0.9, 0.2)),
    *((0.95, 0.2), (0.95, 0.4), (0.97, 0.6), (0.98, 1.0), (0.99, 1.0), (0.995, 1.0)),
)
"""(kept_mass, most_share) of settings from sparse to nearly dense."""

SPECS = (
    MethodSpec(
        "top_p",
        TopP,
        select_top_p,
        full=TopP(kept_mass=1.0),
        demo={"kept_mass": 0.5},
        ladder=tuple({"kept_mass": p, "most_share": most} for p, most in LADDER),
        paper="this project",
        summary="the fewest blocks that hold a share of the queries' attention, by 8-bit scores of every key",
        control="share",
        main_parameters=("kept_mass", "most_share", "peak_share"),
    ),
)
