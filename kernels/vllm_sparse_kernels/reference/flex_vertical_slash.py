"""FlexPrefill's vertical-slash in plain torch: Algorithm 5 of arXiv:2505.19578; see select/flex_vertical_slash.py."""

from typing import TYPE_CHECKING

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.reference.minference import in_segments, vertical_slash_sums
from vllm_sparse_kernels.rows import ceil_div

if TYPE_CHECKING:  # the package select imports this module
    from vllm_sparse_kernels.select.flex_vertical_slash import FlexVerticalSlash

BAND_TOKENS = 64


def select_flex_vertical_slash(
    method: "FlexVerticalSlash",
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    heads: torch.Tensor,
    scale: float,
) -> None:
    room = [method.stripes_of_row(index.rows, row) for row in range(index.rows.num_rows)]
    index, row_ids = in_segments(index, method.segment_tokens)
    rows, group = index.rows, q.shape[1] // cache.num_kv_heads
    for row in range(rows.num_rows):
        keys, _ = cache.gather(rows.block_table[row], rows.seq_lens[row])
        end = rows.tokens[row] + rows.query_lens[row]
        last = slice(end - min(method.last_queries, rows.query_lens[row]), end)
        for head, own in zip(heads.tolist(), method.of_heads(len(heads)), strict=True):
            column_sums, slash_sums = vertical_slash_sums(q[last, head].float(), keys[:, head // group].float(), scale)
            columns = fewest_with_mass(column_sums, own.gamma, own.min_budget)
            slashes = kept_bands(slash_sums, rows.context_lens[row], own.gamma, own.min_budget)
            whole = whole_blocks(columns, room[row_ids[row]], index.block_tokens)
            for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
                set_lines(columns, slashes, whole, index, head, i_tile)


def kept_bands(sums: torch.Tensor, context_len: int, gamma: float, min_budget: int) -> torch.Tensor:
    """Flags of diagonals, [seq_len] as their sums: the fewest bands with γ of the bands' mass.

    Diagonal d is in band (d + s) // 64 with s = −context_len mod 64. Bands past the seq_len / 64-th are none: tiles meet
    nothing but the first block on them, which is kept anyway.
    """
    shift = -context_len % BAND_TOKENS
    num_bands = ceil_div(len(sums), BAND_TOKENS)
    of_bands = pool(torch.nn.functional.pad(sums, (shift, 0)), BAND_TOKENS)[:num_bands]
    kept = fewest_with_mass(of_bands, gamma, ceil_div(min_budget, BAND_TOKENS)).repeat_interleave(BAND_TOKENS)
    return torch.nn.functional.pad(kept, (0, BAND_TOKENS))[shift : shift + len(sums)]


def fewest_with_mass(values: torch.Tensor, gamma: float, at_least: int = 0) -> torch.Tensor:
    """Flags of the fewest values with γ of the sum, min{k: Σ of the k largest >= γ}, and of all ties with the last.

    No fewer than ``at_least``. Tied are floats of the same sign, exponent and first 10 bits of the mantissa.
    """
    if gamma == 1:
        return torch.ones_like(values, dtype=torch.bool)
    largest = values.sort(descending=True).values
    mass = largest.double().cumsum(0)
    num_short = max(int((mass < gamma * mass[-1]).sum()), min(at_least, len(values)) - 1)
    return values >= (largest[num_short].float().view(torch.int32) >> 13 << 13).view(torch.float32)


def pool(values: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sums of each ``tokens`` consecutive values."""
    padding = ceil_div(len(values), tokens) * tokens - len(values)
    return torch.nn.functional.pad(values, (0, padding)).view(-1, tokens).sum(1)


def whole_blocks(columns: torch.Tensor, capacity: int, block_tokens: int) -> torch.Tensor:
    """Flags of the first block and of those kept whole, so that at most ``capacity`` columns remain outside."""
    counts = pool(columns.int(), block_tokens)
    left = [int(counts[counts < fewest].sum()) for fewest in range(block_tokens + 2)]
    whole = counts >= max(fewest for fewest in range(1, block_tokens + 2) if left[fewest] <= capacity)
    whole[0] = True
    return whole


def set_lines(
    columns: torch.Tensor, slashes: torch.Tensor, whole: torch.Tensor, index: SparseIndex, head: int, i_tile: int
) -> None:
    """One tile's blocks, those that a kept diagonal crosses and whole ones, and the columns outside as stripes."""
    tile = index.rows.tile_list[i_tile]
    starts = torch.arange(index.num_causal_blocks(tile), device=slashes.device) * index.block_tokens
    kept_below = torch.nn.functional.pad(slashes.cumsum(0), (1, 0))  # kept offsets less than each
    nearest = (tile.position - starts - index.block_tokens + 1).clamp(min=0)
    crossed = kept_below[tile.last_position - starts + 1] > kept_below[nearest]
    index.set_blocks(head, i_tile, crossed | whole[: len(crossed)])
    index.set_stripes(head, i_tile, columns[: tile.position].nonzero().flatten())
