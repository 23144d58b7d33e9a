# SPDX-License-Identifier: Apache-2.0
"""The methods of MLA's prefill in plain float32 torch, for a device without Triton and for tests.

A call has the new tokens of some rows, causal among themselves, or a chunk of their contexts, whose keys all precede
the queries. The A-shape reads absolute positions. ``top_p`` has running sums: for a query, e of a block of keys is
exp of the largest score in it; Z is the sum of e over all blocks so far, and D the sum over the dropped blocks. Only
scored queries have estimates and sums.
"""

from typing import NamedTuple

import torch

from vllm_sparse_kernels.compile_time import LOG2_E
from vllm_sparse_kernels.methods.minference import AShape
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.methods.top_p.reference import scored_queries
from vllm_sparse_kernels.mla.calls import BLOCK, SINK, MlaCall, Tensors, TileFields
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div


class RunningSums(NamedTuple):
    """Sums of scored queries and heads over the calls so far, relative to 2 ** top: [heads, tokens] float32.

    New tokens restart the sums of scored queries. Those of other queries are never read.
    """

    top: torch.Tensor  # largest estimate, as a logarithm to base 2
    total: torch.Tensor  # Z
    dropped: torch.Tensor  # D


def attend(call: MlaCall, tensors: Tensors, scale: float, sums: RunningSums) -> int:
    """Run a call, tile by tile, and return the number of kept pairs of a query and a key."""
    q, k, v, out, lse = tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse
    kept_pairs = 0
    for row in call.rows:
        keys = slice(row.key_start, row.key_start + row.num_keys)
        for offset in range(0, row.num_queries, TILE_TOKENS):
            tile = TileFields.of(row, offset)
            queries = slice(tile.query, tile.query + tile.length)
            scores = torch.einsum("qhd,khd->hqk", q[queries].float(), k[keys].float()) * scale
            kept = kept_by_window(call.window, tile, q.device).expand(scores.shape)
            if call.is_selected:
                scored = scored_queries(tile.length, q.device)
                maxima = block_maxima(scores.masked_fill(~kept, -torch.inf)[:, scored])
                blocks = keep_blocks(call, maxima, sums, tile)
                kept = kept & blocks.repeat_interleave(BLOCK.value, 1)[:, None, : row.num_keys]
            kept_pairs += int(kept.sum())
            scores = scores.masked_fill(~kept, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            out[queries] = torch.einsum("hqk,khd->qhd", weights, v[keys].float()).to(out.dtype)
            lse[:, queries] = scores.logsumexp(-1)
    return kept_pairs


def kept_by_window(window: AShape, tile: TileFields, device: torch.device) -> torch.Tensor:
    """Return the keys that queries of a tile keep: [length, num_keys]."""
    queries = tile.position + torch.arange(tile.length, device=device)[:, None]
    keys = tile.key_position + torch.arange(tile.num_keys, device=device)
    return (keys <= queries) & ((keys < window.sink_tokens) | (keys > queries - window.local_tokens))


def block_maxima(scores: torch.Tensor) -> torch.Tensor:
    """Return each query's largest score in each block, as logarithms to base 2."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % BLOCK.value), value=-torch.inf)
    return padded.unflatten(-1, (-1, BLOCK.value)).amax(-1) * LOG2_E.value


def keep_blocks(call: MlaCall, maxima: torch.Tensor, sums: RunningSums, tile: TileFields) -> torch.Tensor:
    """Choose a tile's blocks [heads, blocks] by the maxima [heads, scored queries, blocks], and update their sums."""
    assert isinstance(call.method, TopP)
    device, num_blocks = maxima.device, maxima.shape[2]
    scored = tile.state + scored_queries(tile.length, device)
    starts = torch.arange(num_blocks, device=device) * BLOCK.value
    forced = tile.key_position + starts < SINK.value
    if call.is_causal:
        forced |= starts >= tile.offset

    top, total, dropped = (x[:, scored] for x in sums)
    if call.is_causal:
        top, total, dropped = torch.full_like(top, -torch.inf), torch.zeros_like(total), torch.zeros_like(dropped)
    new_top = torch.maximum(top, maxima.amax(-1))
    estimates, decay = torch.exp2(maxima - new_top[..., None]), torch.exp2(top - new_top)
    total, dropped = total * decay + estimates.sum(-1), dropped * decay

    masses = (estimates / total[..., None]).mean(1)
    budget = (1 - call.method.kept_mass - (dropped / total).mean(1)).clamp(min=0.0)
    candidates = masses.masked_fill(forced, torch.inf)
    ascending, order = candidates.flip(-1).sort(dim=-1, stable=True)  # the last of equal masses is dropped first
    drops = ascending.cumsum(-1) <= budget[:, None]
    # At most ``most_blocks`` blocks are kept for their mass: lighter blocks are dropped even beyond the budget.
    drops |= torch.arange(num_blocks, device=device) < int((~forced).sum()) - call.most_blocks
    kept = ~torch.zeros_like(drops).scatter(-1, num_blocks - 1 - order, drops)
    kept[:, ceil_div(tile.reach, BLOCK.value) :] = False

    dropped = dropped + (estimates * ~kept[:, None]).sum(-1)
    for x, value in zip(sums, (new_top, total, dropped), strict=True):
        x[:, scored] = value
    return kept
