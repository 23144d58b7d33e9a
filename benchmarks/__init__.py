# SPDX-License-Identifier: Apache-2.0
"""Timings against FlashAttention-3 and stock vLLM, on the same card in the same run. Needs an NVIDIA GPU."""
