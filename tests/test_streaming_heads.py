# SPDX-License-Identifier: Apache-2.0
"""The measurement of streaming heads against a float64 reference, and the rule on heads whose attention is known."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.streaming_heads import (
    BLOCK_TOKENS,
    HEAVY_SHARE,
    PROMPT_TOKENS,
    SINK_TOKENS,
    WINDOWS_TOKENS,
    AttentionTraits,
    attend_and_measure,
    found_by_default,
    streaming_prompt,
)

PAST = SINK_TOKENS + WINDOWS_TOKENS[-1]
HEAD_DIM = 32


def random_layer(num_tokens: int, num_heads: int, num_kv_heads: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(num_tokens, heads, HEAD_DIM, generator=generator)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traits: AttentionTraits
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output and, by window and head, mean share in far blocks and share of heavy queries, pair by pair in
    float64."""
    num_tokens, group = query.shape[0], query.shape[1] // key.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * traits.scale
    if traits.softcap:
        scores = traits.softcap * (scores / traits.softcap).tanh()
    queries, positions = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    is_hidden = positions > queries
    if traits.window_tokens is not None:
        is_hidden |= positions <= queries - traits.window_tokens
    mass = scores.masked_fill(is_hidden, -torch.inf).exp()
    total = mass.sum(-1, keepdim=True)
    if traits.sinks is not None:
        total = total + traits.sinks.double()[:, None, None].exp()
    shares = mass / total
    blocks = shares[..., : num_tokens // BLOCK_TOKENS * BLOCK_TOKENS].unflatten(-1, (-1, BLOCK_TOKENS)).sum(-1)
    mean_shares, heavy_queries = [], []
    for window_tokens in WINDOWS_TOKENS:
        past = blocks[:, PAST:].clone()
        for i in range(num_tokens - PAST):
            for block in range(blocks.shape[-1]):
                is_sink = block * BLOCK_TOKENS < SINK_TOKENS
                if is_sink or (block + 1) * BLOCK_TOKENS - 1 > PAST + i - window_tokens:
                    past[:, i, block] = 0
        mean_shares.append(past.sum(-1).mean(-1))
        heavy_queries.append((past.amax(-1) >= HEAVY_SHARE).double().mean(-1))
    out = torch.einsum("hqk,khd->qhd", shares, values)
    return out, torch.stack(mean_shares), torch.stack(heavy_queries)


@pytest.mark.parametrize(
    ("heads", "num_tokens", "traits"),
    [
        ((4, 2), PAST + 1, AttentionTraits(0.3)),
        ((3, 3), PAST + 77, AttentionTraits(1.0)),
        ((6, 1), PAST + 300, AttentionTraits(0.5, softcap=2.0)),
        ((4, 2), PAST + 63, AttentionTraits(0.7, sinks=torch.tensor([-9.0, 0.0, 3.0, 6.0]))),
        ((2, 2), PAST + 63, AttentionTraits(0.7, window_tokens=63)),
    ],
    ids=["one query", "a head per kv head", "softcap", "sinks", "window"],
)
def test_output_and_shares_are_those_of_the_reference(
    heads: tuple[int, int], num_tokens: int, traits: AttentionTraits
) -> None:
    layer = random_layer(num_tokens, *heads)
    out, measured = attend_and_measure(*layer, traits)
    expected_out, mean_share, heavy_queries = reference(*layer, traits)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=1e-5)
    torch.testing.assert_close(measured.mean_share.double(), mean_share, rtol=0, atol=1e-5)
    torch.testing.assert_close(measured.heavy_queries.double(), heavy_queries, rtol=0, atol=1e-6)


def test_a_prompt_without_far_keys_is_an_error() -> None:
    with pytest.raises(ValueError, match=rf"query: given {PAST} tokens, expected more than {PAST}"):
        attend_and_measure(*random_layer(PAST, 1, 1), AttentionTraits(1.0))


def test_heads_are_told_apart_by_their_mean_and_by_single_lookups() -> None:
    """Five heads: uniform over all keys, on the nearest keys, on the first keys, as the second but for a lookup, and on
    the keys 600 tokens before.

    Keys hold what a head looks for: dimension 0 is large for the first keys, dimension 1 for one key, dimensions 2 and
    3 give a position on a circle.
    """
    num_tokens, looked_up = PAST + 2000, 300
    angles = torch.arange(num_tokens) * (2 * torch.pi / (4 * num_tokens))
    key = torch.zeros(num_tokens, 1, 4)
    key[:SINK_TOKENS, 0, 0] = 1
    key[looked_up, 0, 1] = 1
    key[:, 0, 2], key[:, 0, 3] = angles.cos(), angles.sin()
    query = torch.zeros(num_tokens, 5, 4)
    nearest = torch.stack([angles.cos(), angles.sin()], -1) * 1e5
    query[:, 1, 2:] = query[:, 3, 2:] = nearest
    query[600:, 4, 2:] = nearest[:-600]
    query[:, 2, 0] = 30
    lookups = slice(PAST + 500, PAST + 502)  # 1 in 1000 queries, above the threshold of 1 in 2000
    query[lookups, 3] = torch.tensor([0.0, 30.0, 0.0, 0.0])
    _, measured = attend_and_measure(query, key, torch.randn(num_tokens, 1, 4), AttentionTraits(1.0))
    assert measured.windows() == {1: 256, 2: 256, 4: 1024}
    assert measured.mean_share[-1, 0] > 0.2
    assert measured.mean_share[-1, 3] < 0.01
    assert float(measured.heavy_queries[-1, 3]) == pytest.approx(1e-3)


class TestPrompt:
    def test_it_has_its_length_and_lookups_and_is_always_the_same(self) -> None:
        prompt = streaming_prompt(lambda text: list(text.encode()), [300])
        assert len(prompt) == PROMPT_TOKENS
        assert prompt[0] == 300
        text = bytes(prompt[1:]).decode(errors="replace")
        answers = re.findall(r"# Question: what is the magic number of ([\w ]+)\? Answer: (\d{7})\.", text)
        assert answers
        for name, value in answers:
            assert f"# The magic number of {name} is {value}." in text
        # Otherwise, a release would change which heads of a model stream.
        assert hashlib.sha256(str(prompt).encode()).hexdigest()[:16] == "c80df0d24099a8a8"

    def test_a_tokenizer_of_many_tokens_is_an_error_of_the_setting(self) -> None:
        """The options of the command that also makes such prompts are no remedy for a server."""
        with pytest.raises(ConfigurationError, match="expected at least 18,408 with this tokenizer"):
            streaming_prompt(lambda text: [0] * 20 * len(text), [])


@pytest.mark.parametrize(
    ("config", "chunk_tokens", "expected"),
    [
        ({}, 8192, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 16_384, True),
        ({}, 4096, False),
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, 8192, True),
        ({"layer_types": ["chunked_attention", "full_attention"]}, 8192, False),
    ],
)
def test_whether_a_server_finds_them_by_default(
    tmp_path: Path, config: dict[str, Any], chunk_tokens: int, expected: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **config}))
    assert found_by_default(tmp_path, chunk_tokens) == expected
