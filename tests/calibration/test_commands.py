# SPDX-License-Identifier: Apache-2.0
"""`profile best` and `profile calibrate` from the command line, on the demo's model."""

import json

import pytest
from typer.testing import CliRunner

from tests.helpers.calibration_cases import COSTS
from vllm_sparse_backend.calibration.capture import prompt_tokens
from vllm_sparse_backend.calibration.loop import Job
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import load_profile
from vllm_sparse_backend.demo.model import BUNDLED as NEEDLE
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.dense.method import Dense

pytest.importorskip("transformers", reason="models are run with transformers, which comes with vLLM")


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["profile", *map(str, words)])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


PATTERNS = {"a_shape", "vertical_slash", "block_sparse"}
SMALL = ("--tokens", 512, "--count", 1, "--chunk", 256, "--min-tokens", 64)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("calibrate", "--method", "sale", "--level", "high=3x", "--level", "fast=0.5:9"), {"sale"}),
        (("calibrate", "--method", "minference", "--level", "high=0.5:9"), PATTERNS),
        (("best", "--method", "sparge_attn", "--high", 2, "--fast", 4), {"sparge_attn"}),
    ],
)
def test_a_profile_from_one_command(words, names, text, tmp_path, monkeypatch):
    monkeypatch.setattr(Job, "costs", COSTS)
    out = tmp_path / "out.yaml"
    code, said = command(words[0], NEEDLE, "--out", out, "--text", text, *SMALL, *words[1:])
    assert code == 0, said
    assert "capturing 2 prompts" in said
    assert f"Written to {out}" in said
    profile = load_profile(str(out))
    assert f"layers: 0 of {profile.model.num_layers}" in said
    assert profile.provenance["source"].startswith(f"sparse-prefill profile {words[0]}")
    assert (profile.min_tokens, profile.provenance["seed"]) == (64, 0)
    layers = [i for i in range(profile.model.num_layers) if i not in profile.dense_layers]
    methods = {method for layer in layers for method in profile.methods_of(layer, profile.model.num_heads)} - {Dense()}
    assert {name_of(method) for method in methods} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["out.yaml"]  # captures are deleted
    assert command("check", out, NEEDLE)[0] == 0
    assert "already exists" in command(words[0], NEEDLE, "--out", out, *words[1:])[1]


def test_a_search_by_time_needs_a_gpu(text, tmp_path):
    for words in (("best",), ("calibrate", "--method", "minference")):
        code, said = command(words[0], NEEDLE, "--out", tmp_path / "out.yaml", "--text", text, *SMALL, *words[1:])
        assert (code, "given no CUDA device, expected one" in said, "capturing" in said) == (1, True, False), said


LEVEL = ("calibrate", "--method", "sale", "--level")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([*LEVEL, "high"], "--level: given 'high', expected NAME=MEAN:P99, NAME=1.5x or NAME=0.4abs, with numbers"),
        ([*LEVEL, "exact=0.1"], "--level exact=0.1: given 'exact', expected one of fast, high"),
        ([*LEVEL, "high=0"], "--level: given 'high=0', expected NAME=MEAN:P99"),
        ([*LEVEL, "high=1", "--level", "high=2"], "with numbers above 0, and each level only once"),
        ([*LEVEL, "high=0.9x"], "--level: given 'high=0.9x', expected a number of at least 1 before the x"),
        ([*LEVEL, "high=1:0.4abs"], "--level: given 'high=1:0.4abs', expected NAME=MEAN:P99"),
        ([*LEVEL, "high=1:1:1"], "--level: given 'high=1:1:1', expected NAME=MEAN:P99"),
        (["best", "--method", "sage"], "--method: given 'sage', expected one of a_shape"),
        (["calibrate", "--method", "sage"], "--method: given 'sage', expected one of a_shape"),
        (["calibrate", "--method", "share_prefill", "--level", "high=1"], "--level: given with --method share_prefill"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(words, problem, text, tmp_path):
    options = ("--out", tmp_path / "out.yaml", "--text", text, "--tokens", 1024, "--count", 1)
    code, said = command(words[0], NEEDLE, *options, *words[1:])
    assert (code, problem in said) == (2, True), said
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_or_run_is_refused_before_anything_is_done(text, tmp_path):
    for words, problem in (
        ((NEEDLE, "--out", tmp_path / "missing" / "x.yaml"), "there is no folder"),
        (("owner/name", "--out", tmp_path / "x.yaml"), "expected a model folder, or the name of a model in the"),
        ((NEEDLE, "--out", tmp_path / "x.yaml", "--tokens", 1_000_000), "--tokens: given 1000000, expected at most"),
    ):
        code, said = command("best", *words, "--text", text)
        assert (code, problem in said) == (2, True), said
    assert not list(tmp_path.iterdir())


def test_prompts_of_a_short_model_are_as_long_as_it_has_positions(tmp_path):
    code, said = command("best", NEEDLE, "--out", tmp_path / "x.yaml", "--text", tmp_path / "none")
    assert (code, "--tokens" in said, "--text: given" in said) == (2, False, True), said
    assert [prompt_tokens(NEEDLE, tokens) for tokens in (None, 512)] == [16384, 512]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 65_536),
        ({"rope_type": "yarn", "factor": 8.0}, 16_384),  # the config has the scaled number
    ],
)
def test_positions_as_vllm_derives_them(scaling, positions, tmp_path):
    config = json.loads((NEEDLE / "config.json").read_text())
    config["rope_parameters"] |= scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert prompt_tokens(tmp_path, positions) == positions
    with pytest.raises(ConfigurationError, match=f"--tokens: given {positions + 1}, expected at most {positions}"):
        prompt_tokens(tmp_path, positions + 1)
