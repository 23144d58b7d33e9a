# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a card: its steps are programs that are there, end in time, and are told of."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.figures import Report


def test_each_step_has_its_time_and_the_next_one_runs_all_the_same(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    steps = {
        "slow": [["-c", "import time; time.sleep(60)"], ["-c", f"open({str(mark)!r}, 'w')"]],
        "wrong": [["-c", "raise SystemExit(3)"]],
        "fine": [["-c", "pass"], ["-c", "pass"]],
    }
    problems = {name: problem for name, _, problem in gpu.run(steps, 60, step_s=2)}
    assert problems == {"slow": "took longer than 2 s", "wrong": "ended with 3", "fine": None}
    assert not mark.exists()
    assert [problem for *_, problem in gpu.run({"late": steps["slow"]}, 0)] == ["took longer than 0 s"]


@pytest.mark.parametrize(("gib", "lengths"), [(80, "8192,32768,131072"), (24, "8192,32768")])
def test_lengths_fit_the_card(tmp_path: Path, gib: int, lengths: str) -> None:
    steps = gpu.steps_of(tmp_path, tmp_path / "card.json", gib << 30)
    assert lengths in steps["TTFT"][0]


def test_tests_are_figures(tmp_path: Path) -> None:
    case = '<testcase classname="a" name="{}">{}</testcase>'
    cases = case.format("first", "") + case.format("second", '<failure message="x"/>')
    (tmp_path / "GPU tests.xml").write_text(f"<testsuites>{cases}</testsuites>")
    report = Report("gpu", "a card", None, tmp_path / "a.json", "make gpu")
    for step in ("GPU tests", "TTFT"):
        gpu.add_tests(report, step, tmp_path / f"{step}.xml")
    rows = {row["name"]: (row["value"], row["bar"]) for row in json.loads((tmp_path / "a.json").read_text())}
    assert rows == {"GPU tests: passed": (1, None), "GPU tests: failed": (1, 0)}
