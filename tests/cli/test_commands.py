# SPDX-License-Identifier: Apache-2.0
"""Properties of all commands: help on a single screen, models by name, options with the same meaning, errors and
Ctrl-C."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner, Result

from tests.helpers.command_line import COMMANDS
from tests.helpers.external_tools import ROOT
from tests.helpers.stub_server import Api, running
from vllm_sparse_backend.calibration import loop
from vllm_sparse_backend.cli import app, common
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation import answer_run, answer_tables, crossover_bench, serve_bench
from vllm_sparse_backend.evaluation.report import table_of
from vllm_sparse_backend.identity import PACKAGE, package_version

NAME = "sparse-prefill/needle"


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], terminal_width=100)


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS], ids=" ".join)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_fits_a_screen_and_has_an_example(path: tuple[str, ...], option: str) -> None:
    lines = run(*path, option).output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert any(f"Example: sparse-prefill {' '.join(path)}" in line for line in lines)


@pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_lists_show_whole_summaries_and_options_name_their_values(path: tuple[str, ...], command: Any) -> None:
    summary = command.help.partition("\n\n")[0].replace("\n", " ")
    assert len(summary) <= 55, summary
    values = [param for param in command.params if not getattr(param, "is_flag", False)]
    assert all(param.metavar and param.metavar.isupper() for param in values), path


def test_tables_have_few_columns_and_paste_as_markdown() -> None:
    for columns in (serve_bench.COLUMNS, answer_tables.COLUMNS, answer_tables.CHANGE_COLUMNS, crossover_bench.COLUMNS):
        header, rule = table_of("", columns, [dict.fromkeys(columns, "")]).splitlines()[:2]
        assert len(columns) <= 7
        assert len(header) <= 100
        assert re.fullmatch(r"\|( -+:? \|)+", rule)
    assert answer_tables.with_error(0.987, 0.012, ".2f") == "0.99 ± 0.01"
    assert answer_tables.with_error(-0.7, None, "+.2f") == "-0.70"


def test_profile_list_names_the_bundled_profiles() -> None:
    lines = run("profile", "list").output.splitlines()
    assert "| streaming " in "\n".join(lines)
    assert any("meta-llama/Llama-3.1-8B-Instruct" in line for line in lines)


def test_an_option_takes_the_same_wherever_it_is() -> None:
    """Except --level and --method, which some commands accept several times. All commands together have at most 80
    options."""
    types: dict[str, set[str]] = {}
    for _, command in COMMANDS:
        for param in command.params:
            types.setdefault(param.opts[0], set()).add(str(param.type_descriptor.annotation))
    assert {name for name, annotations in types.items() if len(annotations) > 1} <= {"--level", "--method"}
    assert sum(len(command.params) for _, command in COMMANDS) <= 80


def test_an_option_keeps_its_name_beside_a_metavar_like_it() -> None:
    """typer 0.27 names an option after its metavar if both differ only in case and no name is declared."""
    hints = [get_type_hints(inspect.unwrap(command.callback), include_extras=True) for _, command in COMMANDS]
    parameters = [(name, part) for hint in hints for name, of in hint.items() for part in get_args(of)[1:]]
    options = [(name, part) for name, part in parameters if isinstance(part, OptionInfo)]
    # In Annotated, typer keeps the declared name as the default.
    declared = {(name, option.default) for name, option in options if option.metavar == name.upper()}
    assert declared == {("level", "--level"), ("url", "--url"), ("method", "--method"), ("folder", "--out")}


def test_the_module_is_the_command_and_says_its_version() -> None:
    command = [sys.executable, "-m", "vllm_sparse_backend", "--version"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [PACKAGE, package_version(PACKAGE)]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled model's snapshot in a separate hub cache, offline."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / f"models--{NAME.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123abc")
    (repository / "snapshots/0123abc").symlink_to(BUNDLED, target_is_directory=True)
    return repository


@pytest.mark.usefixtures("cached")
def test_a_models_name_stands_for_its_files_in_the_local_cache() -> None:
    doctor = run("doctor", NAME)
    assert "can run sparse: 5 of 5 layers (0-4)" in doctor.output, doctor.output
    checked = run("profile", "check", "streaming", NAME)
    assert (checked.exit_code, "layers 0-4: a_shape(" in checked.output) == (0, True), checked.output
    short = run("eval", "answers", NAME, "--lengths", 1024)
    assert (short.exit_code, "a prompt of 1,024 tokens" in short.stderr) == (2, True), short.output
    missing = run("doctor", "sparse-prefill/other")
    assert missing.exit_code == 2
    assert "expected a model folder, or the name of a model in the local hub cache" in missing.stderr


def test_a_server_that_wants_a_key_is_not_called_absent() -> None:
    class Locked(Api):
        status = 401

    with running(Locked()) as url:
        result = run("eval", "answers", "--url", url)
    assert result.exit_code == 1
    assert "refuses the request (answered 401" in result.stderr
    assert "set OPENAI_API_KEY to its --api-key" in result.stderr
    assert "no model server at" not in result.stderr


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "search_of_method", stop)
    monkeypatch.setattr(loop, "search_for_cheapest", stop)
    for command in (("best",), ("calibrate", "--method", "sale")):
        result = run("profile", *command, BUNDLED, "--out", tmp_path / "out.yaml", "--tokens", 1024)
        assert result.exit_code == 130
        assert not list(tmp_path.iterdir())  # captures are deleted
    monkeypatch.setattr(answer_run, "ask_all", stop)
    result = run("eval", "answers", BUNDLED, "--json", tmp_path / "a.json")
    assert result.exit_code == 130
    assert f"resumes from {tmp_path / 'a.json'}." in result.stderr


def test_a_line_a_stage_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("prompts") as shown:
        shown.begin("prompts", 3)
        shown.step()
        shown.print("a line [of results]")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "prompts: 0 of 3\na line [of results]\n")


def test_a_log_has_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now_s)
    with bar("layers") as shown:
        shown.begin("layers", 5)
        for _ in range(5):
            now_s += 20.0
            shown.step()
    lines = ["layers: 0 of 5", "layers: 2 of 5 after 40 s", "layers: 4 of 5 after 80 s", "layers: 5 of 5 after 100 s"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("path", ["/nonexistent", "/dev/null", "../a", "a/b/c"])
def test_what_is_no_model_is_refused(path: str) -> None:
    result = run("doctor", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"MODEL: given {path!r}, expected a model folder, or the name of a model")


def test_one_line_for_a_wrong_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends with this error prints no traceback."""
    hooks = pytest.importorskip("vllm_sparse_backend.serving.hooks")
    ours, others = ConfigurationError("method: given 'sales', expected one of sale"), []
    monkeypatch.setattr(sys, "excepthook", lambda *given: others.append(given))
    hooks._end_in_one_line(ours)
    for error in (ours, ValueError("x")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == f"sparse-prefill: {ours}\n"
    assert [kind for kind, *_ in others] == [ValueError]


def test_failures_of_ours_are_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, common.failures():
        raise ConfigurationError("what [was] given")
    assert (caught.value.exit_code, capsys.readouterr().err) == (1, "what [was] given\n")
