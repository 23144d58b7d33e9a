# SPDX-License-Identifier: Apache-2.0
"""The stated properties of structured data, against exact attention."""

import pytest
import torch

from tests.helpers.lined import DEVICE
from tests.helpers.structured import Structured, paged_batch, structured


def probabilities(data, head):
    """Return a head's probabilities: [query_len, seq_len] float64."""
    kv_head = head // (data.q.shape[1] // data.k.shape[1])
    scores = data.q[:, head].double() @ data.k[:, kv_head].double().T * data.scale
    causal = torch.ones_like(scores, dtype=torch.bool).tril_(data.context_len)
    return scores.masked_fill_(~causal, -torch.inf).softmax(-1)


def oracle_density(data: Structured, mass: float = 0.95, num_queries: int = 32) -> torch.Tensor:
    """Return the smallest share of causal keys that keeps ``mass`` of a query's exact softmax, averaged over queries.

    The result is [num_heads] float64 on the CPU, from ``num_queries`` random queries of the row, the same for all
    heads. It is exact for each query, computed in float32 a head at a time.
    """
    query_len, num_heads, _ = data.q.shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randperm(query_len, generator=generator)[:num_queries].to(data.q.device)
    positions = tokens + data.context_len
    hidden = torch.arange(len(data.k), device=data.k.device) > positions[:, None]
    group = num_heads // data.k.shape[1]
    shares = []
    for head in range(num_heads):
        keys = data.k[:, head // group].float()
        scores = (data.q[tokens, head].float() @ keys.T * data.scale).masked_fill_(hidden, -torch.inf)
        kept = scores.softmax(-1).sort(descending=True).values.double().cumsum(-1)
        needed = (kept < mass).sum(-1) + 1
        shares.append((needed / (positions + 1)).mean())
    return torch.stack(shares).double().cpu()


@pytest.mark.full
def test_densities_spread_as_on_a_trained_model():
    density = oracle_density(structured(8192, 24576, 16, 4, 128, torch.bfloat16, DEVICE))
    assert 0.02 < float(density.mean()) < 0.1
    assert int((density < 0.08).sum()) >= 14
    assert int((density < 0.01).sum()) >= 4
    assert 0.4 < float(density.max()) < 0.65
    assert 0.0003 < float(density.min()) < 0.006


@pytest.mark.parametrize(("page_size", "layout"), [(16, "NHD"), (128, "HND")])
def test_the_paged_batch_holds_the_same(page_size, layout):
    data = structured(100, 333, 4, 2, 64, torch.float16, DEVICE)
    batch = paged_batch(data, page_size, layout)
    assert (batch.rows.query_lens, batch.rows.context_lens, batch.scale) == ((100,), (333,), 64**-0.5)
    keys, values = batch.cache.gather(batch.rows.block_table[0], 433)
    assert torch.equal(keys, data.k)
    assert torch.equal(values, data.v)
    assert batch.cache.keys.untyped_storage().data_ptr() == batch.cache.values.untyped_storage().data_ptr()
    pages = batch.rows.block_table[0, : -(-433 // page_size)]
    assert page_size == 128 or bool((pages.diff() < 0).any())
