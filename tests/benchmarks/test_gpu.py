# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a card: its steps are programs that are there, end in time, and are told of."""

from pathlib import Path

from benchmarks import gpu


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
