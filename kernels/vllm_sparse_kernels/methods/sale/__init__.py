# SPDX-License-Identifier: Apache-2.0
"""SALE (Ji et al., 2025): keep blocks with a key whose 4-bit score is high relative to nearby exact scores."""

from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.reference import select_sale
from vllm_sparse_kernels.methods.spec import MethodSpec

TAUS = (0.256, 0.128, 0.064, 0.032, 0.016, 0.008, 0.004, 0.002, 0.001)
"""Thresholds that calibration chooses from. The paper (section 3.3) halves τ from 0.008; its authors' code stops at
0.0001. On most heads of a trained model, τ = 0.1 gives the same answers as dense attention, and keeps half as many keys
as τ = 0.008 (docs/research/papers.md), so this ladder starts higher. A head that needs less than 0.001 gains too
little. ``profile calibrate`` follows the paper."""

SPECS = (
    MethodSpec(
        "sale",
        Sale,
        select_sale,
        full=Sale(tau=0.0),
        demo={"tau": 0.95},
        ladder=tuple({"tau": tau} for tau in TAUS),
    ),
)
