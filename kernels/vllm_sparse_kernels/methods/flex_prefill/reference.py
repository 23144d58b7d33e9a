# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill's vertical-slash in plain torch: Algorithm 5 of arXiv:2505.19578; see methods/flex_prefill/method.py."""

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.references import diagonal_sums, heads_of_rows, set_lines, softmax_of, ten_bits
from vllm_sparse_kernels.rows import split_blocks

BAND_TOKENS = 64


def select_flex_vertical_slash(call: Call) -> None:
    """Fill the lists of the call's heads in plain torch, as ``FlexVerticalSlash.select`` does with kernels."""
    index, rows = call.index, call.rows
    for row, head, method, queries, keys in heads_of_rows(call):
        places = estimating_queries(method, rows.query_lens[row]).to(call.q.device)
        positions = rows.context_lens[row] + places
        weights = softmax_of(queries[places], keys, positions, call.scale)
        columns = fewest_with_mass(weights.sum(0), method.gamma)
        diagonals = fewest_with_mass(diagonal_sums(weights, positions, BAND_TOKENS), method.gamma)
        whole = whole_blocks(columns, method.stripes_of_row(rows, row), index.block_tokens)
        for i_tile in rows.tiles_of(row):
            set_lines(index, head, i_tile, columns, diagonals, BAND_TOKENS, whole)


def estimating_queries(method: FlexVerticalSlash, query_len: int) -> torch.Tensor:
    """Return the places of the chunk's last queries, or of as many evenly spaced queries up to the last."""
    count = min(method.last_queries, query_len)
    if method.estimating == "spread":
        return torch.arange(1, count + 1) * query_len // count - 1
    return torch.arange(query_len - count, query_len)


def fewest_with_mass(values: torch.Tensor, gamma: float) -> torch.Tensor:
    """Flag the fewest values with γ of the sum, min{k: Σ of the k largest >= γ}, and all ties with the last."""
    if gamma == 1:
        return torch.ones_like(values, dtype=torch.bool)
    largest = values.sort(descending=True).values
    mass = largest.double().cumsum(0)
    num_short = int((mass < gamma * mass[-1]).sum())
    return ten_bits(values) >= ten_bits(largest[num_short])


def whole_blocks(columns: torch.Tensor, capacity: int, block_tokens: int) -> torch.Tensor:
    """Flag the first block and the blocks to keep whole, so that at most ``capacity`` columns remain outside."""
    counts = split_blocks(columns, block_tokens).sum(1)
    left = [int(counts[counts < fewest].sum()) for fewest in range(block_tokens + 2)]
    whole = counts >= max(fewest for fewest in range(1, block_tokens + 2) if left[fewest] <= capacity)
    whole[0] = True
    return whole
