# SPDX-License-Identifier: Apache-2.0
"""SALE (Ji et al., 2025): blocks with a key whose 4-bit score is not far below the exact ones near by."""

from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.reference import select_sale
from vllm_sparse_kernels.methods.spec import MethodSpec

SPECS = (MethodSpec("sale", Sale, select_sale, full=Sale(tau=0.0), demo={"tau": 0.95}),)
