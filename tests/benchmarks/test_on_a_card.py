# SPDX-License-Identifier: Apache-2.0
"""Small runs of the commands on a real card: they complete, the timed results are correct, and times are plausible."""

import json

import pytest

from tests.helpers.lab_commands import run

pytestmark = pytest.mark.gpu

SMALL = {
    "attend": ("--contexts", "1000", "--chunk", "1024", "--densities", "1,0.3", "--stripes", "100"),
    "methods": ("--contexts", "1000,4096", "--chunk", "1024", "--layers", "2"),
    "crossover": ("--longest", "8192", "--chunk", "1024", "--settings", '{"method": "sale"}'),
}


@pytest.mark.parametrize("command", SMALL)
def test_it_runs_through(command, tmp_path):
    pytest.importorskip("vllm.vllm_flash_attn")
    args = [*SMALL[command], "--json", str(tmp_path / "all.json")]
    if command == "crossover":
        args += ["--out", str(tmp_path / "table.json")]
    result = run(command, *args)
    assert result.exit_code == 0, result.output
    cases = json.loads((tmp_path / "all.json").read_text())["cases"]
    assert cases
    for case in cases:
        assert not {"eager's", "trial"} & set((case.get("problem") or "").split()), case
        assert {"problem", "entry"} & set(case) or 0 < case["times_faster"] < 100, case
    assert any("problem" not in case for case in cases)
