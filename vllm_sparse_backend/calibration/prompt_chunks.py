# SPDX-License-Identifier: Apache-2.0
"""The chunks in which a server prefills a captured prompt: rows, pages and dense attention."""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from vllm_sparse_backend.calibration.capture import LayerTensors
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.rows import ceil_div

PAGE_TOKENS = 128


def chunk_rows(num_tokens: int, chunk_tokens: int, device: torch.device, min_tokens: int = 0) -> list[Rows]:
    """Return the steps in which a server prefills a prompt, starting at position ``min_tokens``."""
    table = torch.arange(ceil_div(num_tokens, PAGE_TOKENS), dtype=torch.int32, device=device)[None]
    spans = [
        (max(start, min_tokens), min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)
    ]
    return [Rows((0,), (end - begin,), (begin,), table, (num_tokens,)) for begin, end in spans if begin < end]


def dense_attention(tensors: LayerTensors, scale: float) -> torch.Tensor:
    """Compute causal attention over all keys."""
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def paged(x: torch.Tensor) -> torch.Tensor:
    """Split keys or values into pages of 128 tokens."""
    padding = -len(x) % PAGE_TOKENS
    return pad(x, (0, 0, 0, 0, 0, padding), value=float("nan")).unflatten(0, (-1, PAGE_TOKENS))
