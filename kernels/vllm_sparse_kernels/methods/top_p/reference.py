# SPDX-License-Identifier: Apache-2.0
"""The rule of ``top_p`` in plain torch: the same steps as method.py, whose docstring has the equations.

Everything is float32.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.references import rows_of
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div, split_blocks

KEY_BLOCK = 32
LARGEST = 15
TINY = 1e-20  # replaces the largest magnitude of zeros
LEAST_CHANNELS = 64
GROUP_TOKENS, GROUP_PERIOD = 64, 8  # of GROUP_PERIOD consecutive groups of keys, the first is sampled


def select_top_p(call: Call) -> None:
    """Fill the index; an index block is kept if any of its 32-key blocks is."""
    index, methods = call.index, dict(call.heads.pairs)
    for head, i_tile, shares in tile_shares(call):
        tile = index.rows.tile_list[i_tile]
        kept = fewest(methods[head], shares.mean(0), tile.position)
        kept |= (shares >= methods[head].least_peak).any(0)
        index.set_blocks(head, i_tile, kept, KEY_BLOCK)


def fewest(method: TopP, masses: torch.Tensor, position: int) -> torch.Tensor:
    """Flag sink, local region and diagonal, and the fewest blocks between them that hold the tile's share of mass."""
    if method.kept_mass == 1:
        return torch.ones_like(masses, dtype=torch.bool)
    first = min(ceil_div(method.sink_tokens, KEY_BLOCK), len(masses))
    end = max(first, max(position - method.local_tokens, 0) // KEY_BLOCK)
    always = masses[:first].sum() + masses[end:].sum()
    sizes, order = masses[first:end].sort(descending=True, stable=True)
    before = always + pad(sizes.cumsum(0), (1, 0))[:-1]
    share = 1 - (1 - method.kept_mass) * min(position / method.ramp_tokens, 1)
    added = before < share * masses.sum()
    added[method.most_blocks :] = False
    kept = torch.ones_like(masses, dtype=torch.bool)
    kept[first + order] = added
    return kept


def tile_shares(call: Call) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Compute the share of each scored query in each causal block of 32 keys."""
    rows = call.rows
    for row, queries, keys in rows_of(call):
        estimated_queries, estimated_keys = estimated_vectors(queries, keys)
        rounded = round_to_e4m3(estimated_keys, KEY_BLOCK)
        for head in call.heads.heads:
            head_queries = round_to_e4m3(estimated_queries[:, head, None], 1)[:, 0]
            for i_tile in rows.tiles_of(row):
                tile = rows.tile_list[i_tile]
                first = tile.position - rows.context_lens[row]
                places = scored_queries(tile.length_tokens, call.q.device)
                b_k = rounded[: tile.last_position + 1, head // call.group]
                scores = causal_scores(head_queries[first + places] @ b_k.T, tile.position + places, call.scale)
                yield head, i_tile, scores.unflatten(1, (-1, KEY_BLOCK)).amax(2).softmax(1)


def scored_queries(num_queries: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the places in their tile of the queries that are scored: the second of each two neighbours.

    The last query of a tile with an odd number of queries has no second neighbour, and is scored itself.
    """
    return torch.arange(1, num_queries + 1, 2, device=device).clamp_max(num_queries - 1)


def causal_scores(products: torch.Tensor, positions: torch.Tensor, scale: float) -> torch.Tensor:
    """Turn products of a tile's queries with all keys up to its last query into scores of whole blocks."""
    num_keys = products.shape[-1]
    future = torch.arange(num_keys, device=products.device) > positions[:, None]
    scores = (products * scale).masked_fill_(future, -torch.inf)
    return pad(scores, (0, -num_keys % KEY_BLOCK), value=-torch.inf)


def estimated_vectors(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the vectors of one row whose products estimate scores, up to a constant of each query."""
    sample = keys[torch.arange(len(keys), device=keys.device) // GROUP_TOKENS % GROUP_PERIOD == 0]
    kept = kept_channels(sample, queries)
    kept_queries = queries * kept.repeat_interleave(queries.shape[1] // keys.shape[1], 0)
    return kept_queries, (keys - sample.mean(0)) * kept


def kept_channels(sample: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Flag the channels of the estimate: those that affect scores most."""
    num_kv_heads, head_dim = sample.shape[1:]
    count = max((1 << (head_dim - 1).bit_length()) // 2, LEAST_CHANNELS)  # half of head_dim as a power of two
    squares = sum(part[: GROUP_TOKENS // 2].square().mean(0) for part in queries.split(TILE_TOKENS))
    weights = sample.var(0, correction=0) * squares.view(num_kv_heads, -1, head_dim).sum(1)
    order = weights.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :count], True)


def round_to_e4m3(x: torch.Tensor, count: int) -> torch.Tensor:
    """Round to e4m3 with a scale for each head and ``count`` vectors."""
    groups = split_blocks(x, count)
    scale = groups.abs().amax((1, 3), keepdim=True).clamp_min(TINY) / LARGEST
    return ((groups * (1 / scale)).to(torch.float8_e4m3fn).float() * scale).flatten(0, 1)[: len(x)]
