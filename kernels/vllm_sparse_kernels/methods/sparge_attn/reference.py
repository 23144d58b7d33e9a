# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn's selection in plain torch: arXiv:2502.18137, equations 2 to 5 and lines 4 to 6 of Algorithm 1.

``method.py`` lists the deviations from the paper. The second stage is in ``attention/reference.py``.
"""

import torch
import torch.nn.functional as F

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.references import heads_of_rows
from vllm_sparse_kernels.methods.sparge_attn.method import KEY_BLOCK, SpargeAttn
from vllm_sparse_kernels.rows import TILE_TOKENS


def select_sparge_attn(call: Call) -> None:
    """Fill the lists of the call's heads in plain torch, as ``SpargeAttn.select`` does with kernels."""
    index, rows = call.index, call.rows
    for row, head, method, queries, keys in heads_of_rows(call):
        kept = predict(method, queries[:, None], keys[:, None], call.scale)[0]
        for i_tile, tile_kept in zip(rows.tiles_of(row), kept, strict=True):
            num_causal = rows.tile_list[i_tile].last_position // KEY_BLOCK.value + 1
            index.set_blocks(head, i_tile, tile_kept[:num_causal], KEY_BLOCK.value)


def predict(method: SpargeAttn, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute M of one row, in the precision of its input."""
    scores, always, causal = compressed_scores(method, queries, keys, scale)
    if method.keeps_all:
        return causal.expand_as(scores)
    chosen = top_cdf(softmax_of(scores), method.kept_mass)
    return (chosen | always) & causal  # equations 4 and 5


def compressed_scores(
    method: SpargeAttn, queries: torch.Tensor, keys: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the compressed scores of one row."""
    query_len, seq_len = len(queries), len(keys)
    keys = keys - keys.mean(0)
    q_mean, q_similarity = compress(queries, TILE_TOKENS)
    k_mean, k_similarity = compress(keys, KEY_BLOCK.value)
    starts = torch.arange(0, query_len, TILE_TOKENS, device=keys.device)
    last = (starts + TILE_TOKENS).clamp(max=query_len) - 1 + seq_len - query_len
    causal = torch.arange(0, seq_len, KEY_BLOCK.value, device=keys.device) <= last[:, None]
    dissimilar = (k_similarity < method.min_similarity)[:, None, :]
    scores = (q_mean @ k_mean.mT * scale).masked_fill(dissimilar | ~causal, -torch.inf)
    always = dissimilar | (q_similarity < method.min_similarity)[:, :, None]
    always[:, :, 0] |= method.keep_sink
    return scores, always, causal


def softmax_of(scores: torch.Tensor) -> torch.Tensor:
    """Compute P^. A tile without similar blocks has no softmax and keeps all blocks."""
    return scores.softmax(-1).nan_to_num()


def compress(tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compress blocks of tokens to single tokens."""
    padded = F.pad(tokens, (0, 0, 0, 0, 0, -len(tokens) % size))
    blocks = padded.unflatten(0, (-1, size)).permute(2, 0, 1, 3)
    counts = (len(tokens) - size * torch.arange(blocks.shape[1], device=tokens.device)).clamp(max=size)
    unit = F.normalize(blocks, dim=-1)
    return blocks.sum(2) / counts[:, None], (unit @ unit.mT).sum((2, 3)) / counts**2


def top_cdf(probabilities: torch.Tensor, kept_mass: float) -> torch.Tensor:
    """Flag the fewest largest values of each row that reach ``kept_mass`` of its sum; ties in order of index."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(-1)
    before = F.pad(reached[..., :-1], (1, 0))
    kept = before < kept_mass * reached[..., -1:]
    return torch.zeros_like(kept).scatter_(-1, order, kept)
