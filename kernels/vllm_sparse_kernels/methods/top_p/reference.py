# SPDX-License-Identifier: Apache-2.0
"""The rule of ``top_p`` in plain float32 torch: the same steps as method.py, whose docstring has the equations."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.references import rows_of
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div

if TYPE_CHECKING:
    from vllm_sparse_kernels.methods.top_p.method import TopP

KEY_BLOCK = 32
LARGEST = 15
TINY = 1e-20  # replaces the largest magnitude of zeros
LEAST_CHANNELS = 64
SAMPLE, EVERY = 64, 8  # the first of every EVERY groups of keys is the sample


def select_top_p(
    method: "TopP", q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    """Fill the index; an index block is kept if any of its 32-key blocks is.

    Args:
        method: The method of the heads, possibly merged.
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
        index: The index, whose lists of ``heads`` are overwritten.
        heads: [n] int32 on the device, numbers of the selected query heads.
        scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
    """
    index.stripe_counts.index_fill_(0, heads.long(), 0)
    settings = dict(zip(heads.tolist(), method.of_heads(len(heads))))
    parts = index.block_tokens // KEY_BLOCK
    for head, i_tile, shares in tile_shares(method, q, cache, index.rows, heads, scale):
        tile = index.rows.tile_list[i_tile]
        kept = fewest(settings[head], shares.mean(0), tile.position) | peaks(method, shares)
        kept |= below_floor(settings[head], shares, kept)
        num_blocks = index.num_causal_blocks(tile)
        index.set_blocks(head, i_tile, pad(kept, (0, num_blocks * parts - len(kept))).view(num_blocks, parts).any(1))


def fewest(method: "TopP", masses: torch.Tensor, position: int) -> torch.Tensor:
    """Flag sink, local region and diagonal, and the fewest blocks between them that hold the share p of all mass.

    Args:
        method: The method of the heads, possibly merged.
        masses: [blocks].
        position: Position of the tile's first query.

    Returns:
        [blocks] bool.
    """
    if method.kept_mass == 1:
        return torch.ones_like(masses, dtype=torch.bool)
    kept = torch.ones_like(masses, dtype=torch.bool)
    kept[ceil_div(method.sink_tokens, KEY_BLOCK) : max(position - method.local_tokens, 0) // KEY_BLOCK] = False
    between = (~kept).nonzero().flatten()
    order = masses[between].argsort(descending=True, stable=True)
    held = masses[kept].sum() + masses[between][order].cumsum(0)
    before = pad(held, (1, 0), value=float(masses[kept].sum()))[:-1]
    most = math.ceil(method.most_share * len(masses))
    kept[between[order[before < method.kept_mass * masses.sum()][:most]]] = True
    return kept


def peaks(method: "TopP", shares: torch.Tensor) -> torch.Tensor:
    """Flag blocks in which some query has a share of at least ``peak_share``.

    Args:
        method: The method of the heads, possibly merged.
        shares: [queries, blocks].

    Returns:
        [blocks] bool.
    """
    return (shares >= method.least_peak).any(0)


def below_floor(method: "TopP", shares: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Flag the blocks that queries add whose kept share is below ``floor``.

    Each of these queries adds the fewest of its heaviest blocks that reach the floor, ties by position. Blocks that
    other queries add do not count for it.

    Args:
        method: The method of the head.
        shares: [queries, blocks].
        kept: [blocks] bool, blocks that are kept for the whole tile.

    Returns:
        [blocks] bool, without blocks of ``kept``.
    """
    others = shares.masked_fill(kept, 0.0)
    lack = method.floor * shares.sum(1) - shares[:, kept].sum(1)
    sizes, order = others.sort(dim=1, descending=True, stable=True)
    before = pad(sizes.cumsum(1), (1, 0))[:, :-1]
    added = (before < lack[:, None]) & (sizes > 0)
    return torch.zeros_like(added).scatter_(1, order, added).any(0)


def tile_shares(
    method: "TopP", q: torch.Tensor, cache: PagedCache, rows: Rows, heads: torch.Tensor, scale: float
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Compute the share of each query in each causal block of 32 keys.

    Args:
        method: The method of the heads, possibly merged.
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
        rows: The rows of a step.
        heads: [n] int32 on the device, numbers of the selected query heads.
        scale: Factor from q·k to scores, usually 1/√head_dim; above 0.

    Returns:
        (head, tile, [queries, blocks]).
    """
    group = q.shape[1] // cache.num_kv_heads
    for row, queries, keys in rows_of(q, cache, rows):
        sample = keys[torch.arange(len(keys), device=keys.device) // SAMPLE % EVERY == 0]
        kept = kept_channels(method, sample, queries)
        rounded = round_to_e4m3((keys - sample.mean(0)) * kept, KEY_BLOCK)
        for head in heads.tolist():
            ours = round_to_e4m3((queries[:, head] * kept[head // group])[:, None], 1)[:, 0]
            for i_tile in rows.tiles_of(row):
                tile = rows.tile_list[i_tile]
                first = tile.position - rows.context_lens[row]
                b_q, b_k = ours[first : first + tile.length_tokens], rounded[: tile.last_position + 1, head // group]
                o_m = torch.arange(tile.position, tile.last_position + 1, device=q.device)[:, None]
                future = torch.arange(len(b_k), device=q.device) > o_m
                scores = ((b_q @ b_k.T) * scale).masked_fill_(future, -torch.inf)
                scores = pad(scores, (0, -len(b_k) % KEY_BLOCK), value=-torch.inf)
                yield head, i_tile, scores.unflatten(1, (-1, KEY_BLOCK)).amax(2).softmax(1)


def kept_channels(method: "TopP", sample: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Flag the channels of the estimate: all, or those that affect scores most.

    Args:
        method: The method of the heads, possibly merged.
        sample: Keys [n, num_kv_heads, head_dim].
        queries: [m, num_heads, head_dim].

    Returns:
        bool [num_kv_heads, head_dim].
    """
    num_kv_heads, head_dim = sample.shape[1:]
    count = max((1 << (head_dim - 1).bit_length()) // 2, LEAST_CHANNELS) if method.channels == "half" else head_dim
    squares = sum(part[: SAMPLE // 2].square().mean(0) for part in queries.split(TILE_TOKENS))
    weights = sample.var(0, correction=0) * squares.view(num_kv_heads, -1, head_dim).sum(1)
    order = weights.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :count], True)


def round_to_e4m3(x: torch.Tensor, count: int) -> torch.Tensor:
    """Round to e4m3 with a scale for each head and ``count`` vectors.

    Args:
        x: [n, heads, head_dim].
        count: Vectors that share a scale.

    Returns:
        The represented numbers, of the same shape.
    """
    groups = pad(x, (0, 0, 0, 0, 0, -len(x) % count)).unflatten(0, (-1, count))
    step = groups.abs().amax((1, 3), keepdim=True).clamp_min(TINY) / LARGEST
    return ((groups * (1 / step)).to(torch.float8_e4m3fn).float() * step).flatten(0, 1)[: len(x)]
