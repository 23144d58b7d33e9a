# SPDX-License-Identifier: Apache-2.0
"""SALE's selection in plain float32 torch: the same steps as ``method.py``, whose docstring describes them.

Quantisation is SageAttention-2's: queries and keys minus their means become signed 4-bit integers, and the product of
the mean query with the smoothed keys is added in full precision.
"""

from collections.abc import Iterator

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.references import rows_of
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.rows import Tile, split_blocks

QUERY_BLOCK = 64  # b_q
KEY_BLOCK = 32  # b_k
SEGMENT = 4 * KEY_BLOCK
LEVELS = 7
TINY = 1e-20  # stands in for the largest magnitude of a vector of zeros


def select_sale(call: Call) -> None:
    """Fill the lists of the call's heads in plain torch, as ``Sale.select`` does with kernels."""
    index = call.index
    for head, i_tile, kept in paper_blocks(call):
        index.set_blocks(head, i_tile, kept.any(0), KEY_BLOCK)


def paper_blocks(call: Call) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Compute M_bs of Algorithm 1 for every (head, tile)."""
    method, q, rows = call.method, call.q, call.rows
    for row, queries, keys in rows_of(call):
        key_mean = keys.mean(0)  # [num_kv_heads, head_dim]
        query_mean = queries.mean(0)  # [num_heads, head_dim]
        rounded_keys = round_keys(keys - key_mean)
        for head, head_method in call.heads.pairs:
            kv = head // call.group
            # Q̃ K̃ᵀ approximates (q − q̄)(k − k̄)ᵀ; q̄ (k − k̄)ᵀ is added exactly.
            bias = (keys[:, kv] - key_mean[kv]) @ query_mean[head]
            for i_tile in rows.tiles_of(row):
                tile = rows.tile_list[i_tile]
                b_q = q[tile.token : tile.token + tile.length_tokens, head].float()
                starts = [local_start(method, last) for last in last_positions(tile)]
                threshold = exact_threshold(head_method, b_q, keys[:, kv], tile, starts, call.scale)
                # Subtracting k̄ shifts all scores of a query and the threshold by the same amount.
                threshold -= b_q @ key_mean[kv]
                scores = torch.addmm(
                    bias[: max(starts)], round_queries(b_q - query_mean[head]), rounded_keys[: max(starts), kv].T
                )
                yield head, i_tile, keep(method, scores >= threshold[:, None], starts, tile)


def keep(method: Sale, passed: torch.Tensor, starts: list[int], tile: Tile) -> torch.Tensor:
    """Flag sink, local blocks and blocks between them in which an element passed: Algorithm 1, lines 9 and 12."""
    num_blocks = tile.last_position // KEY_BLOCK + 1
    kept = torch.zeros(len(starts), num_blocks, dtype=torch.bool, device=passed.device)
    for i, (start, last) in enumerate(zip(starts, last_positions(tile))):
        tested = passed[i * QUERY_BLOCK : (i + 1) * QUERY_BLOCK, :start].any(0)
        kept[i, : start // KEY_BLOCK] = tested.view(-1, KEY_BLOCK).any(1)
        kept[i, : method.sink_tokens // KEY_BLOCK] = True
        kept[i, start // KEY_BLOCK :] = True
        kept[i, last // KEY_BLOCK + 1 :] = False
    return kept


def last_positions(tile: Tile) -> list[int]:
    """Return the position of the last query of each 64-query block of a tile."""
    return [
        tile.position + min(first + QUERY_BLOCK, tile.length_tokens) - 1
        for first in range(0, tile.length_tokens, QUERY_BLOCK)
    ]


def local_start(method: Sale, last_position: int) -> int:
    """Return the start of the local region of a 64-query block.

    Between sink and local region lie whole segments of four 32-key blocks. The remaining blocks at the row's end join
    the local region (appendix C), which therefore has 128 to 224 tokens if the last block counts as a full block.
    """
    end = (last_position // KEY_BLOCK + 1) * KEY_BLOCK
    between = end - method.sink_tokens - method.local_tokens
    return method.sink_tokens + between // SEGMENT * SEGMENT if between >= 0 else 0


def exact_threshold(
    method: Sale, b_q: torch.Tensor, keys: torch.Tensor, tile: Tile, starts: list[int], scale: float
) -> torch.Tensor:
    """Compute (ln τ + ln l̃ + m̃) / scale, with m̃ and l̃ over sink and local region (equations 3 and 4, corrected)."""
    b_start = torch.tensor(starts, device=b_q.device).repeat_interleave(QUERY_BLOCK)[: len(b_q)]
    o_m = torch.arange(tile.position, tile.last_position + 1, device=b_q.device)
    # Only sink and local keys are multiplied: skipping the keys between them is the purpose.
    o_n = torch.cat([torch.arange(min(method.sink_tokens, starts[0])), torch.arange(starts[0], tile.last_position + 1)])
    o_n = o_n.to(b_q.device)
    seen = (o_n < method.sink_tokens) | (o_n >= b_start[:, None])
    scores = (b_q @ keys[o_n].T) * scale
    scores.masked_fill_(~seen | (o_n > o_m[:, None]), -torch.inf)
    return (method.log_tau + scores.logsumexp(-1)) / scale


def round_queries(x: torch.Tensor) -> torch.Tensor:
    """Round queries to 4 bits, each with its own scale."""
    return _round(x, x.abs().amax(-1, keepdim=True))


def round_keys(x: torch.Tensor) -> torch.Tensor:
    """Round keys to 4 bits; in a block of 32, keys of equal (j mod 8) // 2 share a scale."""
    groups = split_blocks(x, KEY_BLOCK).unflatten(1, (4, 4, 2))
    return _round(groups, groups.abs().amax((1, 3, 5), keepdim=True)).flatten(0, 3)[: len(x)]


def _round(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = largest.clamp_min(TINY) / LEVELS
    return torch.floor(x * (1 / scale) + 0.5) * scale
