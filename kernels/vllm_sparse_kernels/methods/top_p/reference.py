# SPDX-License-Identifier: Apache-2.0
"""The rule of ``top_p`` in plain torch: the same steps as method.py, whose docstring has the equations.

Everything is float32, except that maps to combinations of channels are computed in float64 (``low_rank_maps``).
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from vllm_sparse_kernels import share_counts
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.references import rows_of
from vllm_sparse_kernels.paged import PagedCache, wide_dtype
from vllm_sparse_kernels.rows import TILE_TOKENS, Rows, ceil_div

if TYPE_CHECKING:
    from vllm_sparse_kernels.methods.top_p.method import TopP

KEY_BLOCK = 32
LARGEST = 15
TINY = 1e-20  # replaces the largest magnitude of zeros
LEAST_CHANNELS = 64
GROUP_TOKENS, GROUP_PERIOD = 64, 8  # of GROUP_PERIOD consecutive groups of keys, the first is sampled
SAMPLED_KEYS, ITERATIONS, RIDGE, JITTER, TOO_LARGE = 8192, 2, 1e-3, 1e-6, 1e15
"""For ``low_rank_maps``: keys of the sample; steps; addends of diagonals; magnitude from which elements count as 0."""


def select_top_p(
    method: "TopP", q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    """Fill the index; an index block is kept if any of its 32-key blocks is."""
    index.stripe_counts.index_fill_(0, heads.long(), 0)
    settings = dict(zip(heads.tolist(), method.of_heads(len(heads))))
    parts = index.block_tokens // KEY_BLOCK
    estimates = any(head_method.kept_mass < 1 for head_method in settings.values())
    if index.variance_shares is not None and method.is_low_rank(cache.head_dim) and estimates:
        for row, queries, keys in rows_of(q, cache, index.rows):
            maps = low_rank_maps(queries, keys, method.kept_channels(cache.head_dim))
            share_counts.count_shares(index.variance_shares[row], maps.share.float(), 0)
    turns = {head: i_selected % share_counts.COUNT_EVERY for i_selected, head in enumerate(heads.tolist())}
    for head, i_tile, shares in tile_shares(method, q, cache, index.rows, heads, scale):
        tile = index.rows.tile_list[i_tile]
        chosen = fewest(settings[head], shares.mean(0), tile.position) | peaks(method, shares)
        kept = chosen | below_floor(settings[head], shares, chosen)
        turn = share_counts.counted_head.fn(tile.position, TILE_TOKENS, share_counts.COUNT_EVERY)
        if index.kept_shares is not None and turns[head] == turn:
            count_kept_shares(settings[head], shares, chosen, kept, index.kept_shares[tile.row])
        num_blocks = index.num_causal_blocks(tile)
        index.set_blocks(head, i_tile, pad(kept, (0, num_blocks * parts - len(kept))).view(num_blocks, parts).any(1))


def fewest(method: "TopP", masses: torch.Tensor, position: int) -> torch.Tensor:
    """Flag sink, local region and diagonal, and the fewest blocks between them that hold the share p of all mass."""
    if method.kept_mass == 1:
        return torch.ones_like(masses, dtype=torch.bool)
    num_blocks = masses.shape[-1]
    first = min(ceil_div(method.sink_tokens, KEY_BLOCK), num_blocks)
    end = max(first, max(position - method.local_tokens, 0) // KEY_BLOCK)
    between = masses[..., first:end]
    always = torch.cat([masses[..., :first], masses[..., end:]], -1).sum(-1, keepdim=True)
    sizes, order = between.sort(dim=-1, descending=True, stable=True)
    before = torch.cat([always, always + sizes.cumsum(-1)], -1)[..., :-1]
    added = before < method.kept_mass * masses.sum(-1, keepdim=True)
    added[..., math.ceil(method.most_share * num_blocks) :] = False
    kept = torch.ones_like(masses, dtype=torch.bool)
    kept[..., first:end] = torch.zeros_like(added).scatter_(-1, order, added)
    return kept


def peaks(method: "TopP", shares: torch.Tensor) -> torch.Tensor:
    """Flag blocks in which some query has a share of at least ``peak_share``."""
    return (shares >= method.least_peak).any(-2)


def below_floor(method: "TopP", shares: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Flag the blocks that are added by queries whose kept share is below ``floor``.

    Each of these queries adds the fewest of its heaviest blocks that reach the floor, ties by position. Blocks that
    other queries add do not count for it.
    """
    others = shares.masked_fill(kept, 0.0)
    lack = method.floor * shares.sum(1) - shares[:, kept].sum(1)
    sizes, order = others.sort(dim=1, descending=True, stable=True)
    before = pad(sizes.cumsum(1), (1, 0))[:, :-1]
    added = (before < lack[:, None]) & (sizes > 0)
    return torch.zeros_like(added).scatter_(1, order, added).any(0)


def count_kept_shares(
    method: "TopP", shares: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor, counts: torch.Tensor
) -> None:
    """Count the shares of their own attention that a tile's queries keep, unless the head has no floor or keeps all."""
    if method.floor > 0 and method.kept_mass < 1:
        whole = shares.sum(1)
        is_lifted = shares[:, chosen].sum(1) < method.floor * whole
        share_counts.count_shares(counts, shares[:, kept].sum(1) / whole, int(is_lifted.sum()))


def tile_shares(
    method: "TopP", q: torch.Tensor, cache: PagedCache, rows: Rows, heads: torch.Tensor, scale: float
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Compute the share of each scored query in each causal block of 32 keys."""
    group = q.shape[1] // cache.num_kv_heads
    for row, queries, keys in rows_of(q, cache, rows):
        estimated_queries, estimated_keys = estimated_vectors(method, queries, keys, wide_dtype(q.dtype))
        rounded = round_to_e4m3(estimated_keys, KEY_BLOCK)
        for head in heads.tolist():
            head_queries = round_to_e4m3(estimated_queries[:, head, None], 1)[:, 0]
            for i_tile in rows.tiles_of(row):
                tile = rows.tile_list[i_tile]
                first = tile.position - rows.context_lens[row]
                places = scored_queries(method, tile.length_tokens).to(q.device)
                b_k = rounded[: tile.last_position + 1, head // group]
                scores = causal_scores(head_queries[first + places] @ b_k.T, tile.position + places, scale)
                yield head, i_tile, scores.unflatten(1, (-1, KEY_BLOCK)).amax(2).softmax(1)


def scored_queries(method: "TopP", num_queries: int) -> torch.Tensor:
    """Return the places in their tile of the queries that are scored: all, or the second of each two neighbours.

    The last query of a tile with an odd number of queries has no second neighbour, and is scored itself.
    """
    period = 1 if method.queries == "all" else 2
    return torch.arange(period - 1, num_queries + period - 1, period).clamp_max(num_queries - 1)


def causal_scores(products: torch.Tensor, positions: torch.Tensor, scale: float) -> torch.Tensor:
    """Turn products of a tile's queries with all keys up to its last query into scores of whole blocks."""
    num_keys = products.shape[-1]
    future = torch.arange(num_keys, device=products.device) > positions[:, None]
    scores = (products * scale).masked_fill_(future, -torch.inf)
    return pad(scores, (0, -num_keys % KEY_BLOCK), value=-torch.inf)


def estimated_vectors(
    method: "TopP", queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the vectors of one row whose products estimate scores, up to a constant of each query."""
    num_kv_heads, head_dim = keys.shape[1:]
    if not method.is_low_rank(head_dim):
        sample = keys[torch.arange(len(keys), device=keys.device) // GROUP_TOKENS % GROUP_PERIOD == 0]
        kept = kept_channels(method, sample, queries)
        kept_queries = queries * kept.repeat_interleave(queries.shape[1] // num_kv_heads, 0)
        return kept_queries, (keys - sample.mean(0)) * kept
    maps = low_rank_maps(queries, keys, method.kept_channels(head_dim))
    of_queries, of_keys = maps.of_queries.to(dtype).float(), maps.of_keys.to(dtype).float()
    mapped_queries = torch.einsum("mjgd,jdr->mjgr", queries.unflatten(1, (num_kv_heads, -1)), of_queries)
    mapped_keys = torch.einsum("njd,jdr->njr", keys, of_keys)
    return mapped_queries.flatten(1, 2), mapped_keys - torch.einsum("jd,jdr->jr", maps.mean.float(), of_keys)


class Maps(NamedTuple):
    """Maps of one row to few channels, of each kv head; all float64."""

    mean: torch.Tensor  # [num_kv_heads, head_dim], of the sampled keys
    of_queries: torch.Tensor  # [num_kv_heads, head_dim, rank]: X
    of_keys: torch.Tensor  # [num_kv_heads, head_dim, rank]: C_q X
    share: torch.Tensor  # [num_kv_heads], share of the sample's score variance that mapped vectors explain


def low_rank_maps(queries: torch.Tensor, keys: torch.Tensor, rank: int) -> Maps:
    """Compute the maps of ``low_rank.py`` from the same samples by the same iteration, in float64.

    Let C_q be the second moment of the sampled queries that read a kv head, and C_k the covariance of its sampled keys.
    Both are divided by their mean diagonal, and RIDGE times the identity is added to both.

    1. X = the columns of the identity for the ``rank`` channels with the largest weights, C_q[i, i] C_k[i, i].
    2. ITERATIONS times: X ← C_k C_q X, then X ← X L^-T, where L Lᵀ = Xᵀ C_q X is the Cholesky factorisation.

    The score's variance about the mean key is tr(C_q C_k). Products of mapped vectors keep tr(Wᵀ C_k W) of it, where
    W = C_q X.
    """
    num_kv_heads, head_dim = keys.shape[1:]
    block_d = 1 << (head_dim - 1).bit_length()
    period = 1
    while period * SAMPLED_KEYS < len(keys):
        period *= 2
    sampled_keys = finite(keys[torch.arange(len(keys), device=keys.device) // GROUP_TOKENS % period == 0])
    tiles = queries.split(TILE_TOKENS)
    num_queries = 128 if len(tiles) <= 16 else 64 if len(tiles) <= 32 else 32
    sampled_queries = finite(torch.cat([tile[:num_queries] for tile in tiles]))
    sampled_queries = sampled_queries.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    mean = sampled_keys.mean(0)
    centered = (sampled_keys - mean).transpose(0, 1)
    of_queries, of_keys = (x.mT @ x for x in (sampled_queries, centered))
    diagonals = torch.stack([x.diagonal(dim1=1, dim2=2).sum(1) for x in (of_queries, of_keys)]).clamp_min(1e-30)
    ridge = RIDGE * torch.eye(head_dim, dtype=torch.float64, device=keys.device)
    c_q, c_k = of_queries * (block_d / diagonals[0, :, None, None]), of_keys * (block_d / diagonals[1, :, None, None])
    weights = c_q.diagonal(dim1=1, dim2=2) * c_k.diagonal(dim1=1, dim2=2)
    picked = weights.argsort(dim=1, descending=True, stable=True)[:, :rank]
    c_q, c_k = c_q + ridge, c_k + ridge
    x = torch.nn.functional.one_hot(picked, head_dim).double().mT
    for _ in range(ITERATIONS):
        x = c_k @ (c_q @ x)
        x = x / (x.mT @ c_q @ x).diagonal(dim1=1, dim2=2).sqrt()[:, None]
        factor = torch.linalg.cholesky(x.mT @ c_q @ x + JITTER * torch.eye(rank, dtype=torch.float64, device=x.device))
        x = torch.linalg.solve_triangular(factor, x.mT, upper=False).mT
    w = c_q @ x
    held, total = (w * (c_k @ w)).sum((1, 2)), (c_q * c_k).sum((1, 2))
    return Maps(mean, x, w, held / total)


def finite(x: torch.Tensor) -> torch.Tensor:
    """Convert to float64, and replace elements that are not below ``TOO_LARGE`` in magnitude by 0."""
    return torch.where(x.abs() < TOO_LARGE, x, 0).double()


def kept_channels(method: "TopP", sample: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Flag the channels of the estimate: all, or those that affect scores most."""
    num_kv_heads, head_dim = sample.shape[1:]
    count = max((1 << (head_dim - 1).bit_length()) // 2, LEAST_CHANNELS) if method.channels == "half" else head_dim
    squares = sum(part[: GROUP_TOKENS // 2].square().mean(0) for part in queries.split(TILE_TOKENS))
    weights = sample.var(0, correction=0) * squares.view(num_kv_heads, -1, head_dim).sum(1)
    order = weights.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :count], True)


def round_to_e4m3(x: torch.Tensor, count: int) -> torch.Tensor:
    """Round to e4m3 with a scale for each head and ``count`` vectors."""
    groups = pad(x, (0, 0, 0, 0, 0, -len(x) % count)).unflatten(0, (-1, count))
    scale = groups.abs().amax((1, 3), keepdim=True).clamp_min(TINY) / LARGEST
    return ((groups * (1 / scale)).to(torch.float8_e4m3fn).float() * scale).flatten(0, 1)[: len(x)]
