# SPDX-License-Identifier: Apache-2.0
"""The results file: merging, bars, and the document that is written from it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_sparse_backend.cli import app
from vllm_sparse_backend.measure.report import BenchError, Report, command_of, merge_figures, read_figures

ROOT = Path(__file__).parents[2]


def figure(name: str, value: float, bar: float | None = None, better: str = "higher") -> dict:
    return {
        "name": name, "value": value, "unit": "ratio", "bar": bar, "better": better, "device": "a card",
        "command": f"sparse-prefill bench {name.split()[0]}",
    }  # fmt: skip


ATTEND = "attend, chunk after 122,880, blocks of 128, density 0.08: efficiency"
WHOLE = "whole method, sparge_attn, structured, after 122,880"
SOME = [
    figure(ATTEND, 0.8),
    figure("attend, flash, chunk after 122,880, blocks of 128, density 0.08: efficiency", 0.7),
    figure("attend, stripes 8,192: efficiency", 0.7),
    figure("selection, sale, chunk after 24,576: share of FlashAttention-3", 0.3, better="lower"),
    figure(f"{WHOLE}: times faster", 1.2),
    figure(f"{WHOLE}: density", 0.2, better="lower"),
    figure(f"{WHOLE}: output error", 0.11, better="lower"),
    figure("vllm serve, no configuration, 32,768 tokens: first token, times sooner", 1.01),
    figure("vllm serve, sale tau=0.1, 20 new after 102,400 cached: per output token, times faster", 0.9),
    figure("vllm serve, a_shape, mixed load: throughput, times stock's", 1.6),
    figure("vllm serve, a_shape, mixed load of 8 clients: throughput, times stock's", 1.6),
    figure("what nobody expected", 3),
]


def test_figures_are_merged_by_name_and_keep_their_bar(tmp_path):
    path = tmp_path / "results.json"
    merge_figures(path, {f["name"]: f for f in (figure("a", 1), figure("b", 2))})
    rows = read_figures(path)
    rows[0]["bar"] = 5
    path.write_text(json.dumps(rows))
    report = Report("attend", "another card", results_path=path, command="again")
    report.add_figure("c", 0.123456, "ratio", "higher")
    report.add_figure("a", 7, "ratio", "higher")
    rows = read_figures(path)
    assert [(row["name"], row["value"], row["bar"]) for row in rows] == [
        ("a", 7, 5),
        ("b", 2, None),
        ("c", 0.1235, None),
    ]
    assert rows[0]["device"] == "another card"
    assert list(rows[0]) == ["name", "value", "unit", "bar", "better", "device", "command"]
    for text in ("{", '{"a": 1}', "[1]"):
        path.write_text(text)
        with pytest.raises(BenchError, match="not a results file"):
            read_figures(path)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["bench", "attend", "--json", "/tmp/a.json", "--chunk", "64", "--png=x.png"], "bench attend --chunk 64"),
        (
            ["bench", "serve", "/models/llama", "--settings", '{"method": "sale"}', "--results", "r"],
            """bench serve llama --settings '{"method": "sale"}'""",
        ),
        (
            ["bench", "crossover", "--table", "t.json", "--method", "sale:tau=0.1"],
            "bench crossover --method sale:tau=0.1",
        ),
    ],
)
def test_commands_name_no_places_of_one_machine(arguments, command):
    assert command_of(arguments) == f"sparse-prefill {command}"


def test_bars_are_those_of_the_table():
    from benchmarks.performance import fixed_bars, met, with_bars

    figures = with_bars(SOME)
    bars = {name: row["bar"] for name, row in figures.items()}
    assert bars[ATTEND] == 0.87
    assert bars["attend, stripes 8,192: efficiency"] == 0.65
    assert bars["selection, sale, chunk after 24,576: share of FlashAttention-3"] == 0.28
    assert bars[f"{WHOLE}: times faster"] == 1.3  # as it keeps 0.2
    assert bars["what nobody expected"] is None
    assert [name for name, row in figures.items() if not met(row)] == [
        ATTEND,
        "selection, sale, chunk after 24,576: share of FlashAttention-3",
        f"{WHOLE}: times faster",
        "vllm serve, sale tau=0.1, 20 new after 102,400 cached: per output token, times faster",
    ]
    dense = with_bars([*SOME[:5], figure(f"{WHOLE}: density", 0.7), *SOME[6:]])
    assert dense[f"{WHOLE}: times faster"]["bar"] is None
    names = [name for name, _ in fixed_bars()]
    assert len(names) == len(set(names))


def test_benchmarks_use_the_names_that_have_bars():
    """What the commands report at the shapes of the bars, by their own code."""
    from benchmarks.attend import cases_of
    from benchmarks.levels import levels_profile
    from benchmarks.performance import fixed_bars
    from vllm_sparse_backend.measure.asked import Asked
    from vllm_sparse_backend.measure.latency import Length
    from vllm_sparse_backend.measure.methods import _add_figures
    from vllm_sparse_backend.measure.serve import Settings

    contexts = (24576, 122880)
    cases = cases_of(contexts, 8192, (128, 64, 32), (1, 0.5, 0.2, 0.08, 0.03), (1024, 8192))
    made = {f"attend, {case.name}: efficiency" for case in cases}
    methods = ["a_shape", "anchor_attention:theta=9", "anchor_attention", "sale", "sparge_attn", "block_sparse"]
    methods += ["flex_vertical_slash", "share_prefill", "vertical_slash"]
    methods += ["vertical_slash:vertical_tokens=512,slash_tokens=2048"]
    report = Report("methods", "a card", command="test")
    for data in ("structured", "code-lm-29m-128k"):
        for asked in map(Asked.parse, methods):
            for context_len in contexts:
                row = {"method": str(asked), "engine": "portable", "context_len": context_len, "data": data}
                row |= dict.fromkeys(("select_share", "times_faster", "density", "output_error"), 0.5)
                _add_figures(report, row, True, "FlashAttention-3")
    made |= set(report.figures)
    lengths = [Length(n) for n in (1024, 4096, 8192, 16384, 32768, 65536, 131072)]
    lengths += [Length(n, 102400) for n in (20, 200, 1000)]
    labels = [str(Settings({})), *levels_profile().level_names]
    made |= {f"vllm serve, {label}, {length}: first token, times sooner" for label in labels for length in lengths}
    asked_for = {name for name, _ in fixed_bars() if "mixed load" not in name}
    assert asked_for <= made, asked_for - made


def test_profiles_for_benchmarks_fit_the_model_that_they_are_for():
    from benchmarks.levels import LEVELS, levels_profile, varied_profile
    from benchmarks.shape import SHAPE
    from vllm_sparse_backend.settings.model_shape import ModelShape
    from vllm_sparse_backend.settings.profile import parse_profile

    shape = ModelShape.from_config(SHAPE | {"num_hidden_layers": 32})
    for profile in (levels := levels_profile(), varied := varied_profile()):
        profile.check_model(shape)
        assert parse_profile(profile.to_yaml(compact=True), "") == profile
    assert set(levels.level_names) > set(LEVELS)
    own = [method for layer in range(32) for method in varied.methods_of(layer, 32)]
    assert len(set(own)) == len(own) == 1024


def test_the_document_is_written_from_the_results(tmp_path):
    from benchmarks import performance

    results, document = tmp_path / "results.json", tmp_path / "performance.md"
    results.write_text(json.dumps(SOME[:5]))
    (tmp_path / "more.json").write_text(json.dumps(SOME[5:]))
    document.write_text((ROOT / "docs/performance.md").read_text())
    import typer

    app = typer.Typer()
    app.command()(performance.main)
    paths = {"--results": results, "--markdown": document, "--merge": tmp_path / "more.json"}
    for _ in range(2):
        result = CliRunner().invoke(app, [str(x) for pair in paths.items() for x in pair], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert "12 figures, 4 not met" in result.output
    assert json.loads(results.read_text())[0]["bar"] == 0.87
    text = document.read_text()
    assert "| engine | after | blocks of | 0.08 |" in text
    assert "|  | 122,880 | 128 | 0.8 (asked: 0.87) |" in text
    assert "| flash | 122,880 | 128 | 0.7 |" in text
    assert "| sparge_attn | 1.2 (asked: 1.3) → 0.2, 0.11 |" in text
    assert "| no configuration | 32,768 tokens | 1.01 |" in text
    assert "| what nobody expected | 3 | ratio |  |" in text
    assert "* a card: `sparse-prefill bench attend,`" in text
    document.write_text("no marks")
    result = CliRunner().invoke(app, ["--results", str(results), "--markdown", str(document)])
    assert result.exit_code != 0


def test_the_document_in_the_repository_is_up_to_date(tmp_path):
    from benchmarks import performance
    from benchmarks.tables import put_between

    results, document = ROOT / "docs/results/performance.json", tmp_path / "performance.md"
    figures = performance.with_bars(read_figures(results) if results.exists() else [])
    document.write_text((ROOT / "docs/performance.md").read_text())
    others = {row["name"]: row for row in read_figures(ROOT / performance.H100)}
    for mark, body in performance.sections(figures, others).items():
        put_between(document, f"<!-- figures: {mark} -->", "<!-- end of figures -->", body)
    assert document.read_text() == (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize(
    ("option", "name", "problem"),
    [
        ("--json", "missing/x.json", "expected a file in a folder that is there"),
        ("--results", "folder", "expected a file in a folder that is there"),
        ("--png", "x.foo", "expected a name that ends with one of .png"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, option, name, problem):
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["bench", "attend", option, str(tmp_path / name)], env={"COLUMNS": "300"})
    assert (result.exit_code, problem in " ".join(result.output.split())) == (2, True), result.output


def test_a_file_of_no_results_is_found_out_at_the_start(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BenchError, match="not a results file"):
        Report("attend", "a card", results_path=tmp_path / "x.json")
