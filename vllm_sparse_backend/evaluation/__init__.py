# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill bench`: what sparse prefill costs and saves on this machine, beside what vLLM does without it.

Nothing here imports vLLM but for its FlashAttention, and that only when something is timed.
"""
