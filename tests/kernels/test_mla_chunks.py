# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/research/mla.md: sparse attention over keys in chunks, each projected up from a latent vector.

Rules of the reference (``vllm_sparse_kernels.mla.reference``), and two other choices of Z, on a layer of random weights
with small shapes of multi-head latent attention. As in vLLM, the new tokens come first, causal among themselves, then
the context's chunks in ascending order, and parts are merged by their log-sum-exp.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from vllm_sparse_kernels.mla import MlaAShape, MlaRow, MlaTopP, reference
from vllm_sparse_kernels.mla.reference import RunningSums, Tiling

HEADS, LATENT, NOPE, ROPE, VALUE = 4, 24, 16, 8, 12
TILE, BLOCK = 16, 8
TILING = Tiling(TILE, BLOCK, sink_tokens=0)
CHUNKS = (8, 24, 1000)
"""Sizes of chunks in tokens; the last holds any context here."""


@dataclass(frozen=True)
class Layer:
    """A layer's queries of the new tokens, and the latent vectors of all tokens.

    Attributes:
        q: [new, HEADS, NOPE + ROPE].
        latent: [tokens, LATENT + ROPE], as vLLM caches it: the rope's part is shared by all heads.
        up_keys: [LATENT, HEADS · NOPE].
        up_values: [LATENT, HEADS · VALUE].
    """

    q: torch.Tensor
    latent: torch.Tensor
    up_keys: torch.Tensor
    up_values: torch.Tensor

    @staticmethod
    def random(context: int, new: int, seed: int = 0) -> "Layer":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        up_keys, up_values = normal(LATENT, HEADS * NOPE) / LATENT**0.5, normal(LATENT, HEADS * VALUE) / LATENT**0.5
        return Layer(2 * normal(new, HEADS, NOPE + ROPE), normal(context + new, LATENT + ROPE), up_keys, up_values)

    @property
    def context(self) -> int:
        return len(self.latent) - len(self.q)

    def with_heavy(self, tokens: slice, factor: float) -> "Layer":
        """Return the layer with keys that all queries prefer at some tokens."""
        latent = self.latent.clone()
        latent[tokens, LATENT:] += factor * self.q[..., NOPE:].mean((0, 1))
        return Layer(self.q + 0.5 * self.q.mean((0, 1)), latent, self.up_keys, self.up_values)

    def project_up(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [tokens, HEADS, NOPE + ROPE] and values [tokens, HEADS, VALUE], as vLLM passes them on."""
        latent, rope = self.latent[tokens].split((LATENT, ROPE), dim=1)
        keys = (latent @ self.up_keys).view(-1, HEADS, NOPE)
        values = (latent @ self.up_values).view(-1, HEADS, VALUE)
        return torch.cat((keys, rope[:, None].expand(-1, HEADS, -1)), 2), values

    def parts(self, chunk_tokens: int) -> Iterator[slice]:
        """Return the tokens of each call of the backend, in vLLM's order."""
        yield slice(self.context, len(self.latent))
        for start in range(0, self.context, chunk_tokens):
            yield slice(start, min(start + chunk_tokens, self.context))

    def row(self, tokens: slice) -> MlaRow:
        """Return the row of a call with the keys of some tokens."""
        return MlaRow(0, len(self.q), self.context, 0, 0, tokens.stop - tokens.start, tokens.start)

    def scores(self, tokens: slice) -> torch.Tensor:
        """Return scores [HEADS, new, tokens], −∞ for keys after a query."""
        keys, _ = self.project_up(tokens)
        scores = torch.einsum("qhd,khd->hqk", self.q, keys) * (NOPE + ROPE) ** -0.5
        positions = self.context + torch.arange(len(self.q))[:, None]
        return scores.masked_fill(torch.arange(tokens.start, tokens.stop) > positions, -torch.inf)


class Part(NamedTuple):
    """Attention over some of the keys: the output [HEADS, new, VALUE], zeros for a query without keys, and its LSE."""

    out: torch.Tensor
    lse: torch.Tensor

    def merged(self, other: "Part") -> "Part":
        """Merge parts as vLLM's merge_attn_states does; both may be empty."""
        lse = torch.logaddexp(self.lse, other.lse)
        weights = [(part.lse - lse).exp().nan_to_num(0.0)[..., None] for part in (self, other)]
        return Part(weights[0] * self.out + weights[1] * other.out, lse)


def attend(layer: Layer, tokens: slice, kept: torch.Tensor) -> Part:
    """Return attention over the kept keys; ``kept`` broadcasts to [HEADS, new, tokens]."""
    scores = layer.scores(tokens).masked_fill(~kept, -torch.inf)
    _, values = layer.project_up(tokens)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return Part(torch.einsum("hqk,khd->hqd", weights, values), scores.logsumexp(-1))


Rule = Callable[[slice], torch.Tensor]
"""A function from the tokens of a part to its kept keys, called once for each part, in order."""


def over_chunks(layer: Layer, rule: Rule, chunk_tokens: int) -> torch.Tensor:
    """Return the output of the layer: the merged parts, [HEADS, new, VALUE]."""
    merged: Part | None = None
    for tokens in layer.parts(chunk_tokens):
        part = attend(layer, tokens, rule(tokens))
        merged = part if merged is None else merged.merged(part)
    assert merged is not None
    return merged.out


def a_shape(layer: Layer, sink_tokens: int, local_tokens: int) -> Rule:
    method = MlaAShape(sink_tokens, local_tokens)
    return lambda tokens: reference.kept_by_a_shape(method, layer.row(tokens), 0, len(layer.q))


LAYERS = [Layer.random(100, 40), Layer.random(64, 16, seed=1), Layer.random(0, 48, seed=2), Layer.random(133, 8, 3)]


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.context}+{len(layer.q)}")
class TestAShape:
    def test_dense_parts_merge_to_dense_attention(self, layer: Layer, chunk_tokens: int) -> None:
        whole = slice(0, len(layer.latent))
        dense = attend(layer, whole, torch.tensor(True)).out
        torch.testing.assert_close(over_chunks(layer, lambda _: torch.tensor(True), chunk_tokens), dense)
        # In the latent space, as in decode: the keys' projection is applied to the queries.
        q_nope, q_rope = layer.q.split((NOPE, ROPE), dim=2)
        absorbed = torch.einsum("qhn,lhn->qhl", q_nope, layer.up_keys.view(LATENT, HEADS, NOPE))
        scores = torch.einsum("qhl,kl->hqk", torch.cat((absorbed, q_rope), 2), layer.latent) * (NOPE + ROPE) ** -0.5
        expected = layer.scores(whole)
        torch.testing.assert_close(scores.masked_fill(expected == -torch.inf, -torch.inf), expected)

    def test_chunks_do_not_show(self, layer: Layer, chunk_tokens: int) -> None:
        rule = a_shape(layer, sink_tokens=11, local_tokens=37)
        whole = slice(0, len(layer.latent))
        out = over_chunks(layer, rule, chunk_tokens)
        torch.testing.assert_close(out, attend(layer, whole, rule(whole)).out)
        assert out.isfinite().all()

    def test_a_chunk_between_sinks_and_window_has_no_kept_key(self, layer: Layer, chunk_tokens: int) -> None:
        rule = a_shape(layer, sink_tokens=11, local_tokens=37)
        for tokens in layer.parts(chunk_tokens):
            between = tokens.start >= 11 and tokens.stop <= layer.context - 36
            assert bool(rule(tokens).any()) != between


class TopP:
    """The blocks that the tiles of the new tokens keep. Parts end at a block's end, and contain whole tiles.

    Args:
        layer: The layer.
        kept_mass: p.
        way: ``by chunk``, ``running`` or ``whole``: the keys over which a query's sum is computed.
    """

    def __init__(self, layer: Layer, kept_mass: float, way: str) -> None:
        self.layer, self.kept_mass, self.way = layer, kept_mass, way
        row = slice(0, len(layer.latent))
        estimates = self.estimates(row)
        self.total = estimates.sum(-1)
        self.sum, self.dropped = torch.zeros_like(self.total), torch.zeros_like(self.total)
        self.whole = self.kept(estimates, row, self.total, torch.zeros_like(self.total))
        self.running = RunningSums.zeros(HEADS, len(layer.q))
        self.num_kept = 0

    def estimates(self, tokens: slice) -> torch.Tensor:
        """Estimate the blocks' masses from each query's largest score in them: [HEADS, tiles, TILE, blocks]."""
        scores = self.layer.scores(tokens).unflatten(1, (-1, TILE))
        return scores.unflatten(-1, (-1, BLOCK)).amax(-1).exp()

    def kept(self, estimates: torch.Tensor, tokens: slice, sums: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        """Keep the diagonal, and the fewest blocks with which no more than 1 − p is dropped: [HEADS, tiles, blocks]."""
        starts = torch.arange(tokens.start, tokens.stop, BLOCK)
        first = torch.arange(self.layer.context, len(self.layer.latent), TILE)[:, None]
        is_causal = starts < first + TILE
        diagonal = is_causal & (starts + BLOCK > first)
        shares = (estimates / sums[..., None]).mean(2).masked_fill(diagonal, torch.inf)
        budget = 1 - self.kept_mass - (dropped / sums).mean(2)
        ascending, order = shares.sort(-1)
        drops = torch.zeros_like(shares, dtype=torch.bool)
        drops.scatter_(-1, order, ascending.cumsum(-1) <= budget[..., None])
        return is_causal & ~drops

    def kept_running(self, tokens: slice) -> torch.Tensor:
        """Return the reference's blocks: [HEADS, tiles, blocks]."""
        row, scores, tiles = self.layer.row(tokens), self.layer.scores(tokens), []
        for offset in range(0, row.num_queries, TILE):
            maxima = reference.block_maxima(scores[:, offset : offset + TILE], TILING)
            sums, is_causal = self.running.part(offset, TILE), tokens.start == self.layer.context
            tiles.append(reference.keep_blocks(MlaTopP(self.kept_mass), maxima, sums, row, offset, is_causal, TILING))
        return torch.stack(tiles, 1)

    def __call__(self, tokens: slice) -> torch.Tensor:
        estimates = self.estimates(tokens)
        self.sum = self.sum + estimates.sum(-1)
        if self.way == "whole":
            kept = self.whole[..., tokens.start // BLOCK : tokens.stop // BLOCK]
        elif self.way == "by chunk":
            kept = self.kept(estimates, tokens, estimates.sum(-1), torch.zeros_like(self.sum))
        else:
            kept = self.kept_running(tokens)
        self.num_kept += int(kept.sum())
        self.dropped = self.dropped + (estimates * ~kept[:, :, None]).sum(-1)
        return kept.repeat_interleave(TILE, 1).repeat_interleave(BLOCK, -1)

    def worst_dropped(self) -> float:
        """Return the largest share of its row's estimated mass that a tile has dropped, averaged over its queries."""
        return float((self.dropped / self.total).mean(2).max())


WAYS = ("by chunk", "running", "whole")
ALIGNED = [
    Layer.random(104, 48), Layer.random(64, 16, seed=1), Layer.random(0, 48, seed=2), Layer.random(160, 32, seed=3),
    Layer.random(160, 32, seed=4).with_heavy(slice(0, 4), 2.0),  # a sink, as in trained models
    Layer.random(160, 32, seed=5).with_heavy(slice(144, 160), 2.0),  # most of the mass is in the last chunk
    Layer.random(160, 32, seed=6).with_heavy(slice(0, 160), 2.0),  # little of the mass is in the new tokens
]  # fmt: skip


def run(layer: Layer, kept_mass: float, way: str, chunk_tokens: int) -> tuple[torch.Tensor, TopP]:
    rule = TopP(layer, kept_mass, way)
    return over_chunks(layer, rule, chunk_tokens), rule


class TestTopP:
    @pytest.mark.parametrize("chunk_tokens", CHUNKS)
    @pytest.mark.parametrize("way", ["running", "whole"])
    def test_no_tile_drops_more_than_its_share_of_the_whole_row(self, way: str, chunk_tokens: int) -> None:
        """This holds for every distribution of the mass over the parts, even if most of it comes late."""
        for layer in ALIGNED:
            for kept_mass in 0.5, 0.9:
                out, rule = run(layer, kept_mass, way, chunk_tokens)
                assert rule.worst_dropped() <= 1 - kept_mass + 1e-5
                assert out.isfinite().all()

    @pytest.mark.parametrize("way", WAYS)
    def test_something_is_dropped_and_at_1_nothing(self, way: str) -> None:
        layer = ALIGNED[4]
        assert run(layer, 0.8, way, 64)[1].worst_dropped() > 0.05
        out, rule = run(layer, 1.0, way, 64)
        assert rule.worst_dropped() <= 1e-6
        torch.testing.assert_close(out, attend(layer, slice(0, len(layer.latent)), torch.tensor(True)).out)

    def test_the_whole_rows_sum_makes_chunks_not_show(self) -> None:
        for layer in ALIGNED:
            outputs = [run(layer, 0.9, "whole", chunk_tokens)[0] for chunk_tokens in CHUNKS]
            for out in outputs[1:]:
                torch.testing.assert_close(out, outputs[0])

    @pytest.mark.parametrize("chunk_tokens", CHUNKS)
    def test_no_way_keeps_fewer_blocks_than_whole(self, chunk_tokens: int) -> None:
        for layer in ALIGNED:
            counts = [run(layer, 0.9, way, chunk_tokens)[1].num_kept for way in ("running", "whole")]
            assert counts[0] >= counts[1]

    def test_running_is_near_whole_where_the_mass_comes_early(self) -> None:
        """Sinks and the diagonal come first. ``by chunk`` keeps blocks with almost no weight."""
        counts = {way: run(ALIGNED[4], 0.9, way, 24)[1].num_kept for way in WAYS}
        assert counts["whole"] <= counts["running"] < counts["by chunk"]
        assert counts["running"] - counts["whole"] < 0.5 * (counts["by chunk"] - counts["whole"])

    def test_of_a_row_without_context_all_ways_are_one_rule(self) -> None:
        outputs = [run(ALIGNED[2], 0.8, way, 64)[0] for way in WAYS]
        for out in outputs[1:]:
            assert torch.equal(out, outputs[0])
