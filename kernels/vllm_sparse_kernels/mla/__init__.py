# SPDX-License-Identifier: Apache-2.0
"""Temporary stand-in for the kernels half: plain torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

BLOCK, TILE = 64, 128


class MlaRow(NamedTuple):
    """A request's part of a call."""

    query_start: int
    num_queries: int
    query_position: int
    state_start: int
    key_start: int
    num_keys: int
    key_position: int


class MlaAShape(NamedTuple):
    """A-shape."""

    sink_tokens: int
    local_tokens: int


class MlaTopP(NamedTuple):
    """top_p."""

    kept_mass: float
    most_share: float = 1.0
    channels: int = 192


class MlaPrefill:
    """Sparse MLA prefill of one worker."""

    @staticmethod
    def refusal(
        num_heads: int, qk_head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Return why it cannot run, or None."""
        return None if (qk_head_dim, v_head_dim) == (192, 128) else f"given head dims {qk_head_dim} and {v_head_dim}"

    def __init__(
        self,
        *,
        num_heads: int,
        scale: float,
        qk_head_dim: int,
        v_head_dim: int,
        max_query_tokens: int,
        max_key_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.scale, self.max_query_tokens, self.max_key_tokens = scale, max_query_tokens, max_key_tokens
        self.state = torch.zeros(3, num_heads, max_query_tokens)

    def attend(
        self,
        method: MlaAShape | MlaTopP,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Sequence[MlaRow],
        *,
        is_causal: bool,
        out: torch.Tensor,
        lse: torch.Tensor,
        kept_pairs: torch.Tensor | None = None,
    ) -> None:
        """Attend for the rows' queries."""
        for row in rows:
            assert row.num_queries <= self.max_query_tokens
            assert row.num_keys <= self.max_key_tokens
            assert not is_causal or (row.num_keys, row.key_position) == (row.num_queries, row.query_position)
            queries, keys = (
                slice(row.query_start, row.query_start + row.num_queries),
                slice(row.key_start, row.key_start + row.num_keys),
            )
            scores = torch.einsum("qhd,khd->hqk", q[queries].float(), k[keys].float()) * self.scale
            q_pos = row.query_position + torch.arange(row.num_queries)[:, None]
            k_pos = row.key_position + torch.arange(row.num_keys)
            causal = k_pos <= q_pos
            scores = scores.masked_fill(~causal, -torch.inf)
            if isinstance(method, MlaAShape):
                kept = ((k_pos < method.sink_tokens) | (k_pos > q_pos - method.local_tokens)).expand_as(scores)
            else:
                state = self.state[:, :, row.state_start : row.state_start + row.num_queries]
                if is_causal:
                    state[0], state[1], state[2] = -torch.inf, 0, 0
                kept = self._top_p(method, scores, k_pos, q_pos, state)
            kept = kept & causal
            if kept_pairs is not None:
                kept_pairs += kept.sum()
            scores = scores.masked_fill(~kept, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            out[queries] = torch.einsum("hqk,khd->qhd", weights, v[keys].float()).to(out.dtype)
            lse[:, queries] = scores.logsumexp(-1)

    @staticmethod
    def _top_p(
        method: MlaTopP, scores: torch.Tensor, k_pos: torch.Tensor, q_pos: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        _, num_queries, num_keys = scores.shape
        kept = torch.ones_like(scores, dtype=torch.bool)
        pad = -num_keys % BLOCK
        blocks = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf).unflatten(2, (-1, BLOCK)).amax(-1)
        first = torch.arange(blocks.shape[2]) * BLOCK + int(k_pos[0]) if num_keys else torch.zeros(0)
        top = torch.maximum(state[0], blocks.amax(-1))
        factor = (state[0] - top).exp().nan_to_num(0.0)
        mass = (blocks - top[..., None]).exp().nan_to_num(0.0)
        total, dropped = state[1] * factor + mass.sum(-1), state[2] * factor
        state[0], state[1] = top, total
        for start in range(0, num_queries, TILE):
            tile = slice(start, min(start + TILE, num_queries))
            shares = (mass[:, tile] / total[:, tile, None]).nan_to_num(0.0).mean(1)
            lost = (dropped[:, tile] / total[:, tile]).nan_to_num(0.0).mean(1)
            forced = (first == 0) | (first + BLOCK > int(q_pos[start]))
            order = shares.masked_fill(forced, torch.inf).sort(-1)
            cumulative = shares.gather(1, order.indices).cumsum(1) + lost[:, None]
            drop = torch.zeros_like(shares, dtype=torch.bool).scatter(
                1, order.indices, (cumulative <= 1 - method.kept_mass) & ~forced[order.indices]
            )
            dropped[:, tile] += (mass[:, tile] * drop[:, None]).sum(-1)
            kept[:, tile] = ~drop.repeat_interleave(BLOCK, 1)[:, None, :num_keys]
        state[2] = dropped
        return kept
