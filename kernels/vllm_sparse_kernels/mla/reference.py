# SPDX-License-Identifier: Apache-2.0
"""The methods of MLA's prefill in plain float32 torch, for a device without Triton and for tests.

A call has the new tokens of some rows, causal among themselves, or a chunk of their contexts, whose keys all precede
the queries. The A-shape reads absolute positions. ``top_p`` has running sums: for a query, e of a block of keys is
exp of the largest score in it; Z is the sum of e over all blocks so far, and D the sum over the dropped blocks. Only
scored queries have estimates and sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_sparse_kernels.compile_time import LOG2_E
from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED
from vllm_sparse_kernels.mla.calls import BLOCK_TOKENS, SINK_TOKENS, MlaAShape, MlaMethod, MlaRow, MlaTopP, Tensors
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div


class Tiling(NamedTuple):
    """Sizes of ``top_p``. Kernels have the defaults; tests of the rules use smaller sizes."""

    tile_tokens: int = TILE_TOKENS
    block_tokens: int = BLOCK_TOKENS
    sink_tokens: int = SINK_TOKENS


KERNEL_TILING = Tiling()
"""The sizes of kernels."""


class RunningSums(NamedTuple):
    """Sums of scored queries and heads over the calls so far, relative to 2 ** top: [heads, tokens] float32.

    New tokens restart the sums of scored queries. Those of other queries are never read: kernels of ``top_p`` leave
    them as they are, while ``attend`` below and calls of other methods clear them too.
    """

    top: torch.Tensor  # largest estimate, as a logarithm to base 2; -inf before the first call
    total: torch.Tensor  # Z
    dropped: torch.Tensor  # D

    @staticmethod
    def zeros(num_heads: int, num_tokens: int, device: torch.device | None = None) -> "RunningSums":
        """Return the sums before the first call."""
        zeros = torch.zeros(2, num_heads, num_tokens, device=device)
        return RunningSums(torch.full_like(zeros[0], -torch.inf), *zeros)

    def part(self, start: int, length: int) -> "RunningSums":
        """Return views of some tokens' sums."""
        return RunningSums(*(x[:, start : start + length] for x in self))

    def clear(self) -> None:
        """Forget all calls."""
        self.top.fill_(-torch.inf)
        self.total.zero_()
        self.dropped.zero_()


def attend(
    method: MlaMethod,
    tensors: Tensors,
    rows: Sequence[MlaRow],
    *,
    scale: float,
    is_causal: bool,
    sums: RunningSums,
    tiling: Tiling = KERNEL_TILING,
) -> int:
    """Run a call, tile by tile."""
    q, k, v, out, lse = tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse
    kept_pairs = 0
    for row in rows:
        if is_causal:
            sums.part(row.state_start, row.num_queries).clear()
        keys = slice(row.key_start, row.key_start + row.num_keys)
        row_k, row_v = k[keys].float(), v[keys].float()
        for offset in range(0, row.num_queries, tiling.tile_tokens):
            length = min(tiling.tile_tokens, row.num_queries - offset)
            tile = slice(row.query_start + offset, row.query_start + offset + length)
            scores = torch.einsum("qhd,khd->hqk", q[tile].float(), row_k) * scale
            allowed = _causal(row, offset, length, q.device)
            scores = scores.masked_fill(~allowed, -torch.inf)
            if isinstance(method, MlaAShape):
                kept = kept_by_a_shape(method, row, offset, length, q.device)
            elif method.kept_mass < 1:
                part = sums.part(row.state_start + offset, length)
                maxima = block_maxima(scores[:, scored_queries(method, length, q.device)], tiling)
                blocks = keep_blocks(method, maxima, part, row, offset, is_causal, tiling)
                kept = blocks.repeat_interleave(tiling.block_tokens, 1)[:, None, : row.num_keys] & allowed
            else:
                kept = allowed
            kept_pairs += int(kept.sum()) * (1 if kept.dim() == 3 else q.shape[1])
            scores = scores.masked_fill(~kept, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            out[tile] = torch.einsum("hqk,khd->qhd", weights, row_v).to(out.dtype)
            lse[:, tile] = scores.logsumexp(-1)
    return kept_pairs


def kept_by_a_shape(
    method: MlaAShape, row: MlaRow, offset: int, length: int, device: torch.device | None = None
) -> torch.Tensor:
    """Return the keys that queries keep."""
    queries = row.query_position + offset + torch.arange(length, device=device)[:, None]
    keys = row.key_position + torch.arange(row.num_keys, device=device)
    return (keys <= queries) & ((keys < method.sink_tokens) | (keys > queries - method.local_tokens))


def scored_queries(method: MlaTopP, length: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the scored queries of a tile (``methods.top_p.scored``)."""
    period = ALL_SCORED // method.num_scored
    return torch.clamp(torch.arange(period - 1, length + period - 1, period, device=device), max=length - 1)


def block_maxima(scores: torch.Tensor, tiling: Tiling = KERNEL_TILING) -> torch.Tensor:
    """Return each query's largest score in each block, as logarithms to base 2."""
    num_keys = scores.shape[-1]
    missing = ceil_div(num_keys, tiling.block_tokens) * tiling.block_tokens - num_keys
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return padded.unflatten(-1, (-1, tiling.block_tokens)).amax(-1) * LOG2_E.value


def keep_blocks(
    method: MlaTopP,
    maxima: torch.Tensor,
    sums: RunningSums,
    row: MlaRow,
    offset: int,
    is_causal: bool,
    tiling: Tiling = KERNEL_TILING,
) -> torch.Tensor:
    """Choose a tile's blocks, and update the running sums of its queries."""
    num_queries, num_blocks = sums.top.shape[1], maxima.shape[2]
    scored = scored_queries(method, num_queries, maxima.device)
    reach = min(row.num_keys, offset + num_queries) if is_causal else row.num_keys
    num_reached = ceil_div(reach, tiling.block_tokens)
    starts = torch.arange(num_blocks, device=maxima.device) * tiling.block_tokens
    forced = row.key_position + starts < tiling.sink_tokens
    if is_causal:
        forced |= starts >= offset // tiling.block_tokens * tiling.block_tokens

    before = RunningSums(*(x[:, scored] for x in sums))
    top = torch.maximum(before.top, maxima.amax(-1)) if num_blocks else before.top
    estimates = torch.exp2(maxima - top[..., None]).nan_to_num(0.0)
    decay = torch.exp2(before.top - top).nan_to_num(0.0)
    total, dropped = before.total * decay + estimates.sum(-1), before.dropped * decay

    masses = (estimates / total[..., None]).nan_to_num(0.0).mean(1)
    budget = (1 - method.kept_mass - (dropped / total).nan_to_num(0.0).mean(1)).clamp(min=0.0)
    candidates = masses.masked_fill(forced, torch.inf)
    ascending, order = candidates.flip(-1).sort(dim=-1, stable=True)  # the last of equal masses is dropped first
    drops = ascending.cumsum(-1) <= budget[:, None]
    # At most ``most`` blocks are kept for their mass: lighter blocks are dropped even beyond the budget.
    num_candidates = int((~forced[:num_reached]).sum()) + num_blocks - num_reached
    most = ceil_div_share(method.most_share, num_reached)
    drops |= torch.arange(num_blocks, device=maxima.device) < num_candidates - most
    kept = ~torch.zeros_like(drops).scatter(-1, num_blocks - 1 - order, drops)
    kept[:, num_reached:] = False

    sums.top[:, scored] = top
    sums.total[:, scored] = total
    sums.dropped[:, scored] = dropped + (estimates * ~kept[:, None]).sum(-1)
    return kept


def ceil_div_share(share: float, count: int) -> int:
    """Return the share of a number, rounded up, computed in float32 as kernels do."""
    return int(torch.ceil(torch.tensor(share, dtype=torch.float32) * count))


def _causal(row: MlaRow, offset: int, length: int, device: torch.device) -> torch.Tensor:
    queries = row.query_position + offset + torch.arange(length, device=device)[:, None]
    return row.key_position + torch.arange(row.num_keys, device=device) <= queries
