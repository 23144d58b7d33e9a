# SPDX-License-Identifier: Apache-2.0
"""Recall query by query, and the table of ablations over a capture."""

import dataclasses
import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import ablations
from benchmarks.batches import random_index
from benchmarks.oracle import exact_masses, measure
from vllm_sparse_backend.profiling.capture import capture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_recall_of_every_query(batch):
    """Against attention under the index's mask, written out; and its mean against the oracle's."""
    indices = [random_index(batch, 64, 0.3, stripes=40), random_index(batch, 128, 0.6)]
    rows = batch.rows
    masses = list(exact_masses(batch.q, batch.cache, rows, batch.scale, indices))
    found = [torch.stack(mass.query_recalls) for mass in masses]
    assert [x.shape for x in found] == [(2, 4, rows.query_lens[row]) for row in range(rows.num_rows)]
    for row in range(rows.num_rows):
        keys = batch.cache.gather(rows.block_table[row], rows.seq_lens[row])[0].double()
        q = batch.q[rows.tokens[row] : rows.tokens[row] + rows.query_lens[row]].double()
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(2, 1)) * batch.scale
        seen = torch.ones_like(scores[0], dtype=torch.bool).tril_(rows.context_lens[row])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        for given, index in zip(found[row], indices):
            expected = (weights * index.to_mask(row)).sum(-1)
            torch.testing.assert_close(given.double(), expected, rtol=0, atol=1e-5)
    everything = torch.cat(found, -1)
    for given, index in zip(everything, indices):
        recall = measure(batch.q, batch.cache, index, batch.scale).recall
        torch.testing.assert_close(given.double().mean(-1), recall, rtol=0, atol=1e-5)
    assert float(everything.min()) < 0.5 < float(everything.max())


@pytest.fixture(scope="module")
def captured(llama, tmp_path_factory):
    """Two captures by one small model whose attention is far from uniform."""
    model = llama(initializer_range=0.12, head_dim=64, num_hidden_layers=1, num_attention_heads=6)
    tokens = torch.randint(97, (2, 420), generator=torch.Generator().manual_seed(5)).tolist()
    return [capture(model, ids, tmp_path_factory.mktemp("capture"), DEVICE) for ids in tokens]


SMALL = {
    "a_shape": {"sink_tokens": 64, "local_tokens": 64},
    "vertical_slash": {"vertical_tokens": 40, "slash_tokens": 5, "forced_verticals": 1, "forced_slashes": 1},
    "block_sparse": {"top_blocks": 1},
    "anchor_attention": {"theta": 0.5},
    "sparge_attn": {"kept_mass": 0.5, "min_similarity": 0.02},
    "sale": {"tau": 0.1},
    "flex_vertical_slash": {"gamma": 0.5},
    "share_prefill": {"gamma": 0.5},
}
"""Parameters that leave something out of a short prompt."""


def small(variant: ablations.Variant) -> ablations.Variant:
    ablated = {name: value for name, value in variant.params.items() if ablations.LINES.get(name) != value}
    if "skip_margin" in ablated:
        ablated["skip_margin"] = -0.01  # of 128 queries of a small random model one looks anywhere
    return dataclasses.replace(variant, params=SMALL[variant.method] | ablated)


@pytest.mark.full
def test_what_is_left_out_shows(captured, monkeypatch, tmp_path):
    """All papers but SharePrefill, which has no clusters here, by the program."""
    rows = tmp_path / "rows.json"
    monkeypatch.setattr(ablations, "SEARCH_STEPS", 1)
    monkeypatch.setattr(ablations, "VARIANTS", tuple(small(v) for v in ablations.VARIANTS))
    app = typer.Typer()
    app.command()(ablations.main)
    options = ["--device", DEVICE, "--chunk", "250", "--json", str(rows)]
    result = CliRunner().invoke(app, [str(captured[0].folder), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "SharePrefill left out: --clusters names no capture" in result.output
    found = json.loads(rows.read_text())["cases"]
    variants = [v for v in ablations.VARIANTS if v.paper != "SharePrefill"]
    assert len(found) == len(variants) + sum(v.knob is not None for v in variants)
    for case in found:
        assert 0 < case["density"] <= 1
        assert 0 <= case["worst"] <= case["worst_thousandth"] <= case["worst_hundredth"] <= case["recall"] + 2e-6
    cases = {(case["paper"], case["what"]): case for case in found}

    def of(paper: str, *variants: str) -> list[float]:
        return [cases[paper, what]["density"] for what in ("complete", *variants)]

    assert 1 > of("StreamingLLM")[0] > of("StreamingLLM", "window alone")[1]
    lines, verticals, slashes = of("MInference", "only vertical", "only slash")
    assert 1 > lines > max(verticals, slashes)
    groups, alone, no_anchor = of("AnchorAttention", "without groups (step 1)", "without anchor")
    assert groups == no_anchor == 1 > alone  # a group's window holds this prompt
    judged, unjudged = of("SpargeAttn", "without self-similarity judge")
    assert 1 > judged > unjudged
