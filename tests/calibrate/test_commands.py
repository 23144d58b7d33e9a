# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile best` and its like: from a model's folder to a profile that a server would take."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_sparse_backend.cli import app
from vllm_sparse_backend.demo.model import bundled_model
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import load_profile

NEEDLE = bundled_model()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(4):
        lines = [f"def part_{i}_{n}(x):\n    return x + {n * 7919}\n" for n in range(80)]
        (folder / f"{i}.py").write_text("".join(lines))
    return folder


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["profile", *map(str, words)], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def test_best_of_a_model_from_its_folder(text, tmp_path):
    pytest.importorskip("transformers", reason="capturing needs transformers, which comes with vLLM")
    out = tmp_path / "needle.yaml"
    words = [
        "best", NEEDLE, "--out", out, "--text", text, "--kinds", "retrieval", "--tokens", 300, "--count", 1,
        "--chunk", 128, "--min-tokens", 64, "--device", "cpu", "--ladders", "sparge_attn", "--no-means",
        "--level", "fast=0.3:1.5", "--seed", 5,
    ]  # fmt: skip
    code, said = command(*words)
    assert code == 0, said
    assert "fast: error 0.3, worst 1.5; density" in said
    assert "on held-out prompts: heads within bound" in said
    assert f"Written to {out}" in said
    profile = load_profile(out)
    profile.check_model(ModelShape.from_folder(NEEDLE))
    assert (profile.level, profile.min_tokens, profile.provenance.seed) == ("fast", 64, 5)
    assert profile.provenance.density < 1
    assert not list(tmp_path.glob("*.work/prompts-0"))
    code, said = command(*words)
    assert code == 1
    assert said.endswith(f"--out {out}: exists already: name another file, or delete it")
    # What was judged is known: the same again takes no capture, and has the same bytes.
    again = tmp_path / "again.yaml"
    code, said = command(*words[:3], again, *words[4:], "--work", tmp_path / "needle.work")
    assert code == 0, said
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["best", "--level", "high=x"], "--level: given 'high=x', expected NAME=ERROR:WORST, such as high=0.1:0.4"),
        (["best", "--level", "good=1"], "--level good=1: given 'good', expected one of fast, high"),
        (["best", "--level", "high=0:1"], "--level: given 'high=0:1', expected errors above 0, and each level once"),
        (["best", "--level", "high=0.1:1:1:0.1:1"], "given 'high=0.1:1:1:0.1:1', expected errors above 0"),
        (["calibrate", "--method", "sale+wide", "--level", "high=0.1:1:1:0.1"], "none, and for sparge_attn, sale"),
        (["calibrate", "--method", "sale", "--level", "high=1:1:1:1", "--level", "fast=1"], "for all levels or none"),
        (["best", "--ladders", "sales"], "--ladders: given 'sales', expected one of"),
        (["best", "--kinds", "hop"], "--kinds: given 'hop', expected one of hops, repeats, retrieval"),
        (["best", "--through", "vlm"], "--through: given 'vlm', expected one of transformers, vllm"),
        (["search", "--tensor-parallel-size", "2"], "--tensor-parallel-size: needs --through vllm"),
        (["calibrate", "--method", "sage"], "--method: given 'sage', expected one of"),
        (["search", "--level", "high=0.1:1:1:0.1"], "expected no bound of the mean of all heads"),
        (["cluster", "--side", "100"], "--side: given 100, expected a multiple of 16, from 16 to the 1024 tokens"),
        (["cluster", "--side", "0"], "--side: given 0, expected a multiple of 16"),
        (["cluster", "--side", "2048"], "--side: given 2048, expected a multiple of 16"),
        (["cluster", "--distance", "0"], "--distance: given 0.0, expected a number above 0"),
        (["cluster", "--distance", "nan"], "--distance: given nan, expected a number above 0"),
        (["cluster", "--method", "share"], "--method: given 'share', expected one of share_prefill"),
        (["cluster", "--level", "high=x"], "--level: given 'high=x', expected NAME=ERROR:WORST, such as high=0.1:0.4"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_before_anything_runs(words, problem, text, tmp_path):
    pytest.importorskip("transformers", reason="tokenizers are read with transformers, which comes with vLLM")
    name, *rest = words
    given = ("--out", tmp_path / "out.yaml", "--text", text, "--tokens", 1024, "--count", 1, "--device", "cpu")
    code, said = command(name, NEEDLE, *given, *rest)
    assert code == 1
    assert problem in said
    assert not (tmp_path / "out.yaml").exists()


def test_what_cannot_be_written_or_run_is_refused_before_anything_is_done(text, tmp_path):
    for words, problem in (
        ((NEEDLE, "--out", tmp_path / "missing" / "x.yaml"), "there is no folder"),
        (("owner/name", "--out", tmp_path / "x.yaml"), "expected a model folder with a config.json in it"),
        ((NEEDLE, "--out", tmp_path / "x.yaml", "--tokens", 1_000_000), "--tokens: given 1000000, expected at most"),
    ):
        code, said = command("best", *words, "--text", text, "--device", "cpu")
        assert (code, problem in said) == (1, True), said
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for words, problem in (
        (("--out", tmp_path / "x.yaml", "--work", tmp_path / "file" / "work"), "expected a folder that can be written"),
        (("--out", tmp_path / "x.yaml", "--work", tmp_path / "file"), "--work: given"),
        (("--out", tmp_path / "x.work"), "the run's folder has that name"),
    ):
        code, said = command("best", NEEDLE, *words, "--text", text, "--device", "cpu")
        assert (code, problem in said) == (1, True), said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
