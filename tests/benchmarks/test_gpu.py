# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a card: its steps are existing programs, end in time, and are reported."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.figures import Report

BUDGET_S, STEP_S = 3000.0, 1000.0
SLOW = "import time; print('begun', flush=True); open({!r}, 'w').close(); time.sleep(600)"
"""A program that creates a file when it has begun, and takes long."""


def end_time_when(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the time limit of ``SLOW`` once it has created its file. Other programs have no time limit."""

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if self.args != [sys.executable, "-c", SLOW.format(str(begun))] or self.has_been_late:
                return super().wait()
            while not begun.exists():
                time.sleep(0.01)
            self.has_been_late = True
            raise subprocess.TimeoutExpired(self.args, 0.0 if timeout is None else timeout)

        has_been_late = False

    monkeypatch.setattr(gpu.subprocess, "Popen", Process)


def test_each_step_has_its_time_and_the_next_one_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, mark = tmp_path / "begun", tmp_path / "mark"
    end_time_when(begun, monkeypatch)
    steps = {
        "slow": [["-c", SLOW.format(str(begun))], ["-c", f"open({str(mark)!r}, 'w')"]],
        "wrong": [["-c", "raise SystemExit(3)"]],
        "fine": [["-c", "pass"], ["-c", "pass"]],
    }
    problems = {name: problem for name, _, problem in gpu.run(steps, BUDGET_S, STEP_S)}
    assert problems == {"slow": "took longer than 1000 s", "wrong": "ended with 3", "fine": None}
    assert not mark.exists()


def test_no_step_takes_longer_than_its_limit_or_the_budget() -> None:
    steps = {"slow": [["-c", "import time; time.sleep(600)"]]}
    assert [problem for *_, problem in gpu.run(steps, BUDGET_S, step_s=1)] == ["took longer than 1 s"]
    assert [problem for *_, problem in gpu.run(steps, 0)] == ["took longer than 0 s"]


@pytest.mark.parametrize(("gib", "lengths"), [(80, "8192,32768,131072"), (24, "8192,32768")])
def test_lengths_fit_the_card(tmp_path: Path, gib: int, lengths: str) -> None:
    steps = gpu.steps_of(tmp_path, gib << 30)
    assert lengths in steps["TTFT"][0]


def test_two_cards_run_two_steps_at_a_time_each_on_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each step waits for the other step of its round, so neither would end if they ran one after the other."""

    def step(mine: str, other: str) -> list[list[str]]:
        code = f"""if True:
            import os, pathlib, time
            folder = pathlib.Path({str(tmp_path)!r})
            (folder / {mine!r}).write_text("")
            while not (folder / {other!r}).exists():
                time.sleep(0.01)
            print({mine!r}, "on", os.environ["CUDA_VISIBLE_DEVICES"])"""
        return [["-c", code]]

    steps = {"a": step("a", "b"), "b": step("b", "a"), "c": step("c", "d"), "d": step("d", "c")}
    ended = [(name, problem) for name, _, problem in gpu.run(steps, BUDGET_S, STEP_S, ["4", "7"])]
    assert sorted(ended) == [(name, None) for name in "abcd"]
    assert {name for name, _ in ended[:2]} == {"a", "b"}
    assert sorted(capfd.readouterr().out.splitlines()) == ["a on 4", "b on 7", "c on 4", "d on 7"]


def test_a_step_on_one_of_two_cards_may_fail_or_take_too_long(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_time_when(tmp_path / "begun", monkeypatch)
    steps = {
        "slow": [["-c", SLOW.format(str(tmp_path / "begun"))]],
        "wrong": [["-c", "raise SystemExit('no memory')"]],
        "fine": [["-c", "pass"]],
    }
    problems = {name: problem for name, _, problem in gpu.run(steps, BUDGET_S, STEP_S, ["0", "1"])}
    assert problems == {"slow": "took longer than 1000 s", "wrong": "ended with 1", "fine": None}
    assert sorted(capfd.readouterr().out.splitlines()) == ["begun", "no memory"]


@pytest.mark.parametrize(
    ("names", "visible", "cards"),
    [
        (["H100"], None, ["0"]),
        (["H100", "H100", "H100"], None, ["0", "1"]),
        (["H100", "A10", "H100"], "3,5,6", ["3", "6"]),
        (["H100", "A10"], "", ["0"]),
        (["H100", "H100"], "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_cards_of_the_first_ones_kind_are_used(names: list[str], visible: str | None, cards: list[str]) -> None:
    assert gpu.cards_alike(names, visible) == cards


def test_both_sides_of_a_ratio_are_one_step_which_runs_on_one_card(tmp_path: Path) -> None:
    """A single command starts stock vLLM and this backend, and another compares `attend` with FlashAttention."""
    steps = gpu.steps_of(tmp_path, 80 << 30, at_once=2)
    assert list(steps) == [*list(steps)[:2], "TTFT", "attend"]
    assert steps["TTFT"][0][1:4] == ["vllm_sparse_backend", "bench", "serve"]
    workers = [int(steps[name][0][steps[name][0].index("-n") + 1]) for name in list(steps)[:2]]
    assert 2 * workers[0] == 2 * workers[1] <= max(2, (os.cpu_count() or 1) - 2)


def test_figures_of_steps_are_merged_and_keep_their_bars(tmp_path: Path) -> None:
    row = {"name": "TTFT", "value": 1, "unit": "s", "bar": 3, "better": "lower", "device": "a", "command": "b"}
    (tmp_path / "card.json").write_text(json.dumps([row]))
    (tmp_path / "TTFT.json").write_text(json.dumps([{**row, "value": 2, "bar": None}, {**row, "name": "more"}]))
    for step in ("TTFT", "attend"):
        gpu.add_figures(tmp_path / "card.json", tmp_path / f"{step}.json")
    rows = {row["name"]: (row["value"], row["bar"]) for row in json.loads((tmp_path / "card.json").read_text())}
    assert rows == {"TTFT": (2, 3), "more": (1, 3)}


def test_tests_are_figures(tmp_path: Path) -> None:
    case = '<testcase classname="a" name="{}">{}</testcase>'
    cases = case.format("first", "") + case.format("second", '<failure message="x"/>')
    (tmp_path / "GPU tests.xml").write_text(f"<testsuites>{cases}</testsuites>")
    report = Report("gpu", "a card", None, tmp_path / "a.json", "make gpu")
    for step in ("GPU tests", "TTFT"):
        gpu.add_tests(report, step, tmp_path / f"{step}.xml")
    rows = {row["name"]: (row["value"], row["bar"]) for row in json.loads((tmp_path / "a.json").read_text())}
    assert rows == {"GPU tests: passed": (1, None), "GPU tests: failed": (1, 0)}
