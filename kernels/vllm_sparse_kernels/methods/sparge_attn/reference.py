# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn's selection in plain torch: arXiv:2502.18137, equations 2 to 5 and lines 4 to 6 of Algorithm 1.

``method.py`` lists the deviations from the paper. The second stage is in ``attention/reference.py``.
"""

import torch
import torch.nn.functional as F

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.references import block_means, future_blocks, heads_of_rows, set_tiles
from vllm_sparse_kernels.methods.sparge_attn.method import KEY_BLOCK, SpargeAttn
from vllm_sparse_kernels.rows import TILE_TOKENS


def select_sparge_attn(call: Call) -> None:
    """Fill the lists of the call's heads in plain torch, as ``SpargeAttn.select`` does with kernels."""
    for row, head, method, queries, keys in heads_of_rows(call):
        set_tiles(call.index, row, head, predict(method, queries, keys, call.scale), KEY_BLOCK.value)


def predict(method: SpargeAttn, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute M of one row and head, for its causal blocks."""
    q_mean, q_similarity = compress(queries, TILE_TOKENS)
    k_mean, k_similarity = compress(keys - keys.mean(0), KEY_BLOCK.value)
    future = future_blocks(queries, keys, TILE_TOKENS, KEY_BLOCK.value)
    dissimilar = k_similarity < method.min_similarity
    scores = (q_mean @ k_mean.T * scale).masked_fill(dissimilar | future, -torch.inf)
    # A tile without similar blocks has no softmax, and keeps all blocks.
    kept = top_cdf(scores.softmax(-1).nan_to_num(), method.kept_mass)  # equation 4
    kept |= dissimilar | (q_similarity < method.min_similarity)[:, None]  # equation 5
    kept |= method.kept_mass == 1
    kept[:, 0] |= method.keep_sink
    return kept


def compress(tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compress blocks of tokens to their means, and compute the mean cosine over all pairs of a block's tokens.

    It is the squared length of the mean of the tokens at unit length.
    """
    return block_means(tokens, size), block_means(F.normalize(tokens, dim=-1), size).square().sum(-1)


def top_cdf(probabilities: torch.Tensor, kept_mass: float) -> torch.Tensor:
    """Flag the fewest largest values of each row that reach ``kept_mass`` of its sum; ties in order of index."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(-1)
    before = F.pad(reached[..., :-1], (1, 0))
    kept = before < kept_mass * reached[..., -1:]
    return torch.zeros_like(kept).scatter_(-1, order, kept)
