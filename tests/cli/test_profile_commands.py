# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile`, from the command line."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.helpers.folders import LLAMA_8B, model_folder
from tests.helpers.profile_cases import LEVELS, PATTERNS, SHAPE
from vllm_sparse_backend.cli import app


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["profile", *(str(arg) for arg in args)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model", LLAMA_8B | SHAPE)


@pytest.fixture
def patterns(tmp_path: Path) -> Path:
    path = tmp_path / "best_pattern.json"
    path.write_text(json.dumps(PATTERNS))
    return path


def test_import_then_check(model: Path, patterns: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    imported = run("import", patterns, model, "--out", out)
    assert imported.exit_code == 0, imported.output
    checked = run("check", out, model)
    assert checked.exit_code == 0, checked.output
    assert checked.output.splitlines() == imported.output.splitlines()[:-2]
    assert imported.output.splitlines()[-2] == "imported from MInference's best_pattern.json"
    again = run("import", patterns, model, "--out", out)
    assert (again.exit_code, again.output.strip()) == (
        2,
        f"--out: {out} already exists; name another file, or delete it",
    )
    for line in (
        "layers 1: block_sparse(top_blocks=100) on 4 heads of this rank",
        "layers 0: vertical_slash(last_queries=64, forced_verticals=30, forced_slashes=100, settings=2) on 3 heads of",
        "layers 0: a_shape(sink_tokens=128, local_tokens=512) on 1 heads of this rank",
    ):
        assert line in checked.output


def test_what_a_server_would_refuse_is_one_line(model: Path, tmp_path: Path) -> None:
    """Faults of the file itself, and faults for this model."""
    path = tmp_path / "p.yaml"
    for wrong, says in (
        ("default: {method: a_shape, sink: 3}", "sink: unknown parameter of a_shape"),
        ("dense_layers: 0-1\ndefault: {method: a_shape}", f"dense_layers of profile {path} name all 2 layers"),
    ):
        path.write_text(f"format: 1\nmodel: any\n{wrong}\n")
        _is_refused(run("check", path, model), str(path), says)


def test_a_file_that_does_not_exist_is_refused() -> None:
    _is_refused(run("check", "nosuch.yaml"), "no such file", "nosuch.yaml")


def _is_refused(result: Result, *says: str) -> None:
    (line,) = result.output.splitlines()
    assert result.exit_code == 1
    assert all(said in line for said in says), line


@pytest.fixture
def levelled(tmp_path: Path) -> Path:
    (path := tmp_path / "levels.yaml").write_text(LEVELS)
    return path


def test_all_levels_are_checked(levelled: Path, model: Path) -> None:
    lines = run("check", levelled, model).output.splitlines()
    assert [re.sub(r"\(.*\)", "", line) for line in lines[1:]] == [
        "level high, layers 0-1: sale on 6 heads of this rank",
        "level high, layers 1: a_shape on 2 heads of this rank",
        "level fast, layers 0: dense",
        "level fast, layers 1: sale on 4 heads of this rank",
    ]
