# SPDX-License-Identifier: Apache-2.0
"""Dense attention, which leaves out nothing."""

from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.dense.reference import select_dense
from vllm_sparse_kernels.methods.spec import MethodSpec

SPECS = (MethodSpec("dense", Dense, select_dense, full=Dense()),)
