# SPDX-License-Identifier: Apache-2.0
"""`bench crossover`, and the lab's timings, on a stand-in for the card: what is checked, counted and refused."""

import json
import math
from collections.abc import Generator

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks import attend, methods
from benchmarks.batches import in_fp8, random_batch, random_index
from tests.bench.conftest import HEADS, CpuCard
from tests.helpers.lined import DEVICE
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.measure import crossover, data
from vllm_sparse_backend.measure.asked import Asked, methods_asked
from vllm_sparse_backend.measure.check import Check, check_attention
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.structured import structured
from vllm_sparse_backend.profiling.capture import Capture
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_kernels.attend import PORTABLE, Engine
from vllm_sparse_kernels.attend.options import AttendOptions
from vllm_sparse_kernels.attend.reference import attend as reference
from vllm_sparse_kernels.methods import METHODS

LAB = {"attend": attend.main, "methods": methods.main}


def run(command: str, *args: object):
    """`bench crossover`, or a program of the lab."""
    given, to_run = list(map(str, args)), app
    if command in LAB:
        to_run = typer.Typer()
        to_run.command()(LAB[command])
    else:
        given = ["bench", command, *given]
    return CliRunner().invoke(to_run, given, catch_exceptions=False)


def broken(q, cache, index, out, scale, lse=None, options=None) -> None:
    """An engine that is wrong in one place of every tile."""
    reference(q, cache, index, out, scale, options=options)
    out[::128] *= 1.05


def test_attend_writes_what_it_measured(card, tmp_path):
    """Each case's efficiency is FlashAttention's time × density ÷ own; all of it is in the JSON."""
    files = {"--json": tmp_path / "all.json", "--results": tmp_path / "results.json"}
    sizes = ("--contexts", "90,60", "--chunk", 80, "--blocks", "64,32", "--densities", "1", "--stripes", "20")
    result = run("attend", *sizes, *(x for pair in files.items() for x in pair))
    assert result.exit_code == 0, result.output
    written = json.loads(files["--json"].read_text())
    assert written["device"] == "a CPU"
    assert {"torch", "triton", "vllm", "vllm-sparse-backend"} <= set(written["versions"])
    cases = written["cases"]
    assert len(cases) == 2 * (2 + 1)
    for case in cases:
        assert case["times_faster"] == pytest.approx(8 / 2)
        assert case["efficiency"] == pytest.approx(4 * case["density"])
        assert 0 < case["error_ratio"] <= 2
    by_name = {row["name"]: row for row in json.loads(files["--results"].read_text())}
    assert by_name["attend, chunk after 90, blocks of 32, density 1: efficiency"]["value"] == 4
    assert {"attend, stripes 20: efficiency", "attend, chunk after 60, stripes 20: efficiency"} <= set(by_name)
    assert "efficiency 4" in result.output


def test_no_speed_of_what_is_wrong(card, tmp_path):
    card.engines["portable"] = Engine("portable", lambda spec: None, broken)
    path, table = tmp_path / "all.json", tmp_path / "table.json"
    commands = {
        "attend": ("--contexts", 0, "--chunk", 130, "--blocks", 64, "--densities", 1, "--stripes", ""),
        "methods": ("--method", "a_shape", "--contexts", 100, "--chunk", 130),
        "crossover": ("--method", "a_shape", "--longest", 192, "--shortest", 64, "--new", 20, "--table", table),
    }
    for command, args in commands.items():
        result = run(command, *args, "--json", path)
        assert result.exit_code == 0, result.output
        written = json.loads(path.read_text())
        assert written["figures"] == []
        cases = [case for case in written["cases"] if "entry" not in case]
        assert len(cases) == (2 if command == "crossover" else 1)
        for case in cases:
            assert "times eager's" in case["problem"]
            assert not {"ms", "times_faster", "efficiency", "whole_ms"} & set(case)
        assert "faster 4" not in result.output
    (entry,) = json.loads(table.read_text())["entries"]
    assert entry["min_tokens"] is entry["min_query_tokens"] is None
    assert card.ran == []


def test_the_check_sees_nan_and_rounding():
    batch = random_batch([(70, 200)], 4, 2, 64, 64, torch.float16, DEVICE)
    index = random_index(batch, 64, 0.5)
    out = batch.empty_out()
    assert not check_attention(batch, index, out).passed
    PORTABLE.attend(batch.q, batch.cache, index, out, batch.scale)
    right = check_attention(batch, index, out)
    assert right.passed
    assert 0 < right.error < 0.01
    assert not Check(math.nan, 1e-3).passed


@pytest.mark.parametrize("drops", [False, True])
def test_the_check_tells_skipped_products_from_dropped_steps(drops):
    batch = random_batch([(1000, 1)], 4, 2, 64, 64, torch.float16, DEVICE)
    index, out, margins = random_index(batch, 64, 0.5), batch.empty_out(), [-0.5] * 4
    ways = ([], margins) if drops else (margins, [])
    options = AttendOptions.of(ways[0], [False] * 4, batch.q.device, ways[1])
    PORTABLE.attend(batch.q, batch.cache, index, out, batch.scale, options=options)
    assert check_attention(batch, index, out, margin=-0.5, drops=drops).passed
    assert not check_attention(batch, index, out, margin=-0.5, drops=not drops).passed


@pytest.fixture(scope="module")
def prompts():
    return data.structured_prompts(HEADS, 400, 2, torch.device("cpu"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["sale", "share_prefill"])
def test_methods_on_structured_data(name, prompts):
    """Times are sums over layers, density and error those of the selection."""
    asked, report = Asked(name), Report("methods", "a CPU", command="test")
    plan = asked.plan(HEADS.model(2), data.structured_clusters(HEADS, 2))
    card = CpuCard(lambda span: {"dense": 8.0, "select": 1.0, "attend": 3.0}[span])
    rows = list(methods.run_methods(card, prompts, "structured", [(asked, plan)], [130], 200, ["portable"], report))
    (row,) = rows
    assert "problem" not in row, row
    assert (row["dense_ms"], row["select_ms"], row["attend_ms"], row["whole_ms"]) == (8, 1, 3, 4)
    assert (row["select_share"], row["attend_share"], row["whole_share"]) == (1 / 8, 3 / 8, 1 / 2)
    assert 0 < row["density"] <= 1
    assert 0 <= row["output_error"] < 1
    assert row["index_mib"] > 0
    assert set(report.figures) == {
        f"selection, {name}, chunk after 130: share of FlashAttention-3",
        *(f"whole method, {name}, structured, after 130: {x}" for x in ("times faster", "density", "output error")),
    }


@pytest.mark.full
def test_what_fp8_costs_a_method_stands_beside_what_it_costs_dense(prompts):
    """The stand-in for the card rounds nothing but what it is given: a method that keeps all is off as dense is."""
    asked, report = Asked("dense"), Report("methods", "a CPU", command="test")
    plan = asked.plan(HEADS.model(2))
    rounded = [data.Prompt(in_fp8(prompt.whole)) for prompt in prompts]
    (row,) = methods.run_methods(
        CpuCard(), rounded, "in fp8", [(asked, plan)], [100], 200, ["portable"], report, unrounded=prompts
    )
    assert "problem" not in row, row
    assert row["fp8_ratio"] == pytest.approx(1, rel=0.02)
    assert 0.005 < row["stock_error"] == pytest.approx(row["output_error"], rel=0.02)
    assert "whole method, dense, in fp8, after 100: error by fp8 over dense's" in report.figures


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("sale", "sale"),
        ("minference", "vertical_slash"),
        ("anchor_attention:theta=9", "anchor_attention theta=9"),
        (
            "vertical_slash:vertical_tokens=512,slash_tokens=2048",
            "vertical_slash vertical_tokens=512 slash_tokens=2048",
        ),
        ("anchor_attention:theta=12.0", "anchor_attention"),
    ],
)
def test_methods_as_the_command_line_writes_them(given, shown):
    assert str(Asked.parse(given)) == shown


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("sales", "given 'sales', expected one of"),
        ("sale:tau", "expected NAME or NAME:FIELD=NUMBER"),
        ("sale:rho=1", "rho: unknown parameter of sale"),
        ("sale:tau=-1", "tau"),
    ],
)
def test_slips_are_named(given, says):
    with pytest.raises(BenchError, match=says):
        Asked.parse(given)


def test_a_profile_is_its_kinds_of_methods(tmp_path):
    profile = tmp_path / "p.yaml"
    profile.write_text(
        "format: 1\nmodel: any\ndefault: {method: sale}\n"
        "layers:\n  0:\n    default: {method: a_shape}\n    heads:\n      1-2: {method: sale, tau: 0.1}\n"
    )
    asked = methods_asked([], [str(profile)], HEADS.model(3))
    assert [str(one) for one in asked] == ["sale", "a_shape"]
    assert [str(one) for one in methods_asked(["dense"], [], HEADS.model(3))] == ["dense"]


def test_unless_told_all_methods_and_what_a_server_runs_unless_told():
    """An operator's table of crossovers is to hold what `auto` looks for on a server without configuration."""
    every = methods_asked([], [], HEADS.model(3))
    assert {str(one) for one in every if not one.params} == {name for name in METHODS if name != "dense"}
    assert [make_method(one.method, dict(one.params)) for one in every if one.params] == [make_method("default", {})]


def test_the_ladder():
    assert crossover.ladder(2048, 131072) == [
        2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("faster", "least", "measured"),
    [
        ({1: 0.5, 2: 0.9, 4: 1.1, 8: 2.0}, 4, [8, 4, 2]),
        ({1: 1.5, 2: 1.5, 4: 1.5, 8: 1.5}, 1, [8, 4, 2, 1]),
        ({1: 2.0, 2: 1.02, 4: 1.04, 8: 1.03}, 4, [8, 4, 2]),  # what is faster below a rung that is not does not count
        ({1: 2.0, 2: 2.0, 4: 2.0, 8: 1.0}, None, [8]),
        ({1: 2.0, 2: 2.0, 4: None, 8: 2.0}, 8, [8, 4]),  # a result that is wrong pays nothing
        ({1: 2.0, 2: 2.0, 4: math.nan, 8: 2.0}, 8, [8, 4]),
    ],
)
def test_from_which_rung_on_sparse_pays(faster, least, measured):
    def measure(seq_len: int, query_len: int) -> dict:
        assert query_len == seq_len // 2
        return {"n": seq_len} | ({} if faster[seq_len] is None else {"times_faster": faster[seq_len]})

    def found() -> Generator[dict, None, None]:
        ends.append((yield from crossover.climb_down({n: (n, n // 2) for n in faster}, measure, 1.03)))

    ends: list[int | None] = []
    assert [row["n"] for row in found()] == measured
    assert ends == [least]


@pytest.mark.full
def test_the_table_is_what_servers_read(card, tmp_path):
    """A second run of the same replaces its entries and leaves others alone."""
    table = tmp_path / "table.json"
    args = (
        "--longest",
        256,
        "--shortest",
        128,
        "--new",
        "20,100",
        "--chunk",
        128,
        "--layers",
        1,
        "--table",
        table,
    )
    for chosen in (("--method", "a_shape"), ("--method", "a_shape"), ("--method", "a_shape:sink_tokens=64")):
        result = run("crossover", *chosen, *args)
        assert result.exit_code == 0, result.output
    written = json.loads(table.read_text())
    assert written["format"] == 1
    assert [entry["params"] for entry in written["entries"]] == [{}, {"sink_tokens": 64}]
    entry = written["entries"][0]
    assert set(entry) == {
        "device", "engine", "method", "params", "num_heads", "num_kv_heads", "head_dim", "min_tokens",
        "min_query_tokens", "vllm", "triton", "date", "command",
    }  # fmt: skip
    assert (entry["device"], entry["engine"], entry["min_tokens"]) == ("a CPU", "portable", 128)
    assert entry["min_query_tokens"] == 20  # 8 ms over 2 ms everywhere
    table.write_text("{}")
    result = run("crossover", "--method", "a_shape", *args)
    assert result.exit_code == 1
    assert "not a crossover table of format 1" in result.stderr


@pytest.mark.full
def test_lengths_are_tried_by_half_a_chunk_after_them(card, tmp_path):
    """As long as the prompt has as much, and by no more than what lies before."""
    path = tmp_path / "cases.json"
    result = run("crossover", "--method", "a_shape", "--longest", 256, "--shortest", 48, "--new", 20,
                 "--chunk", 128, "--layers", 1, "--table", tmp_path / "t.json", "--json", path)  # fmt: skip
    assert result.exit_code == 0, result.output
    tried = [case for case in json.loads(path.read_text())["cases"] if case.get("ladder") == "min_tokens"]
    assert [(case["context_len"], case["query_len"]) for case in tried] == [
        (192, 64), (128, 64), (96, 64), (64, 64), (48, 48)
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize("command", ["attend", "methods", "crossover"])
def test_without_a_card_one_line_says_so(command):
    result = run(command)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "needs a CUDA device, and torch sees none" in result.stderr


@pytest.mark.full
def test_figures_name_the_engine_that_a_server_would_not_take(card, tmp_path):
    """The first that does not refuse is the default; one that refuses says why, and has no time."""
    card.engines = {
        "new": Engine("new", lambda spec: "no stripes yet" if spec.has_stripes else None, reference),
        "portable": card.engines["portable"],
    }
    result = run("attend", "--contexts", 64, "--chunk", 100, "--blocks", 64, "--densities", "0.5", "--stripes", 9,
                 "--results", tmp_path / "r.json", "--json", tmp_path / "all.json")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [row["name"] for row in json.loads((tmp_path / "r.json").read_text())] == [
        "attend, chunk after 64, blocks of 64, density 0.5: efficiency",
        "attend, portable, chunk after 64, blocks of 64, density 0.5: efficiency",
        "attend, stripes 9: efficiency",
    ]
    problems = [case.get("problem") for case in json.loads((tmp_path / "all.json").read_text())["cases"]]
    assert problems == [None, None, "no stripes yet", None]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--contexts", "12;13", "given '12;13', expected"),
        ("--densities", "12;13", "given '12;13', expected"),
        ("--engines", "fast", "given 'fast', expected one of portable"),
    ],
)
def test_what_cannot_be_is_said(card, option, value, says):
    result = run("attend", option, value)
    assert result.exit_code == 1
    assert says in result.stderr


@pytest.mark.full
def test_captured_data(card, tmp_path, monkeypatch):
    """Heads are repeated, each layer has its own, and SharePrefill's clusters come from another capture."""
    shape = ModelShape("Llama", 3, 2, 1, 64)
    captures = {}
    for name in ("captured", "other"):
        folder = tmp_path / name
        folder.mkdir()
        for layer in (0, 2):
            made = structured(300, 0, 2, 1, 64, torch.float16, seed=layer)
            save_file({"q": made.q, "k": made.k, "v": made.v}, folder / f"layer-{layer:03}.safetensors")
        captures[name] = Capture(folder, "tiny", shape, 300, "0" * 64, {0: 0.125, 2: 0.125}, {1: "a sliding window"})
        captures[name]._write()
    asked_of = []
    monkeypatch.setattr(
        "benchmarks.methods.head_clusters",
        lambda captured, device: asked_of.append(captured.folder.name) or ((0, 0), (-1, -1), (1, 1)),
    )
    result = run("methods", "--captured", tmp_path / "captured", "--clusters", tmp_path / "other", "--repeat-heads", 4,
                 "--method", "share_prefill", "--method", "dense", "--contexts", 100, "--chunk", 200,
                 "--results", tmp_path / "r.json")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert asked_of == ["other"]
    figures = {row["name"]: row["value"] for row in json.loads((tmp_path / "r.json").read_text())}
    assert figures["whole method, dense, tiny, after 100: density"] == 1
    assert figures["whole method, dense, tiny, after 100: output error"] < 2e-3
    assert 0 < figures["whole method, share_prefill, tiny, after 100: density"] <= 1
    assert "selection, dense, tiny, chunk after 100: share of FlashAttention-3" in figures
