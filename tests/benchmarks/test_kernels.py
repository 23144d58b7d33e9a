# SPDX-License-Identifier: Apache-2.0
"""`bench crossover` and the lab's timings on a stand-in for the card: checks, counts and refusals."""

import json
import math
from collections.abc import Generator

import pytest
import torch

from benchmarks import methods
from benchmarks.figures import Report
from benchmarks.method_specs import MethodSpec, methods_named
from tests.benchmarks.conftest import HEADS, CpuCard
from tests.helpers.lab_commands import LAB, run
from tests.helpers.structured import structured_clusters, structured_prompts
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.evaluation import crossover_bench
from vllm_sparse_backend.evaluation.attention_prompts import planted_prompt
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.attention.reference import attend as reference
from vllm_sparse_kernels.methods import METHODS

A_SHAPE = '{"method": "a_shape"}'
SHORT = ("--longest", 2560, "--chunk", 1024)


def broken(q, cache, index, out, scale, lse=None, options=None, sinks=None) -> None:
    """An engine with a wrong value in each tile."""
    reference(q, cache, index, out, scale, options=options)
    out[::128] *= 1.05


def test_no_speed_of_what_is_wrong(card, tmp_path):
    card.engines["portable"] = AttendEngine("portable", lambda spec: None, broken)
    path, results, table = (tmp_path / f"{name}.json" for name in ("all", "results", "table"))
    commands = {
        "attend": ("--contexts", 0, "--chunk", 130, "--blocks", 64, "--densities", 1, "--stripes", ""),
        "methods": ("--method", "a_shape", "--contexts", 100, "--chunk", 130),
        "crossover": ("--settings", A_SHAPE, *SHORT, "--out", table),
    }
    for command, args in commands.items():
        result = run(command, *args, "--json", path, *(("--results", results) if command in LAB else ()))
        assert result.exit_code == 0, result.output
        written = json.loads(path.read_text())
        assert not results.exists()
        cases = [case for case in written["cases"] if "entry" not in case]
        assert len(cases) == (2 if command == "crossover" else 1)
        for case in cases:
            assert ("in a trial is off by" if command == "crossover" else "times eager's") in case["problem"]
            assert not {"ms", "times_faster", "efficiency", "whole_ms"} & set(case)
        assert "faster 4" not in result.output
    (entry,) = json.loads(table.read_text())["entries"]
    assert entry["min_tokens"] is entry["min_query_tokens"] is None
    assert card.ran == []


@pytest.mark.full
def test_methods_on_structured_data():
    """Times are summed over layers; density and error are those of the selection."""
    prompts = structured_prompts(HEADS, 400, 2, torch.device("cpu"))
    spec, report = MethodSpec("sale"), Report("methods", "a CPU", command="test")
    plan = spec.plan(HEADS.model(2), structured_clusters(HEADS, 2))
    card = CpuCard(lambda span: {"dense": 8.0, "select": 1.0, "attend": 3.0}[span])
    inputs = methods.Inputs("structured", prompts)
    (row,) = methods.run_methods(card, inputs, [(spec, plan)], [130], 200, ["portable"], report)
    assert "problem" not in row, row
    assert (row["dense_ms"], row["select_ms"], row["attend_ms"], row["whole_ms"]) == (8, 1, 3, 4)
    assert (row["select_share"], row["attend_share"], row["whole_share"]) == (1 / 8, 3 / 8, 1 / 2)
    assert 0 < row["density"] <= 1
    assert 0 <= row["output_error"] < 1
    assert row["index_mib"] > 0
    assert {name.rpartition(": ")[2] for name in report.figures} >= {"density", "output error"}


def test_a_profile_is_its_kinds_of_methods(tmp_path):
    profile = tmp_path / "p.yaml"
    profile.write_text(
        "format: 1\nmodel: any\ndefault: {method: sale}\n"
        "layers:\n  0:\n    default: {method: a_shape}\n    heads:\n      1-2: {method: sale, tau: 0.1}\n"
    )
    settings = [{"profile": str(profile)}, {"method": "sale", "params": {"tau": 0.03}}]
    methods = crossover_bench.methods_of_settings(settings, HEADS.model(3))
    assert [crossover_bench.method_label(method) for method in methods] == ["sale", "a_shape", "sale tau=0.03"]


def test_unless_told_all_methods_and_what_a_server_runs_unless_told():
    """An operator's crossover table must contain the methods that `auto` looks up on a server without configuration."""
    every = crossover_bench.methods_of_settings([], HEADS.model(3))
    assert {crossover_bench.method_label(method) for method in every} >= {name for name in METHODS if name != "dense"}
    assert make_method("default", {}) in every
    assert [str(method) for method in methods_named([])] == [crossover_bench.method_label(method) for method in every]


def test_planted_data_have_the_density_that_they_state():
    """Nearly all of the mass is on a tenth of the keys, in whole runs."""
    batch = planted_prompt(HEADS, 8192, torch.device("cpu")).chunk(8000, 192)
    keys, _ = batch.cache.gather(batch.rows.block_table[0], 8192)
    keys = keys.float().repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", batch.q.float(), keys) * batch.scale
    by_run = scores[:, 0].softmax(-1)[:, :8000].unflatten(1, (-1, 64)).sum(-1).sort(descending=True).values
    needed = (by_run.cumsum(-1) < 0.95 * by_run.sum(-1, keepdim=True)).sum(-1) / by_run.shape[1]
    assert bool((needed < 0.15).all())
    assert bool((needed > 0.03).all())


@pytest.mark.parametrize(
    ("faster", "least", "measured"),
    [
        ({1: 0.5, 2: 0.9, 4: 1.1, 8: 2.0}, 4, [8, 4, 2]),
        ({1: 1.5, 2: 1.5, 4: 1.5, 8: 1.5}, 1, [8, 4, 2, 1]),
        ({1: 2.0, 2: 1.02, 4: 1.04, 8: 1.03}, 4, [8, 4, 2]),  # a faster rung below a slower rung does not count
        ({1: 2.0, 2: 2.0, 4: 2.0, 8: 1.0}, None, [8]),
        ({1: 2.0, 2: 2.0, 4: None, 8: 2.0}, 8, [8, 4]),  # a wrong result never counts as faster
        ({1: 2.0, 2: 2.0, 4: math.nan, 8: 2.0}, 8, [8, 4]),
    ],
)
def test_from_which_rung_on_sparse_pays(faster, least, measured):
    def measure(seq_len: int, query_len: int) -> dict:
        assert query_len == seq_len // 2
        return {"n": seq_len} | ({} if faster[seq_len] is None else {"times_faster": faster[seq_len]})

    def found() -> Generator[dict, None, None]:
        ends.append((yield from crossover_bench.climb_down({n: (n, n // 2) for n in faster}, measure)))

    ends: list[int | None] = []
    assert [row["n"] for row in found()] == measured
    assert ends == [least]


@pytest.mark.full
def test_the_table_is_what_servers_read(card, tmp_path, monkeypatch):
    """A second run of the same measurement replaces its entries and keeps all others."""
    small = {"LAYERS": 1, "SHORTEST_TOKENS": 128, "CHECKED_TOKENS": (64, 64), "NEW_TOKENS": (20, 100)}
    for name, value in small.items():
        monkeypatch.setattr(crossover_bench, name, value)
    table = tmp_path / "table.json"
    narrow = '{"method": "a_shape", "params": {"sink_tokens": 64}}'
    for chosen in (A_SHAPE, A_SHAPE, narrow):
        result = run("crossover", "--settings", chosen, "--longest", 256, "--out", table)
        assert result.exit_code == 0, result.output
    written = json.loads(table.read_text())
    assert written["format"] == 1
    assert [entry["params"] for entry in written["entries"]] == [{}, {"sink_tokens": 64}]
    entry = written["entries"][0]
    assert set(entry) == {
        "device", "engine", "method", "params", "num_heads", "num_kv_heads", "head_dim", "min_tokens",
        "min_query_tokens", "chunk_tokens", "vllm", "triton", "date", "command",
    }  # fmt: skip
    assert (entry["device"], entry["engine"], entry["min_tokens"]) == ("a CPU", "portable", 128)
    assert entry["min_query_tokens"] == 20  # 8 ms over 2 ms everywhere
    table.write_text("{}")
    result = run("crossover", "--settings", A_SHAPE, "--out", table)
    assert result.exit_code == 1
    assert f"{table}: format: missing" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize("command", ["attend", "methods", "crossover"])
def test_without_a_card_one_line_says_so(command):
    result = run(command)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "needs a CUDA device, but torch finds none" in result.stderr
