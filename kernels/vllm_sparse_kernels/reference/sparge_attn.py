"""SpargeAttn in plain torch: its selection, and what its attention adds: the λ-skip and 8-bit scores.

Follows arXiv 2502.18137 (equations 2 to 6, Algorithm 1) and, for the 8-bit scores, SageAttention's Algorithm 1 (arXiv
2410.02367). ``select/sparge_attn.py`` lists what departs from the paper in the selection.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import TILE_TOKENS
from vllm_sparse_kernels.select.sparge_attn import KEY_BLOCK_TOKENS, SpargeAttn

STRIPES = 64
"""Stripes that ``attend`` gathers at a time."""

INT8_MAX = 127


def select_sparge_attn(
    method: SpargeAttn, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    rows, group = index.rows, q.shape[1] // cache.num_kv_heads
    chosen = heads.long()
    index.stripe_counts.index_fill_(0, chosen, 0)
    for row, seq_len in enumerate(rows.seq_lens):
        keys, _ = cache.gather(rows.block_table[row], seq_len)
        queries = q[rows.tokens[row] : rows.tokens[row] + rows.query_lens[row]]
        kept = predict(method, queries[:, chosen].float(), keys[:, chosen // group].float(), scale)
        halves = index.block_tokens // KEY_BLOCK_TOKENS
        kept = F.pad(kept, (0, -kept.shape[2] % halves)).unflatten(2, (-1, halves)).any(-1).cpu()
        for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
            capacity = index.num_causal_blocks(rows.tile_list[i_tile])
            for head, flags in zip(chosen.tolist(), kept[:, i_tile - rows.tile_starts[row], :capacity]):
                index.set_blocks(head, i_tile, flags)


def predict(method: SpargeAttn, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """M of one row: bool [heads, tiles, key blocks], in the precision of its input.

    queries [query_len, heads, head_dim] are the last positions of keys [seq_len, heads, head_dim].
    """
    probabilities, always, causal = compressed_map(method, queries, keys, scale)
    if method.kept_mass == 1:
        return causal.expand_as(probabilities)
    return (top_cdf(probabilities, method.kept_mass) | always) & causal  # equations 4 and 5


def compressed_map(
    method: SpargeAttn, queries: torch.Tensor, keys: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P^ [heads, tiles, key blocks], what is kept whatever P^ says (bool, same shape), and the causal mask (bool)."""
    query_len, seq_len = len(queries), len(keys)
    if method.smooth_keys:
        keys = keys - keys.mean(0)
    q_mean, q_similarity = compress(queries, TILE_TOKENS)
    k_mean, k_similarity = compress(keys, KEY_BLOCK_TOKENS)
    starts = torch.arange(0, query_len, TILE_TOKENS, device=keys.device)
    last = (starts + TILE_TOKENS).clamp(max=query_len) - 1 + seq_len - query_len
    causal = torch.arange(0, seq_len, KEY_BLOCK_TOKENS, device=keys.device) <= last[:, None]
    unlike = (k_similarity < method.min_similarity)[:, None, :]
    scores = (q_mean @ k_mean.mT * scale).masked_fill(unlike | ~causal, -torch.inf)
    # A tile none of whose blocks is alike has no softmax: it keeps them all.
    probabilities = scores.softmax(-1).nan_to_num()
    return probabilities, unlike | (q_similarity < method.min_similarity)[:, :, None], causal


def compress(tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [heads, blocks, head_dim] and CosSim [heads, blocks], by ``size`` tokens, of [length, heads, head_dim]."""
    padded = F.pad(tokens, (0, 0, 0, 0, 0, -len(tokens) % size))
    blocks = padded.unflatten(0, (-1, size)).permute(2, 0, 1, 3)
    counts = (len(tokens) - size * torch.arange(blocks.shape[1], device=tokens.device)).clamp(max=size)
    unit = F.normalize(blocks, dim=-1)
    return blocks.sum(2) / counts[:, None], (unit @ unit.mT).sum((2, 3)) / counts**2


def top_cdf(probabilities: torch.Tensor, kept_mass: float) -> torch.Tensor:
    """Bool of the same shape: the fewest largest of each row that reach ``kept_mass`` of its sum; ties: the first."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(-1)
    before = F.pad(reached[..., :-1], (1, 0))
    kept = before < kept_mass * reached[..., -1:]
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def attend(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    out: torch.Tensor,
    scale: float,
    skip_margin: float | None = None,
    int8_scores: bool = False,
    queries_per_test: int = TILE_TOKENS,
) -> float:
    """Algorithm 1 from line 7 on: write attention over the index into ``out``; returns the share of P·V skipped,
    counted in pairs of a query and a step of which it sees a key.

    q and out are [num_tokens, num_heads, head_dim]; block after block, then stripes ``STRIPES`` at a time, in float32.

    skip_margin is λ < 0 in natural units of the scaled scores: ``queries_per_test`` queries (the paper's b_q / c_w, of
    one warp) leave out a step's P·V where none of their maxima in it comes within −λ of its running maximum. The
    sum l still counts the step: line 13 stands before the test, so skipping moves outputs towards zero. Line 15 as
    printed asks for the reverse of equation 3's text, which holds here; line 13 as printed forgets l_{i,j−1}.

    int8_scores replaces q·k by SageAttention's ``int8_scores``.
    """
    rows, group = index.rows, q.shape[1] // cache.num_kv_heads
    skipped = seen = 0
    for row, seq_len in enumerate(rows.seq_lens):
        keys, values = (x.float() for x in cache.gather(rows.block_table[row], seq_len))
        for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
            tile = rows.tile_list[i_tile]
            tokens = slice(tile.token, tile.token + tile.length_tokens)
            positions = tile.position + torch.arange(tile.length_tokens, device=q.device)
            for head in range(index.num_heads):
                b_q, k, v = q[tokens, head].float(), keys[:, head // group], values[:, head // group]
                scores = scores_int8(b_q, k, scale) if int8_scores else b_q @ k.T * scale
                scores.masked_fill_(torch.arange(seq_len, device=q.device) > positions[:, None], -torch.inf)
                online = OnlineSoftmax(tile.length_tokens, v.shape[1], q.device)
                for step in steps(index, head, i_tile, seq_len):
                    skip = online.fold(scores[:, step], v[step], skip_margin, queries_per_test)
                    sees = (scores[:, step] > -torch.inf).any(-1)
                    skipped, seen = skipped + int((skip & sees).sum()), seen + int(sees.sum())
                out[tokens, head] = (online.acc / online.sum[:, None]).to(out.dtype)
    return skipped / seen


def steps(index: SparseIndex, head: int, i_tile: int, seq_len: int) -> Iterator[torch.Tensor]:
    """Key positions of one tile, step by step as ``attend`` takes them."""
    offsets = torch.arange(index.block_tokens, device=index.rows.device)
    for block in index.blocks_of(head, i_tile):
        positions = block * index.block_tokens + offsets
        yield positions[positions < seq_len]
    stripes = index.stripes_of(head, i_tile)
    for start in range(0, len(stripes), STRIPES):
        yield stripes[start : start + STRIPES]


class OnlineSoftmax:
    """m, l and O of equation 1 for the queries of one tile."""

    def __init__(self, num_queries: int, head_dim: int, device: torch.device) -> None:
        self.max = torch.full((num_queries,), -torch.inf, device=device)
        self.sum = torch.zeros(num_queries, device=device)
        self.acc = torch.zeros(num_queries, head_dim, device=device)

    def fold(
        self, scores: torch.Tensor, values: torch.Tensor, skip_margin: float | None, queries_per_test: int
    ) -> torch.Tensor:
        """One step, scores [queries, keys] and values [keys, head_dim]; bool [queries] says which skipped P·V."""
        local = scores.amax(-1)
        new = torch.maximum(self.max, local)
        # A query that has seen no key yet has no finite maximum; nothing may become NaN for it.
        finite = new.masked_fill(new == -torch.inf, 0.0)
        p = (scores - finite[:, None]).exp()
        decay = (self.max - finite).exp()
        margin = (local - finite).masked_fill(new == -torch.inf, -torch.inf)
        largest = torch.stack([part.amax() for part in margin.split(queries_per_test)])
        skip = (largest < (-torch.inf if skip_margin is None else skip_margin)).repeat_interleave(queries_per_test)
        skip = skip[: len(scores)]
        self.acc = self.acc * decay[:, None] + (p @ values) * ~skip[:, None]
        self.sum = self.sum * decay + p.sum(-1)
        self.max = new
        return skip


def scores_int8(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """SageAttention's S [queries, keys] of one tile [queries, head_dim] and all keys [seq_len, head_dim] of its row.

    Keys lose their mean over the row (equation 6), which shifts a query's scores all alike; the scaled queries get one
    scale, the keys one per block of 64. Products of 8-bit integers are summed exactly.
    """
    smooth = keys - keys.mean(0)
    q_int8, q_scale = quantize_int8(queries * scale)
    parts = [quantize_int8(block) for block in smooth.split(KEY_BLOCK_TOKENS)]
    products = [(q_int8.double() @ k_int8.double().T).float() * (q_scale * k_scale) for k_int8, k_scale in parts]
    return torch.cat(products, -1)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x̂ int8, δ float32) with x ≈ δ x̂, one δ = max |x| / 127 for the whole block, rounded to the nearest."""
    step = x.abs().max() / INT8_MAX
    return (x / step.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), step
