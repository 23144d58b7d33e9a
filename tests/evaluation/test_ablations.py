# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.ablations` completes on a small capture."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import ablations
from benchmarks.capture import capture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def captured(llama, tmp_path_factory):
    """A capture of a small model whose attention is far from uniform."""
    model = llama(initializer_range=0.12, head_dim=64, num_hidden_layers=1, num_attention_heads=6)
    tokens = torch.randint(97, (420,), generator=torch.Generator().manual_seed(5)).tolist()
    return capture(model, tokens, tmp_path_factory.mktemp("capture"), DEVICE)


@pytest.mark.full
def test_every_variant_is_measured(captured, monkeypatch, tmp_path):
    """The program measures all papers except SharePrefill, which has no clusters here."""
    rows = tmp_path / "rows.json"
    monkeypatch.setattr(ablations, "SEARCH_STEPS", 1)
    app = typer.Typer()
    app.command()(ablations.main)
    options = ["--device", DEVICE, "--chunk", "250", "--json", str(rows)]
    result = CliRunner().invoke(app, [str(captured.folder), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "SharePrefill left out: --clusters does not name a capture" in result.output
    cases = json.loads(rows.read_text())["cases"]
    variants = [v for v in ablations.VARIANTS if v.paper != "SharePrefill"]
    assert len(cases) == len(variants) + sum(v.knob is not None for v in variants)
    for case in cases:
        assert 0 < case["density"] <= 1
        assert 0 <= case["worst"] <= case["worst_thousandth"] <= case["worst_hundredth"] <= case["recall"] + 2e-6
