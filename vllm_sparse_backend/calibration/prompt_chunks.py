# SPDX-License-Identifier: Apache-2.0
"""A captured prompt in the chunks in which a server prefills it: their rows, its pages, and dense attention to it."""

import torch
import torch.nn.functional as F

from vllm_sparse_backend.calibration.capture import LayerTensors
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.rows import ceil_div

PAGE_TOKENS = 128


def chunk_rows(num_tokens: int, chunk_tokens: int, device: torch.device, min_tokens: int = 0) -> list[Rows]:
    """The steps in which a server prefills the prompt, its pages in order, less the first ``min_tokens`` positions.

    A chunk that crosses that border is cut in two there.
    """
    table = torch.arange(ceil_div(num_tokens, PAGE_TOKENS), dtype=torch.int32, device=device)[None]
    spans = [
        (max(start, min_tokens), min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)
    ]
    return [Rows((0,), (end - begin,), (begin,), table) for begin, end in spans if begin < end]


def dense_attention(tensors: LayerTensors, scale: float) -> torch.Tensor:
    """Causal attention over all keys: [num_tokens, num_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def paged(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_dim] as pages; places past the end are NaN."""
    padding = -len(x) % PAGE_TOKENS
    return F.pad(x, (0, 0, 0, 0, 0, padding), value=float("nan")).unflatten(0, (-1, PAGE_TOKENS))
