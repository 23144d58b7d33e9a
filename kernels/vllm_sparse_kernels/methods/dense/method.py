# SPDX-License-Identifier: Apache-2.0
"""Every causal block: exact attention on the sparse path, the baseline of all methods."""

from dataclasses import dataclass

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.selection.lists import compact_blocks


@dataclass(frozen=True)
class Dense(Method):
    """Dense attention; the method has no parameters."""

    block_tokens = 128

    def select(self, call: Call) -> None:
        compact_blocks(None, call)
