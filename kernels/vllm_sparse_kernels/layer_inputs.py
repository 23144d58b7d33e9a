# SPDX-License-Identifier: Apache-2.0
"""``LayerInputs``: the inputs of a layer in a step."""

from typing import NamedTuple

import torch

from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows


class LayerInputs(NamedTuple):
    """Inputs of a layer in a step.

    Attributes:
        q: [num_tokens, num_heads, head_dim] queries.
        cache: Keys and values.
        rows: The rows of the step.
        scale: Factor from q·k to scores: the softmax's scale times ``cache.score_scale``.
    """

    q: torch.Tensor
    cache: PagedCache
    rows: Rows
    scale: float

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.q.shape[1] // self.cache.num_kv_heads
