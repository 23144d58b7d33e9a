# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.mla`: its shapes, its calculations, and rows that are written as soon as they are measured."""

import json
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import mla
from benchmarks.figures import Report

TOKENS = 65536
ABOUT = "kimi-k2's shape, 8 heads, 65,536 tokens"
CALCULATED = f"{ABOUT}: 61 layers, calculated"


@pytest.mark.parametrize(("shape", "heads"), [("deepseek-r1", 16), ("kimi-k2", 8)])
def test_a_shape_is_the_part_of_one_gpu(shape: str, heads: int) -> None:
    config = mla.config_of(shape, 131072, small=False)
    assert config["num_attention_heads"] == heads
    assert config["intermediate_size"] * 8 == 9 * 2048  # eight experts and a shared expert
    assert config["first_k_dense_replace"] == config["num_hidden_layers"]
    assert config["max_position_embeddings"] > 131072 + 512


def test_work_counts_the_context_that_every_chunk_projects_up_again() -> None:
    config = mla.config_of("deepseek-r1", TOKENS, small=False)
    work = mla.Work.of(config, TOKENS, 8192)
    assert work.attention == 2 * (192 + 128) * 16 * TOKENS * (TOKENS + 1) / 2
    projections = 7168 * (1536 + 512 + 64) + 1536 * 16 * 192 + 16 * 128 * 7168 + 3 * 7168 * 2304
    projected = TOKENS + 8192 * (0 + 1 + 2 + 3 + 4 + 5 + 6 + 7)
    assert work.linear == 2 * (projections * TOKENS + 512 * 16 * 256 * projected)
    assert mla.Work.of(config, TOKENS, TOKENS).linear < work.linear


def test_the_share_of_a_model_grows_with_its_layers_and_with_faster_products() -> None:
    # Two layers of 3 s, of which 1 s is attention; 4 s outside of layers.
    measured = mla.Prefill(10.0, {mla.NEW: 0.5, mla.CONTEXT: 1.5, mla.LAYER: 6.0}, layers=2)
    assert measured.attention_share == pytest.approx(0.2)
    whole = measured.with_layers(60)
    assert (whole.ttft_s, whole.attention_s) == pytest.approx((60 * 3 + 4, 60.0))
    assert whole.speed_up(0) == pytest.approx(184 / 124)
    assert whole.speed_up(0.45) == pytest.approx(184 / (124 + 0.45 * 60))
    # Matrix products take 1 s of a layer, and half as long at twice the rate.
    faster = whole.with_faster_products(mla.Work(attention=1e12, linear=5e12), 5e12, 10e12)
    assert faster.ttft_s == pytest.approx(184 - 60 * 0.5)
    assert faster.attention_s == whole.attention_s


def test_a_prompt_that_ran_in_other_chunks_is_refused() -> None:
    calls = dict.fromkeys((mla.NEW, mla.MHA, mla.BLOCK, mla.LAYER), 8) | {mla.CONTEXT: 6}
    mla.check_calls(calls, layers=2, chunks=4)
    mla.check_calls(calls | {mla.CONTEXT: 9}, layers=2, chunks=4)  # a long context has several chunks
    mla.check_calls(calls | {mla.CONTEXT: 0}, layers=8, chunks=1)
    with pytest.raises(RuntimeError, match=r"given 6 of run_prefill_context_chunk, expected 8 of each"):
        mla.check_calls(calls, layers=1, chunks=8)
    with pytest.raises(RuntimeError, match=r"given 0 of forward_mha, expected 8 of each"):
        mla.check_calls({name: count for name, count in calls.items() if name != mla.MHA}, layers=2, chunks=4)


def test_spans_contain_each_other_and_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(mla.time, "perf_counter", lambda: float(next(clock)))

    class Attention:
        def run(self, *, scale: float) -> float:
            return 2 * scale

    class Layer(torch.nn.Module):
        def forward(self, scale: float) -> float:
            return Attention().run(scale=scale)

    timer, layer = mla.SpanTimer(on_cuda=False), Layer()
    timer.wrap(Attention, "run", "attention")
    timer.watch(layer, "layer")
    assert [layer(3.0), layer(4.0)] == [6.0, 8.0]
    assert timer.read() == ({"attention": 2.0, "layer": 6.0}, {"attention": 2, "layer": 2})
    assert timer.read() == ({}, {})


def test_a_model_without_mla_is_refused() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(RuntimeError, match="Linear: given 0 decoder layers and 0 MLAAttention modules"):
        mla.watch_prefill(torch.nn.Linear(1, 1), mla.SpanTimer(on_cuda=False))


def prompt(seconds: float) -> dict[str, Any]:
    """Return a part of an engine's results: four layers of 0.1 s, of which 0.04 s are attention."""
    spans = {mla.NEW: 0.06, mla.CONTEXT: 0.1, mla.MHA: 0.2, mla.BLOCK: 0.3, mla.FEED_FORWARD: 0.08, mla.LAYER: 0.4}
    return {"mla": "prompt", "tokens": TOKENS, "seconds": seconds, "layers": 4, "spans": spans | {"gathering": 0.004}}


def test_rows_are_written_after_every_prompt(tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    def values() -> dict[str, float]:
        return {row["name"]: row["value"] for row in json.loads(path.read_text())}

    config = mla.config_of("kimi-k2", TOKENS, small=False)
    rows = mla.Rows(Report("mla", "a card", None, path), "kimi-k2", config)
    rows.add({"mla": "start", "seconds": 1.0, "chunk_tokens": 8192, "prefill": "FLASH_ATTN", "decode": "TRITON_MLA"})
    rows.add(prompt(0.5))
    assert values()[f"{ABOUT}: stock, TTFT of 4 layers"] == 0.5
    assert values()[f"{ABOUT}: run_prefill_*, time per layer"] == 0.04
    assert values()[f"{ABOUT}: forward_mha without run_prefill_*, time per layer"] == pytest.approx(0.01)
    assert values()[f"{ABOUT}: forward_mha, gathering, time per layer"] == 0.001
    assert values()[f"{ABOUT}: attention block without forward_mha, time per layer"] == 0.025
    assert values()[f"{ABOUT}: run_prefill_*'s share of forward_mha"] == pytest.approx(0.8)
    ttft = 61 * 0.1 + 0.1
    share = f"{CALCULATED}: run_prefill_*'s share of TTFT, matrix products in"
    assert values()[f"{share} bf16"] == pytest.approx(61 * 0.04 / ttft, rel=1e-3)
    assert f"{share} fp8" not in values()
    work = mla.Work.of(config, TOKENS, 8192)
    assert values()[f"{ABOUT}: run_prefill_*'s rate"] == pytest.approx(work.attention / 0.04, rel=1e-3)

    rows.add({"mla": "rates", "bf16": 600e12, "fp8": 1200e12})
    faster = ttft - 61 * work.linear / 1200e12
    assert values()[f"{share} fp8"] == pytest.approx(61 * 0.04 / faster, rel=1e-3)
    best = f"{CALCULATED}: highest TTFT speed-up, matrix products in fp8"
    assert values()[best] == pytest.approx(faster / (faster - 61 * 0.04), rel=1e-3)

    rows.add(prompt(0.7))
    rows.add(prompt(0.6))
    assert values()[f"{ABOUT}: stock, TTFT of 4 layers"] == 0.6


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let ``text`` run in place of the engine's Python."""
    path = tmp_path / "engine"
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(mla.sys, "executable", str(path))


LIMIT_S = 1000.0
TAKES_LONG = "import time\ntime.sleep(600)\n"


def test_parts_of_an_engine_that_hangs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over when it has written all of its output."""
    written = tmp_path / "written"

    class Timer(threading.Thread):
        def __init__(self, limit_s: float, stop: Callable[[], None]) -> None:
            super().__init__(daemon=True)
            self.stop, self.cancelled = stop, threading.Event()

        def run(self) -> None:
            while not written.exists():
                if self.cancelled.wait(0.01):
                    return
            self.stop()

        def cancel(self) -> None:
            self.cancelled.set()

    text = """print('INFO a line of vLLM')\nprint('{"mla": "rates", "bf16": 1}', flush=True)\n"""
    text += f"print('{{\"mla\"', end='', flush=True)\nopen({str(written)!r}, 'w').close()\n"
    script(tmp_path, monkeypatch, text + TAKES_LONG)
    monkeypatch.setattr(mla.threading, "Timer", Timer)
    parts: list[Mapping[str, Any]] = []
    problem = mla.run_engine(["folder", "512", "1", ""], tmp_path / "log", 2, parts.append)
    assert problem == "stopped after 2 s, when the budget (--budget-s) was used up"
    assert parts == [{"mla": "rates", "bf16": 1}]
    assert "a line of vLLM" in (tmp_path / "log").read_text()


def test_an_engine_is_stopped_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, TAKES_LONG)
    problem = mla.run_engine([], tmp_path / "log", 1, lambda part: None)
    assert problem == "stopped after 1 s, when the budget (--budget-s) was used up"


def test_an_engine_that_fails_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, "raise ValueError('no such backend')\n")
    problem = mla.run_engine([], tmp_path / "log", LIMIT_S, lambda part: None)
    assert problem == "ended with 1: ValueError: no such backend"
    assert "budget" in str(mla.run_engine([], tmp_path / "log", 0, lambda part: None))


def test_an_engine_is_stopped_if_its_parts_cannot_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that went on would end, and leave a file."""
    ended = tmp_path / "ended"
    text = """print('{"mla": "rates"}', flush=True)\nimport time\ntime.sleep(20)\n"""
    script(tmp_path, monkeypatch, text + f"open({str(ended)!r}, 'w').close()\n")

    def fail(part: Mapping[str, Any]) -> None:
        raise KeyError("bf16")

    with pytest.raises(KeyError, match="bf16"):
        mla.run_engine([], tmp_path / "log", LIMIT_S, fail)
    assert not ended.exists()


def test_a_shape_that_fails_does_not_stop_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_engine(
        arguments: Sequence[str], log: Path, limit_s: float, on_part: Callable[[Mapping[str, Any]], None]
    ) -> str | None:
        assert json.loads((Path(arguments[0]) / "config.json").read_text())["model_type"] == "deepseek_v3"
        if log.stem == "deepseek-r1":
            return "ended with 1: ValueError: no such backend"
        on_part(prompt(0.5))
        return None

    monkeypatch.setattr(mla, "run_engine", run_engine)
    command = ["measure", "--out", str(tmp_path / "out.json"), "--logs", str(tmp_path / "logs")]
    result = CliRunner().invoke(mla.app, command)
    assert result.exit_code == 1
    assert "deepseek-r1: ended with 1: ValueError: no such backend; its log: " in result.output
    assert f"{ABOUT}: stock, TTFT of 4 layers" in (tmp_path / "out.json").read_text()
    wrong = CliRunner().invoke(mla.app, ["measure", "--shape", "r1"])
    assert wrong.exit_code == 2
    assert "given r1, expected deepseek-r1 or kimi-k2" in " ".join(wrong.output.replace("│", "").split())


ENGINE = """import json, sys
kind = "stock" if not sys.argv[-1] else json.loads(sys.argv[-1])["method"]
print('{"mla": "start"}', flush=True)
pairs = 0
for line in sys.stdin:
    request = json.loads(line)
    seconds = request["tokens"] / 1e5 / {"stock": 1, "a_shape": 2, "top_p": 1.25}[kind]
    same = request["exact"] or kind == "stock"
    tokens = [request["seed"]] * request["new_tokens"] if same and kind != BROKEN else [7]
    pairs += 100
    print(json.dumps({"mla": "answer", "seconds": seconds, "token_ids": tokens,
                      "kept_pairs": pairs / 4, "causal_pairs": pairs}), flush=True)
"""
"""An engine that answers by these times, and with other tokens if its method is BROKEN."""


def test_engines_are_compared_by_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, ENGINE.replace("BROKEN", "'top_p'"))
    out = tmp_path / "out.json"
    command = ["compare", "--shape", "kimi-k2", "--out", str(out), "--logs", str(tmp_path / "logs"), "--repeats", "2"]
    result = CliRunner().invoke(mla.app, command)
    assert result.exit_code == 0, result.output
    values = {row["name"]: row["value"] for row in json.loads(out.read_text())}
    assert values[f"{ABOUT}: stock, TTFT of 4 layers"] == pytest.approx(TOKENS / 1e5, rel=1e-3)
    assert values[f"{ABOUT}: a_shape, TTFT speed-up of 4 layers"] == pytest.approx(2)
    assert values[f"{ABOUT}: top_p, TTFT speed-up of 4 layers"] == pytest.approx(1.25)
    assert values[f"{ABOUT}: a_shape, kept share of sparse rows' pairs"] == 0.25
    tokens = [values[f"{ABOUT}: {kind}, exact requests with stock's tokens"] for kind in ("a_shape", "top_p")]
    assert tokens == [1, 0]
    assert {int(row.split(" heads, ")[1].split(" ")[0].replace(",", "")) for row in values} == {16384, 65536, 131072}


@pytest.mark.parametrize(
    ("text", "budget_s", "says"),
    [
        ("raise ValueError('no such backend')\n", LIMIT_S, "an engine ended: .*ValueError: no such backend"),
        (TAKES_LONG, 1, "stopped, because the budget (--budget-s) was used up"),
    ],
)
def test_a_comparison_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, budget_s: float, says: str
) -> None:
    script(tmp_path, monkeypatch, text)
    command = ["compare", "--shape", "kimi-k2", "--budget-s", str(budget_s), "--logs", str(tmp_path / "logs")]
    result = CliRunner().invoke(mla.app, command)
    assert result.exit_code == 1
    assert re.search(says.replace("(", r"\(").replace(")", r"\)"), result.output), result.output


@pytest.mark.full
def test_stock_vllm_runs_a_small_model(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ["measure", "--small", "--shape", "kimi-k2", "--tokens", "256", "--repeats", "1", "--out", str(out)]
    result = CliRunner().invoke(mla.app, [*command, "--logs", str(tmp_path), "--budget-s", str(LIMIT_S)])
    assert result.exit_code == 0, result.output
    values = {row["name"]: row["value"] for row in json.loads(out.read_text())}
    about = "kimi-k2's shape, 2 heads, 256 tokens"
    assert 0 < values[f"{about}: run_prefill_*, time per layer"] < values[f"{about}: layer, time per layer"]
    assert 0 < values[f"{about}: layers' share of this TTFT"] < 1
