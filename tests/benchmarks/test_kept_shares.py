# SPDX-License-Identifier: Apache-2.0
"""Kept shares of single queries: attention whose shares are known, a selected index, and the program on a model."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import kept_shares
from benchmarks.kept_shares import BELOW, measure, settings, statistics
from tests.helpers.batches import random_batch
from tests.helpers.tiny_models import make_model
from vllm_sparse_backend.calibration.capture import Capture, LayerTensors
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import select_top_p

CONTEXT, NEW = 512, 300


def captured(folder: Path, q: torch.Tensor, k: torch.Tensor, layers: int = 1) -> Capture:
    shape = ModelShape("Tiny", layers, q.shape[1], k.shape[1], q.shape[2])
    made = Capture(folder, "tiny", shape, len(q), "", {}, {})
    for layer in range(layers):
        made.add(layer, LayerTensors(q, k, torch.zeros_like(k)), q.shape[2] ** -0.5)
    return made


@pytest.mark.parametrize("floor", [0.0, 0.53])
def test_uniform_attention(floor: float, tmp_path: Path) -> None:
    """With equal scores, shares follow from the numbers of kept blocks and keys.

    A query keeps the blocks from 128 keys before its tile, and those that the tile's last query adds to reach the
    floor, which are the first blocks of the sequence.
    """
    method = TopP(kept_mass=1e-6, sink_tokens=0, local_tokens=128, peak_share=1.0, channels="all", floor=floor)
    num_tokens, layers = 1000, 2
    capture = captured(tmp_path, torch.zeros(num_tokens, 2, 64), torch.ones(num_tokens, 1, 64), layers)
    (shares,) = measure(capture, [method], num_tokens, 512, 256, "cpu")
    estimated, true = [], []
    for tile in range(256, num_tokens, 128):
        first_local, end = (tile - 128) // 32, min(tile + 128, num_tokens)
        num_blocks = [position // 32 + 1 for position in range(tile, end)]
        added = max(0, *(math.ceil(floor * n - (n - first_local)) for n in num_blocks))
        estimated += 2 * [(n - first_local + added) / n for n in num_blocks]
        true += 2 * [(x + 1 - 32 * (first_local - added)) / (x + 1) for x in range(tile, end)]
    for values, expected in ((shares.estimated[0], estimated), (shares.true[0], true)):
        assert values.tolist() == pytest.approx(layers * expected, abs=1e-6)
    assert (min(estimated) >= 0.53) is (floor > 0)


@pytest.mark.parametrize(
    "method",
    [
        TopP(),
        TopP(queries="all"),
        TopP(kept_mass=0.3, queries="all", floor=0.7),
        TopP(channels="low_rank", queries="all", floor=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_tokens", [4096, 640])
def test_true_shares_are_the_softmax_over_the_selected_index(method: TopP, chunk_tokens: int, tmp_path: Path) -> None:
    batch = random_batch([(CONTEXT, NEW)], 4, 2, 128, 128, torch.float32, seed=3)
    new_queries = 4 * batch.q
    keys, _ = batch.cache.gather(batch.rows.block_table[0], CONTEXT + NEW)
    capture = captured(tmp_path, torch.cat([torch.zeros(CONTEXT, 4, 128), new_queries]), keys)
    (shares,) = measure(capture, [method], CONTEXT + NEW, chunk_tokens, CONTEXT, "cpu")
    expected = []
    borders = [CONTEXT, *range(chunk_tokens, CONTEXT + NEW, chunk_tokens), CONTEXT + NEW]
    for begin, end in pairwise(borders):
        part = random_batch([(begin, end - begin)], 4, 2, 128, 128, torch.float32)
        for i_page, page in enumerate(part.rows.block_table[0, : -(-end // 128)].tolist()):
            in_page = keys[128 * i_page : min(128 * i_page + 128, end)]
            part.cache.keys[page, : len(in_page)] = in_page
        q = new_queries[begin - CONTEXT : end - CONTEXT]
        index = SparseIndex.allocate(part.rows, 4, 32)
        select_top_p(method, q, part.cache, index, torch.arange(4, dtype=torch.int32), part.scale)
        for i_tile, tile in enumerate(part.rows.tile_list):
            for head in range(4):
                queries = q[tile.token : tile.token + tile.length_tokens, head].double()
                scores = queries @ keys[: tile.last_position + 1, head // 2].double().T * part.scale
                o_m = torch.arange(tile.position, tile.last_position + 1)[:, None]
                masses = scores.masked_fill(torch.arange(scores.shape[1]) > o_m, -torch.inf).softmax(1)
                kept = torch.zeros(scores.shape[1] + 32, dtype=torch.bool)
                for block in index.blocks_of(head, i_tile).tolist():
                    kept[32 * block : 32 * block + 32] = True
                expected.append(masses[:, kept[: scores.shape[1]]].sum(1))
    (true,) = shares.true
    assert torch.allclose(true.double(), torch.cat(expected), atol=1e-5)
    assert float(true.min()) < 0.95
    (estimated,) = shares.estimated
    assert method.floor - 1e-6 <= float(estimated.min()) < 0.95


def test_statistics() -> None:
    shares = torch.arange(2000).flip(0) / 2000
    expected = {"least": 0.0, "0.1th percentile": 1 / 2000, "1st percentile": 19 / 2000, "median": 999 / 2000}
    assert statistics(shares) == pytest.approx(expected | {BELOW: 0.5})
    assert statistics(torch.tensor([0.5 - 1e-7, 0.6]))[BELOW] == 0
    assert statistics(torch.tensor([0.499, 0.6]))[BELOW] == 0.5


def test_settings() -> None:
    assert settings((), 64) == [TopP(), TopP(queries="all", floor=0.5)]  # low_rank keeps all channels of head dim 64
    assert settings((), 128)[2:] == [TopP(channels="low_rank"), TopP(queries="all", channels="low_rank", floor=0.5)]
    assert settings(["default"], 64) == [TopP()]
    with pytest.raises(BenchError, match="given 'sale', expected top_p or default"):
        settings(["sale"], 64)


def test_the_program_adds_rows_to_a_results_file(tmp_path: Path) -> None:
    model, out, text = make_model(tmp_path / "tiny"), tmp_path / "floor.json", tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(2000))))
    app = typer.Typer()
    app.command()(kept_shares.main)
    options = ["--tokens", "400,600", "--min-tokens", "128", "--text", text, "--device", "cpu", "--out", out]
    result = CliRunner().invoke(app, list(map(str, [model, *options])), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert len(rows) == 2 * 2 * 2 * 5  # lengths, settings, kinds of share, statistics
    name = 'top_p queries="all" floor=0.5, tiny, 600 tokens, float32: estimated kept share of a query, least'
    assert rows[name]["bar"] == 0.5 <= rows[name]["value"] <= 1
    assert {row["device"] for row in rows.values()} == {"CPU"}
    assert all(row["bar"] is None for name, row in rows.items() if "true" in name or "floor" not in name)
    refused = CliRunner().invoke(app, [str(model), "--tokens", "100"])
    assert refused.exit_code == 1
    assert "--tokens" in refused.output
