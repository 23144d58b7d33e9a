# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill for dense multi-head latent attention (MLA): contiguous keys of 192 and values of 128 channels.

A call has either the new tokens of some requests or a chunk of their contexts. ``MlaPrefill`` runs it by kernels, or by
the plain torch of ``reference`` where Triton has no device. docs/research/mla.md has the rules.
"""

from vllm_sparse_kernels.mla.calls import MlaCall, MlaMethod, MlaRow
from vllm_sparse_kernels.mla.prefill import MlaPrefill

__all__ = ["MlaCall", "MlaMethod", "MlaPrefill", "MlaRow"]
