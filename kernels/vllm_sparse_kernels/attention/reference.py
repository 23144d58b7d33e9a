# SPDX-License-Identifier: Apache-2.0
"""Reference attention in plain torch, with all options.

It computes the softmax under the index's mask, tile by tile, in float32 by default.

The skip of P·V is SpargeAttn's (arXiv 2502.18137, section 3.4 and Algorithm 1, lines 13 to 17) for all queries of a
tile together. The sum l also includes skipped steps, because line 13 precedes the test. Skipping therefore moves
outputs towards zero. Line 15 as printed contradicts the text of section 3.4, which is implemented here. Line 13 as
printed omits l_{i,j−1}.

8-bit scores are SageAttention's (arXiv 2410.02367, equation 6 and Algorithm 1).
"""

import math
from collections.abc import Callable

import torch

from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.portable.engine import STRIPE_STEP
from vllm_sparse_kernels.attention.smooth_keys import SCALE_TOKENS
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import FP8
from vllm_sparse_kernels.rows import split_blocks

INT8_MAX = 127


def exact_weights(p: torch.Tensor) -> torch.Tensor:
    return p


def attend(
    call: Call,
    out: torch.Tensor,
    options: AttendOptions | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    round_weights: Callable[[torch.Tensor], torch.Tensor] = exact_weights,
) -> None:
    """Compute attention in plain torch, on any device; see ``AttendEngine``.

    Args:
        dtype: Type of all intermediate values.
        round_weights: Rounds the weights of values, as an engine does.
    """
    q, cache, index, scale = call.q, call.cache, call.index, call.scale
    rows, num_heads, group = call.rows, index.num_heads, call.group
    margins, int8_heads = [-math.inf] * num_heads, [0] * num_heads
    if options is not None:
        margins = margins if options.skip_margins is None else options.skip_margins.tolist()
        int8_heads = int8_heads if options.int8_heads is None else options.int8_heads.tolist()
    for row in range(rows.num_rows):
        keys, values = (x.to(dtype) for x in cache.gather(rows.block_table[row], rows.seq_lens[row]))
        values = values * cache.value_scale
        smooth = smooth_keys(keys) if any(int8_heads) else None
        for i_tile in rows.tiles_of(row):
            tile = rows.tile_list[i_tile]
            tokens = slice(tile.token, tile.token + tile.length_tokens)
            positions = tile.position + torch.arange(tile.length_tokens, device=q.device)
            for head in range(num_heads):
                kept, steps = walk(index, head, i_tile)
                b_q, i_kv = q[tokens, head].to(dtype), head // group
                if int8_heads[head] and smooth is not None:
                    integers, key_scales, means = (x[i_kv] for x in smooth)
                    scores = scores_int8(b_q, integers[kept], key_scales[kept]) * scale
                    shift = b_q @ means * scale
                else:
                    scores, shift = (b_q @ keys[kept, i_kv].T) * scale, b_q.new_zeros(())
                scores.masked_fill_(kept[None, :] > positions[:, None], -torch.inf)
                sink = None if sinks is None else sinks[head].to(dtype) - shift
                p = weights(scores, sink)
                if margins[head] > -math.inf:
                    p = p * (step_margins(scores, steps)[steps] >= margins[head])
                p = round_weights(p)
                out[tokens, head] = (p @ values[kept, i_kv]).to(out.dtype)


def weights(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Compute the keys' part of the softmax."""
    if sink is None:
        return scores.softmax(-1)
    return torch.cat((scores, sink.reshape(-1, 1).expand(len(scores), 1)), 1).softmax(-1)[:, :-1]


def fp8_weights(p: torch.Tensor) -> torch.Tensor:
    """Round weights as FlashAttention-3 does for fp8 values: the largest of each query becomes 256."""
    unit = p.amax(-1, keepdim=True).float() / 256
    return ((p.float() / unit).to(FP8).float() * unit).to(p.dtype)


def walk(index: SparseIndex, head: int, i_tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kept keys in the tile's causal reach, in the order in which ``attend`` processes them.

    A step is a block, or the next ``STRIPE_STEP`` stripes.
    """
    blocks, stripes = index.blocks_of(head, i_tile), index.stripes_of(head, i_tile)
    places = torch.arange(len(blocks) * index.block_tokens, device=blocks.device)
    positions = (blocks[:, None] * index.block_tokens + places[: index.block_tokens]).flatten()
    seen = positions <= index.rows.tile_list[i_tile].last_position
    after = len(blocks) + torch.arange(len(stripes), device=blocks.device) // STRIPE_STEP
    return torch.cat((positions[seen], stripes)), torch.cat((places[seen] // index.block_tokens, after))


def step_margins(scores: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Compute max(m_local − m) of each step, over all queries. The product of a step below λ is skipped.

    The sum of exp(S − m) over the other steps, with the last m, is the result of the online softmax.
    """
    local = scores.new_full((len(scores), int(steps[-1]) + 1), -torch.inf)
    local.scatter_reduce_(1, steps.expand_as(scores), scores, "amax")
    return (local - local.cummax(1).values).amax(0)


def smooth_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the keys of one row as SageAttention does. The result has heads first."""
    means = keys.mean(0)
    blocks = split_blocks(keys - means, SCALE_TOKENS.value)
    integers, scales = (
        x.expand(-1, SCALE_TOKENS.value, -1, -1).flatten(0, 1)[: len(keys)] for x in quantize(blocks, (1, 3))
    )
    return integers.transpose(0, 1), scales[..., 0].T, means


def scores_int8(b_q: torch.Tensor, integers: torch.Tensor, key_scales: torch.Tensor) -> torch.Tensor:
    """Compute unscaled scores S of one tile. Its queries share a scale, and sums of integer products are exact."""
    q_integers, q_scale = quantize(b_q, (0, 1))
    return (q_integers @ integers.T) * (q_scale * key_scales)


def quantize(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to 8-bit integers, to nearest."""
    scale = (x.abs().amax(dims, keepdim=True) / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale + 0.5).floor(), scale
