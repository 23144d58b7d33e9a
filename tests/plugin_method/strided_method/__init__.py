# SPDX-License-Identifier: Apache-2.0
"""Strided attention (Child et al., 2019): first tokens, a local window, and every n-th key between them, in blocks."""

from strided_method.method import Strided
from strided_method.reference import select_strided
from vllm_sparse_kernels.methods.spec import MethodSpec

SPEC = MethodSpec(
    "strided",
    Strided,
    select_strided,
    full=Strided(local_tokens=1 << 20),
    demo={"sink_tokens": 64, "local_tokens": 128, "stride_tokens": 512},
    ladder=tuple({"stride_tokens": stride} for stride in (8192, 4096, 2048, 1024, 512, 256, 128)),
)
