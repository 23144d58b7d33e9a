# SPDX-License-Identifier: Apache-2.0
"""`eval report` against stand-ins of servers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.evaluation.test_answers import Stub
from tests.helpers.stub_server import Words, running
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation import compared_servers
from vllm_sparse_backend.evaluation.tasks import TASKS


def run(*args: object) -> Result:
    sizes = ("--lengths", 1100, "--answer-lengths", 2000)
    command = ["eval", "report", BUNDLED, *sizes, *args]
    return CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)


def test_an_interrupted_report_continues_and_refuses_other_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts: list[str] = []
    encode = Words(digits=7)

    @contextmanager
    def server(model: Path, args: tuple[str, ...]) -> Iterator[SimpleNamespace]:
        """Stand in for a server. Our first server for speed, and the first for answers, are interrupted."""
        is_ours = "sparse-prefill" in args
        starts.append("ours" if is_ours else "stock")
        if len(starts) in (2, 6):
            raise KeyboardInterrupt
        stub = Stub(lambda distance: 1, kept_of_100=25 if is_ours else None)
        stub.encode = encode
        with running(stub) as url:
            yield SimpleNamespace(url=url)

    monkeypatch.setattr(compared_servers, "Server", server)
    text = tmp_path / "text.txt"
    text.write_text("The old ship left the harbor in the morning.\n" * 500)
    options = ("--text", text, "--out", tmp_path / "report", "--count")

    for files in ([], ["answers.json", "ttft.json"]):
        interrupted = run(*options, 1)
        assert interrupted.exit_code == 130, interrupted.output
        assert f"The same command continues from {tmp_path}/report" in interrupted.output
        assert sorted(path.name for path in (tmp_path / "report").iterdir()) == files

    continued = run(*options, 1)
    assert continued.exit_code == 0, continued.output
    assert starts == ["stock", "ours", "stock", "ours", "stock", "ours", "ours"]
    page = (tmp_path / "report/report.md").read_text()
    assert page.strip() == continued.output[continued.output.index("# ") :].strip()
    figures = json.loads((tmp_path / "report/report.json").read_text())
    assert figures["options"]["answers"]["count"] == 1
    assert [row["case"] for row in figures["ttft"]] == ["1,100 tokens"]
    assert [row["task"] for row in figures["answers"]] == [task for task in TASKS for _ in ("stock", "ours")]
    assert [(row["share"], row["density"]) for row in figures["answers"]] == [(1, None), (1, 0.25)] * len(TASKS)

    in_a_file = run("--text", text, "--out", text / "report")
    assert in_a_file.exit_code == 2
    assert "--out: given" in in_a_file.output

    too_short = run(*options, 1, "--answer-lengths", 100)
    assert too_short.exit_code == 2
    assert "--answer-lengths: given 100, expected at least 120" in too_short.output
    other_count = run(*options, 2)
    assert other_count.exit_code == 1
    assert "answers.json: measured with count 1, now 2; delete it or name another" in other_count.output
    other_lengths = run(*options, 1, "--lengths", 1200)
    assert other_lengths.exit_code == 1
    assert "ttft.json: measured with lengths [{'new_tokens': 1100" in other_lengths.output
    (tmp_path / "report/ttft.json").write_text('{"format": 1, "options": {}, "cases": []}')
    other_format = run(*options, 1)
    assert other_format.exit_code == 1
    assert "ttft.json: not a file of earlier results: ValueError('format 1, expected 2'); delete it" in " ".join(
        other_format.output.split()
    )
    assert len(starts) == 7
