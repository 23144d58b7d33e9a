# SPDX-License-Identifier: Apache-2.0
"""What two cards do beside one, from what our own commands write."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import tensor_parallel as module
from benchmarks.figures import Report
from benchmarks.shape import make_shape
from benchmarks.tensor_parallel import Wanted, compare_speed
from vllm_sparse_backend.measure.server import Settings

A_SHAPE = Settings({"method": "a_shape"})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run, each of which measures what ``cases`` has of it."""
    commands: list[list[str]] = []

    def run(command: Sequence[str], timeout_s: float) -> None:
        commands.append(list(command))
        cases = cases_of(command)
        if cases is not None:
            Path(command[command.index("--json") + 1]).write_text(json.dumps({"cases": cases}))

    monkeypatch.setattr(module, "run", run)
    return commands


def cases_of(command: Sequence[str]) -> list[dict[str, object]] | None:
    if "serve" in command:
        sooner = {"a_shape, TP 1": 3.0, "a_shape, TP 2": 2.85}[command[command.index("--label") + 1]]
        return [{"part": "latency", "times_sooner": sooner}, {"part": "density", "density": 0.1}]
    answers = [{"distance": 10, "ranks": [1]}, {"distance": 20, "ranks": [1, 2]}]
    case = {"part": "prompt", "tokens": 64, "prompt": 0, "error": None, "answers": answers, "others": 50, "nats": 40.0}
    density = {"part": "density", "density": 0.2, "kept_pairs": 1, "causal_pairs": 5}
    return [{**one, "label": label} for label in ("TP 1", "TP 2") for one in (case, density)]


def test_speed(ran: list[list[str]], tmp_path: Path) -> None:
    report = Report("tensor parallelism", "2 cards")
    urls = {(cards, ours): f"http://{cards}{ours}" for cards in (1, 2) for ours in (False, True)}
    compare_speed(urls, A_SHAPE, 4096, tmp_path, report)
    assert [ran[1][ran[1].index(flag) + 1] for flag in ("--stock-url", "--url")] == ["http://2False", "http://2True"]
    figure = report.figures["a_shape, TP 2, 4,096 tokens: times sooner than stock ÷ TP 1's"]
    assert (figure["value"], figure["bar"], figure["better"]) == (0.95, 0.9, "higher")
    assert len(report.figures) == 3


def test_servers_on_their_cards(tmp_path: Path) -> None:
    shape = make_shape(tmp_path / "shape", 4, 8192)
    (one, two) = (Wanted(shape, cards, A_SHAPE if cards == 2 else None, 4096).server() for cards in (1, 2))
    at = {name: [server.command[server.command.index(name) + 1] for server in (one, two)] for name in (
        "--tensor-parallel-size", "--kv-cache-memory-bytes", "--max-model-len",
    )}  # fmt: skip
    assert at["--tensor-parallel-size"] == ["1", "2"]
    assert at["--max-model-len"] == ["4096"] * 2
    whole, half = map(int, at["--kv-cache-memory-bytes"])
    assert whole == 2 * half == 2 * 2 * 4 * 8 * 128 * (4096 + module.SPARE_TOKENS)
    assert "sparse-prefill" in two.command
    assert "sparse-prefill" not in one.command
    assert [server._env["CUDA_VISIBLE_DEVICES"] for server in (one, two)] == ["0", "0,1"]
