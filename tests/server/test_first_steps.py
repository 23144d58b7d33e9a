# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/first_steps.md, run one after the other in the same shell, and what the page promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.external_tools import ROOT
from vllm_sparse_backend.evaluation.vllm_server import OFFLINE, has_cuda, reserve_port

pytestmark = [pytest.mark.server, pytest.mark.full]

PAGE = (ROOT / "docs/first_steps.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
DEADLINE_S = 3600.0
"""Seconds for all commands; they take minutes."""
INSTALLING, *OTHERS = BLOCKS
REQUESTS, ROWS = (next(block for block in BLOCKS if mark in block) for mark in ("PROMPT=", "rows_total"))
SHELL = """\
set -e -o pipefail
stop() { [ -z "${SERVER:-}" ] || { kill "$SERVER" && wait "$SERVER" || true; }; SERVER=; }
ready() { until curl --fail -s http://localhost:8000/health; do kill -0 "$SERVER" && sleep 1; done; }
trap stop EXIT
"""


def test_installing_is_what_every_change_passes() -> None:
    """`make demo` is a step of .ci/run."""
    demo, activate = INSTALLING.splitlines()
    assert f'"{demo}"' in (ROOT / ".ci/run").read_text()
    assert activate == "source .venv/bin/activate"


def in_one_shell(block: str) -> str:
    """Return a script in which servers run in the background, and the next server replaces the previous."""
    return (
        f"stop\n{block.rstrip()} > server.log 2>&1 &\nSERVER=$!\nready\n" if block.startswith("vllm serve") else block
    )


def test_every_command_runs(tmp_path: Path) -> None:
    (tmp_path / "vllm_sparse_backend").symlink_to(ROOT / "vllm_sparse_backend")
    blocks = [block for block in OTHERS if not (has_cuda() and "VLLM_CPU" in block)]
    script = SHELL + "".join(map(in_one_shell, [*blocks, "echo with the profile\n", REQUESTS, ROWS]))
    with reserve_port() as port:
        number = port.getsockname()[1]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script.replace("8000", str(number))], cwd=tmp_path, capture_output=True, text=True,
            timeout=DEADLINE_S, env=os.environ | OFFLINE | {"PATH": path, "no_proxy": "*"}, check=False,
        )  # fmt: skip
    log = (tmp_path / "server.log").read_text() if (tmp_path / "server.log").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    of_method, of_profile = done.stdout.split("with the profile\n")
    texts = re.findall(r'^"text":"(.*)"$', of_method, re.MULTILINE)
    assert texts == re.findall(r'^"text":"(.*)"$', PAGE, re.MULTILINE), of_method  # as the page shows them
    assert len(texts) == 2
    assert len(set(texts)) == 1
    density = re.search(r"^density (\S+)$", of_method, re.MULTILINE)
    expected = re.search(r"The density is about (\S+):", PAGE)
    assert density
    assert expected
    assert float(density[1]) == pytest.approx(float(expected[1]), abs=0.05)
    rows = [
        line.replace(" ", "").split("|")
        for line in of_method.splitlines()
        if line.startswith("| http") and " of " in line
    ]
    assert [row[3:6:2] for row in rows] == [["24of24", "1.000"]] * 2, of_method
    for said in (of_method, of_profile):
        for way in ('path="sparse"', 'reason="requested"'):
            counts = [line for line in said.splitlines() if "rows_total{" in line and way in line]
            assert counts
            assert all(float(count.split()[-1]) > 0 for count in counts)
