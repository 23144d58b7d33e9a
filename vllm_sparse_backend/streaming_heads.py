# SPDX-License-Identifier: Apache-2.0
"""Finds streaming heads, which hardly attend to keys other than the first and the nearest.

The term is DuoAttention's (arXiv:2410.10819). A worker runs the served model once on a generated prompt, and measures
the attention of each head to *far* blocks: blocks of keys that lie completely outside of sink and window. It measures
two numbers for each window of ``WINDOWS_TOKENS``, over the queries past sink and largest window:

* the mean share of attention in far blocks;
* the share of queries that have at least ``HEAVY_SHARE`` of their attention in a single far block. A lookup is such a
  query; lookups are so rare that they hardly change the mean.

A head is a streaming head if both are small for a window, by more than the measurement's noise: servers of one model
on different devices then agree about most heads. It keeps the smallest such window. The noise was measured with a
window of 2,048. DuoAttention instead trains a gate for each head, on passkeys; this rule needs no training. The
thresholds come from an emulation on two models (docs/research/quality.md).
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.model_shape import layer_kinds, read_config_json, text_part
from vllm_sparse_backend.prompts.lookups import Encode, insert_threads
from vllm_sparse_backend.prompts.texts import measuring_text
from vllm_sparse_kernels.methods.minference import AShape

SINK_TOKENS = 128
"""First keys of a sequence that a streaming head keeps."""

WINDOWS_TOKENS = (256, 512, 1024, 2048)
"""Numbers of nearest keys, including the query's own position, that a streaming head may keep."""

BLOCK_TOKENS = 32

HEAVY_SHARE = 0.2
"""Share of a query's attention from which a far block is heavy."""

MAX_FAR_SHARE = 0.1
"""Mean share of attention in far blocks below which a head may be a streaming head."""

MAX_HEAVY_QUERIES = 0.0005
"""Share of queries with a heavy far block below which a head may be a streaming head."""

PROMPT_TOKENS = 8192
"""Length of the generated prompt."""

FAR_SHARE_NOISE = 0.002
"""Largest measured difference between bfloat16 and float32 of a mean share near the threshold (two trained models)."""

FIRST_QUERY = SINK_TOKENS + WINDOWS_TOKENS[-1]
"""First query that counts, past sink and largest window."""

HEAVY_QUERIES_NOISE = 1 / (PROMPT_TOKENS - FIRST_QUERY)
"""The same of the share of heavy queries near the threshold: one query of the prompt."""

SEED = 0

CHUNK_ROWS = 1024
"""Scores of this number of (head, query) pairs are computed at a time: for 8,192 keys, a float32 temporary takes 32
MiB. The measurement must not need more memory than vLLM's profile run, which decides on the size of the KV cache."""


class AttentionTraits(NamedTuple):
    """How a layer attends to keys."""

    scale: float
    window_tokens: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class FarAttention(NamedTuple):
    """Attention to far blocks, over the queries past sink and largest window."""

    mean_share: torch.Tensor  # [len(WINDOWS_TOKENS), num_heads]
    heavy_queries: torch.Tensor  # [len(WINDOWS_TOKENS), num_heads]

    def windows(self) -> dict[int, int]:
        """Return the window of each streaming head. Waits for the device."""
        is_near = self.mean_share < MAX_FAR_SHARE - FAR_SHARE_NOISE
        suffices = is_near & (self.heavy_queries < MAX_HEAVY_QUERIES - HEAVY_QUERIES_NOISE)
        by_head = enumerate(suffices.T.tolist())
        return {head: WINDOWS_TOKENS[of_head.index(True)] for head, of_head in by_head if True in of_head}


def streaming_method(window_tokens: int) -> AShape:
    """Return the method of a streaming head."""
    return AShape(sink_tokens=SINK_TOKENS, local_tokens=window_tokens)


def found_by_default(model: Path, chunk_tokens: int) -> bool:
    """Return whether a server with default settings finds streaming heads."""
    text = text_part(read_config_json(model / "config.json"), str(model))
    return chunk_tokens >= PROMPT_TOKENS and "chunked_attention" not in (layer_kinds(text) or ())


def streaming_prompt(encode: Encode, start: Sequence[int]) -> list[int]:
    """Make the prompt on which heads are measured: Python sources, with lookups and repeated passages."""
    ids = encode(measuring_text())
    if len(ids) < 2 * PROMPT_TOKENS:
        raise ConfigurationError(
            f"streaming_heads: given a tokenizer that makes {len(ids):,} tokens of a text, expected at least "
            f"{2 * PROMPT_TOKENS:,}"
        )
    return insert_threads(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], start, encode, random.Random(SEED))


def attend_and_measure(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traits: AttentionTraits
) -> tuple[torch.Tensor, FarAttention]:
    """Compute causal attention of one prompt in float32, and measure each head's attention to far blocks."""
    num_tokens, num_kv_heads = query.shape[0], key.shape[1]
    if num_tokens <= FIRST_QUERY:
        raise ValueError(f"query: given {num_tokens} tokens, expected more than {FIRST_QUERY}")
    grouped = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv heads, heads per kv head, tokens, dim]
    keys, values = key.transpose(0, 1).float(), value.transpose(0, 1).float()
    out = torch.empty_like(grouped, dtype=torch.float32)
    shape, device = grouped.shape[:2], query.device
    chunk_tokens = max(CHUNK_ROWS // shape[1], 1)
    far_shares = torch.zeros(len(WINDOWS_TOKENS), *shape, device=device)
    heavy_queries = torch.zeros_like(far_shares)
    sinks = None if traits.sinks is None else traits.sinks.float().view(*shape, 1, 1)
    for kv_head in range(num_kv_heads):
        for begin in range(0, num_tokens, chunk_tokens):
            end = min(begin + chunk_tokens, num_tokens)
            part = _attention(
                grouped[kv_head, :, begin:end].float(),
                keys[kv_head, :end],
                begin,
                traits,
                None if sinks is None else sinks[kv_head],
            )
            out[kv_head, :, begin:end] = part @ values[kv_head, :end]
            far = _far_blocks(part, begin)
            far_shares[:, kv_head] += far.sum((2, 3))
            heavy_queries[:, kv_head] += (far.amax(-1) >= HEAVY_SHARE).sum(-1)
    num_queries = num_tokens - FIRST_QUERY
    measured = FarAttention(far_shares.flatten(1) / num_queries, heavy_queries.flatten(1) / num_queries)
    return out.permute(2, 0, 1, 3).flatten(1, 2), measured


def _attention(
    query: torch.Tensor, key: torch.Tensor, begin: int, traits: AttentionTraits, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return [heads, queries, keys] shares of attention of queries from position ``begin`` on."""
    scores = (query * traits.scale) @ key.T
    if traits.softcap:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    later_keys = scores[..., begin:]
    later_keys.masked_fill_(torch.ones_like(later_keys[0], dtype=torch.bool).triu(1), -torch.inf)
    if traits.window_tokens is not None:
        positions = torch.arange(key.shape[0], device=key.device)
        scores.masked_fill_(positions[begin:, None] - positions >= traits.window_tokens, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    with_sink = torch.cat([scores, sinks.expand(-1, query.shape[1], 1)], dim=-1)
    return with_sink.softmax(-1)[..., :-1]


def _far_blocks(shares: torch.Tensor, begin: int) -> torch.Tensor:
    """Return [windows, heads, queries, blocks] shares of attention in far blocks; 0 for other blocks.

    Queries that do not count, because they precede the end of sink and largest window, have zeros only.
    """
    num_queries, num_keys = shares.shape[1:]
    num_blocks = num_keys // BLOCK_TOKENS  # the last keys are within every query's window
    by_block = shares[..., : num_blocks * BLOCK_TOKENS].unflatten(-1, (num_blocks, BLOCK_TOKENS)).sum(-1)
    first_keys = torch.arange(num_blocks, device=shares.device) * BLOCK_TOKENS
    queries = torch.arange(begin, begin + num_queries, device=shares.device)[:, None]
    windows = torch.tensor(WINDOWS_TOKENS, device=shares.device).view(-1, 1, 1, 1)
    is_far = (
        (queries >= FIRST_QUERY) & (first_keys >= SINK_TOKENS) & (first_keys + BLOCK_TOKENS <= queries - (windows - 1))
    )
    return by_block.masked_fill(~is_far, 0.0)
