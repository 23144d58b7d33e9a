# SPDX-License-Identifier: Apache-2.0
"""``top_p``, a method of this project: the fewest blocks that hold the share p of attention, from 8-bit scores."""

from vllm_sparse_kernels.methods.spec import MethodSpec
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import select_top_p

LADDER = (
    *((0.7, 2048), (0.75, 2048), (0.8, 2048), (0.85, 2048), (0.9, 2048), (0.9, 3072), (0.9, 4096), (0.9, 6144)),
    *((0.95, 6144), (0.95, 12288), (0.97, 24576), (0.98, None), (0.99, None), (0.995, None)),
)
"""(kept_mass, most_tokens) of settings from sparse to nearly dense."""

SPECS = (
    MethodSpec(
        "top_p",
        TopP,
        select_top_p,
        full=TopP(kept_mass=1.0),
        demo={"kept_mass": 0.5, "ramp_tokens": 1},
        ladder=tuple({"kept_mass": p, "most_tokens": most} for p, most in LADDER),
    ),
)
