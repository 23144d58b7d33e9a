# SPDX-License-Identifier: Apache-2.0
"""Output files of all commands: on a full disk, in a missing folder, and in unwritable places.

Tests also run as root, for whom file modes forbid nothing, so a path below a file and /proc stand for unwritable
places. A limit on the size of files stands for a full disk: the kernel refuses the same writes, and no privileges are
needed.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.helpers.command_line import COMMANDS
from tests.helpers.folders import LLAMA_8B, model_folder
from tests.helpers.full_disk import full_disk
from tests.helpers.profile_cases import PATTERNS, SHAPE
from vllm_sparse_backend.cli import app, common
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation import output_files
from vllm_sparse_backend.evaluation.report import CaseReport, write_json

CALIBRATE = ("profile", "calibrate", BUNDLED, "--method", "sale")
FILES: dict[str, tuple[object, ...]] = {
    "serve --json": ("bench", "serve", BUNDLED, "--json"),
    "crossover --out": ("bench", "crossover", BUNDLED, "--out"),
    "crossover --json": ("bench", "crossover", BUNDLED, "--json"),
    "answers --json": ("eval", "answers", BUNDLED, "--json"),
    "import --out": ("profile", "import", "patterns.json", "model", "--out"),
    "best --out": ("profile", "best", BUNDLED, "--out"),
    "calibrate --out": (*CALIBRATE, "--out"),
}
"""Commands up to the path of their output, by the names of the command and the option."""

NO_OUTPUTS = {"settings", "model", "url", "text", "prompts", "held_out", "file", "profile", "folder"}
"""Paths and texts that commands read, and a folder."""


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with only the files that commands read."""
    (tmp_path / "patterns.json").write_text(json.dumps(PATTERNS))
    model_folder(tmp_path / "model", LLAMA_8B | SHAPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_refused(result: Result, folder: Path) -> None:
    """Check that the error is a single line and that no file is left behind."""
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    assert not isinstance(result.exception, OSError)
    assert "expected" in line or "name another file" in line
    assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "file", "model", "patterns.json"]


@pytest.mark.parametrize("name", FILES)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(name: str, folder: Path) -> None:
    (folder / "file").touch()
    for path in ("file/x.json", "/proc/x.json", "missing/x.json", "model", "/dev/full"):
        assert_refused(run(*FILES[name], path), folder)
    with full_disk():
        result = run(*FILES[name], "x.json")
    assert_refused(result, folder)
    assert "File too large" in result.output


def test_the_table_has_every_output() -> None:
    outputs_of_commands = set()
    for path, command in COMMANDS:
        for param in command.params:
            kind = getattr(param.type_descriptor, "annotation", None)
            if "path" in str(kind).lower() and param.name not in NO_OUTPUTS:
                option = param.opts[0] if param.opts[0].startswith("-") else param.name
                outputs_of_commands.add(f"{path[-1]} {option}")
    assert outputs_of_commands == {*FILES}


def test_a_disk_that_fills_during_the_work_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setattr(common, "require_output_file", lambda *_: None)  # there was space at the time of the check
    with full_disk(64):
        result = run(*FILES["import --out"], "p.yaml")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "p.yaml: cannot be written: File too large"
    assert sorted(path.name for path in folder.iterdir()) == ["file", "model", "patterns.json"]


@pytest.mark.parametrize("failing", ["a report", "text"])
def test_a_write_that_fails_leaves_what_was_there(failing: str, folder: Path) -> None:
    path = folder / "a.json"
    path.write_text("before")
    report = CaseReport("serve", "CPU", path)
    write = {
        "text": lambda: output_files.write_text(path, "x" * 2000),
        "a report": lambda: report.add_case({"case": "x" * 2000}),
    }
    with full_disk(), pytest.raises(ConfigurationError, match=r"a\.json: cannot be written: File too large"):
        write[failing]()
    assert path.read_text() == "before"
    assert not list(folder.glob(".*"))


def test_a_link_is_written_through(folder: Path) -> None:
    (folder / "link.json").symlink_to(folder / "a.json")
    write_json(folder / "link.json", [1])
    assert (folder / "link.json").is_symlink()
    assert json.loads((folder / "a.json").read_text()) == [1]


def test_other_errors_of_storage_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors from temporary files, or from files that libraries write."""
    with pytest.raises(common.typer.Exit), common.failures():
        raise OSError(28, "No space left on device", "/tmp/server.log")
    assert capsys.readouterr().err == "/tmp/server.log: cannot be written: No space left on device\n"
