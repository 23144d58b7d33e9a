# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.hybrid`: its models, and its rows from complete and truncated output of engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hybrid
from benchmarks.figures import Report
from vllm_sparse_backend.cli.attention_share import prefill_share
from vllm_sparse_backend.config.model_check import layer_reasons, read_config
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import load_profile

TOKENS = 65536


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("name", "sparse"), [("qwen3-next", 12), ("nemotron-h", 4)])
def test_models_have_attention_that_can_run_sparse_and_fit_their_profile(
    name: str, sparse: int, small: bool, tmp_path: Path
) -> None:
    folder = hybrid.make_folder(name, tmp_path / name, TOKENS, small)
    assert sum(reason is None for reason in layer_reasons(read_config(folder))) == (1 if small else sparse)
    profile = load_profile(str(folder / "levels.yaml"))
    profile.check_model(ModelShape.from_folder(folder), "levels.yaml")
    assert set(profile.level_names) >= {hybrid.A_SHAPE, hybrid.LEAST}


def part(kind: str, **fields: Any) -> str:
    return json.dumps({"hybrid": kind, **fields})


def engine_log(ttft_s: dict[str, float], tokens: list[list[int]], **counts: Any) -> str:
    lines = [part("start", seconds=40.0, page_tokens=1024), "INFO a line of vLLM's"]
    level = hybrid.EXACT if len(ttft_s) > 1 else hybrid.DEFAULT
    lines.append(part("answers", level=level, tokens=tokens, logprobs=[[-1.0] * len(answer) for answer in tokens]))
    for is_warm_up in (True, False):
        for name, seconds in ttft_s.items():
            seconds = 9.0 if is_warm_up else seconds
            lines.append(part("ttft", level=name, seconds=seconds, is_warm_up=is_warm_up, **counts))
    return "\n".join([*lines, '{"hybrid": "ttft", "lev'])


def figures(tmp_path: Path, logs: dict[str, str]) -> dict[str, dict[str, Any]]:
    folder = hybrid.make_folder("qwen3-next", tmp_path / "model", TOKENS, small=False)
    report = Report("hybrid", "a card", None, tmp_path / "out.json")
    results = {run: list(hybrid.parts_of(logs.get(run, ""))) for run in (hybrid.STOCK, hybrid.AGAIN, hybrid.OURS)}
    hybrid.add_rows(report, "it", folder, TOKENS, results)
    rows = json.loads((tmp_path / "out.json").read_text())
    assert {row["name"] for row in rows} == set(report.figures)
    return {row["name"]: row for row in rows}


COUNTS = {"sparse_layers": 12, "density": 0.2, "engines": {"hopper": 12.0}, "overflows": 0.0}
OURS = {hybrid.DEFAULT: 2.2, hybrid.EXACT: 2.0, hybrid.A_SHAPE: 1.25, hybrid.LEAST: 1.0}


def test_rows_compare_tokens_ttft_and_the_forecast(tmp_path: Path) -> None:
    stock = engine_log({hybrid.DEFAULT: 2.0}, [[1, 2], [3, 4]])
    again = engine_log({hybrid.DEFAULT: 2.0}, [[1, 2], [3, 4]]).replace("-1.0]]", "-1.25]]")
    ours = engine_log(OURS, [[1, 2], [3, 5]], **COUNTS)
    rows = figures(tmp_path, {"stock": stock, "stock again": again, "ours": ours})
    assert rows["it: second stock engine, answers with stock's tokens"]["value"] == 1
    assert rows["it: second stock engine, log-probabilities' largest distance from stock's"]["value"] == 0.25
    assert rows["it: exact, answers with stock's tokens"]["value"] == 0.5
    assert rows["it: exact, answers with stock's tokens"]["bar"] == 1
    assert rows["it: exact, log-probabilities' largest distance from stock's"]["value"] == 0
    assert rows["it: a_shape, TTFT speed-up"]["value"] == 1.6
    bound = prefill_share(read_config(tmp_path / "model"), TOKENS).best_speedup
    ratio = rows["it: a_shape, TTFT speed-up ÷ the highest that doctor forecasts"]
    assert ratio["value"] == pytest.approx(1.6 / bound, rel=1e-3)
    assert ratio["bar"] == 0.9
    assert rows["it: share of prefill time that a density near zero saves"]["value"] == 0.5
    assert rows["it: pages that kernels read whole"]["value"] == rows["it: pages that kernels read whole"]["bar"] == 1
    assert rows["it: default, attention layers on hopper"]["value"] == 12
    ran = rows["it: a_shape, layers that ran sparse (attention layers: 12)"]
    assert ran["value"] == ran["bar"] == 12
    ran = rows["it: exact, layers that ran sparse (attention layers: 12)"]
    assert (ran["value"], ran["bar"]) == (12, 0)  # a miss: exact requests must not run sparse


def test_a_model_that_stock_cannot_load_costs_the_rows_that_need_it(tmp_path: Path) -> None:
    rows = figures(tmp_path, {"ours": engine_log(OURS, [[1]], **COUNTS)})
    assert rows["it: a_shape, TTFT"]["value"] == 1.25
    assert not any("speed-up" in name for name in rows if "forecast" not in name)


def test_the_reason_is_the_error_that_ended_the_engine() -> None:
    warning = "(pid=1) WARNING 11-26 [base.py:380] ValueError: no tokenizer"
    log = (
        f"{warning}\nTraceback (most recent call last):\n  File x\nValueError: Model architectures are not supported\n"
    )
    assert hybrid.reason_in(log) == "ValueError: Model architectures are not supported"
    assert hybrid.reason_in(warning) == "no error in its log"


def test_the_reason_is_found_behind_the_rank_that_torch_writes() -> None:
    error = "AttributeError: '_OpNamespace' '_moe_C' object has no attribute 'topk_softmax'"
    traceback = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "vllm/_custom_ops.py", line 2371, in topk_softmax',
        "[rank0]:     raise AttributeError(",
        f"[rank0]: {error}",
        "[rank0]:[W1126 05:24:50.1 ProcessGroupNCCL.cpp:1553] Warning: destroy_process_group() was not called",
    ]
    assert hybrid.reason_in("\n".join(traceback)) == error


def test_an_engine_that_fails_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid.sys, "executable", "false")
    parts, problem = hybrid.run_engine("ours", tmp_path, 1, 1, tmp_path / "log", limit_s=600)
    assert parts == []
    assert problem is not None
    assert problem == "ended with 1: no error in its log"
    _, problem = hybrid.run_engine("ours", tmp_path, 1, 1, tmp_path / "log", limit_s=0)
    assert "budget" in str(problem)
