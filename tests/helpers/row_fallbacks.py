# SPDX-License-Identifier: Apache-2.0
"""Reasons for which single rows run dense."""

from vllm_sparse_backend.config.fallback import Fallback

ROW_FALLBACKS = {
    Fallback.NON_CAUSAL, Fallback.CASCADE, Fallback.TOO_SHORT, Fallback.SHORT_QUERY,
    Fallback.FEW_PAIRS,
    Fallback.NEVER_FASTER, Fallback.REQUESTED, Fallback.UNNAMED,
}  # fmt: skip
