# SPDX-License-Identifier: Apache-2.0
"""The cost of counting relative to the step that is counted.

    python -m benchmarks.metrics [--method NAME:FIELD=VALUE] [--results docs/results/production.json]

A step is a chunk's selection, attention and projections in each layer of an 8B model. Norms, sampling and the engine's
work between steps are left out, so the shares are larger than on a server. Counting is timed separately, on the device
and on the host, and so is the host's time to launch the step. The slower of the two determines the length of a step,
and thus the time that counting adds to it. In addition, the host counts the rows of each step; for a step of decodes,
it counts nothing else. The length of such a step is the time to read an 8B model's weights once, at this card's copying
speed, and the host is assumed to be slower there.
"""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import typer
from rich.console import Console

from benchmarks.figures import Report
from benchmarks.options import CHUNK_TOKENS, Chunk, Contexts, Json, OneMethod, Results, layers_served, plan_asked
from benchmarks.shape import SHAPE
from tests.helpers.structured import structured_prompts
from vllm_sparse_backend.config.plan import DEFAULT, Plan
from vllm_sparse_backend.evaluation.attention_prompts import AttentionPrompt, Heads
from vllm_sparse_backend.evaluation.cuda_device import Card, Run
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer, new_step
from vllm_sparse_backend.evaluation.report import table_of
from vllm_sparse_backend.serving.worker.counters import DECODE, Recorder

COLUMNS = {
    "what": "step",
    "engine": "engine",
    "layer_ms": "a layer of it, ms",
    "step_ms": "whole, ms",
    "launched_ms": "launched in, ms",
    "device_us": "counting, device, µs",
    "host_us": "host, µs",
    "share_of_device": "device's share of the step",
    "share_of_host": "host's",
    "longer": "a step gets longer by",
}

DECODE_ROW = (DECODE, None, "")
NUM_LAYERS = 32
DECODES = 256
HOST_CALLS = 100
LAUNCH_CALLS = 5
"""Number of calls with many launches. With more, the host would wait for room in the launch queue."""
WEIGHT_BYTES = 16e9
"""Bytes of an 8B model in 16 bits."""


def host_us(card: Card, run: Run, calls: int = HOST_CALLS) -> float:
    """Return the host's time per call. Launched work is awaited between samples and not timed."""
    taken = []
    for _ in range(7):
        card.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        taken.append((time.perf_counter() - began) / calls)
    card.synchronize()
    return median(taken) * 1e6


def projections(heads: Heads, tokens: int, device: torch.device, hidden: int, inner: int) -> list[Run]:
    """Return a layer's matrix products with random weights."""
    wide = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    sizes = [(hidden, wide), (heads.num_heads * heads.head_dim, hidden), (hidden, 2 * inner), (inner, hidden)]

    def product(rows: int, columns: int) -> Run:
        x = torch.randn(tokens, rows, device=device, dtype=heads.dtype)
        weight = torch.randn(rows, columns, device=device, dtype=heads.dtype)
        return lambda: x @ weight

    return [product(*size) for size in sizes]


def counting(recorder: Recorder, number: int, layer: TimedLayer) -> Run:
    """Return a function that counts a layer's call as a server does."""
    return lambda: recorder.count_pairs(number, layer.index)


def run_prefill(
    card: Card,
    prompts: Sequence[AttentionPrompt],
    named_plan: tuple[str, Plan],
    context_len: int,
    query_len: int,
    products: Sequence[Run],
    report: Report,
    budget_s: float = 2.0,
) -> dict[str, Any]:
    """Measure a chunk after a context. ``named_plan`` is the name of the method in the figures, and its plan."""
    name, plan = named_plan
    engine, layers = layers_served(card, prompts, plan, context_len, query_len)
    for layer in layers:
        layer.select()
    recorder = Recorder(card.device)
    recorder.add_layers(range(NUM_LAYERS))  # as many layers as on a server
    counts = [counting(recorder, number, layer) for number, layer in enumerate(layers)]
    step = [partial(layer.run, engine) for layer in layers] + [run for run in products for _ in layers]
    spans = [[("layer", run) for run in step], [("count", run) for run in counts]]
    taken = {span: median(ms) / len(layers) for span, ms in card.spans_ms(spans, new_step(layers), budget_s).items()}
    rows_us = host_us(card, lambda: recorder.count_rows(("sparse", None, DEFAULT)))
    row: dict[str, Any] = {"what": f"{query_len:,} tokens after {context_len:,}", "engine": engine.name}
    row |= {"layer_ms": taken["layer"], "step_ms": taken["layer"] * NUM_LAYERS}
    row["device_us"] = 1e3 * NUM_LAYERS * taken["count"]
    row["host_us"] = rows_us + NUM_LAYERS * median(host_us(card, run) for run in counts)
    launched_us = sum(host_us(card, run, LAUNCH_CALLS) for run in step) / len(layers)
    row["launched_ms"] = launched_us / 1e3 * NUM_LAYERS
    _report(report, row, f"metrics, {name}, after {context_len:,}")
    return row


def run_decodes(card: Card, step_ms: float, report: Report) -> dict[str, Any]:
    """Measure a step of ``DECODES`` requests."""
    recorder = Recorder(card.device)
    row: dict[str, Any] = {"what": f"{DECODES} decodes", "step_ms": step_ms, "launched_ms": step_ms, "device_us": 0.0}
    row["host_us"] = host_us(card, lambda: recorder.count_rows(DECODE_ROW, DECODES))
    _report(report, row, f"metrics, a step of {DECODES} decodes")
    return row


def _report(report: Report, row: dict[str, Any], about: str) -> None:
    row["share_of_device"] = row["device_us"] / 1e3 / row["step_ms"]
    row["share_of_host"] = row["host_us"] / 1e3 / row["step_ms"]
    without = max(row["step_ms"], row["launched_ms"])
    counted = max(row["step_ms"] + row["device_us"] / 1e3, row["launched_ms"] + row["host_us"] / 1e3)
    row["longer"] = counted / without - 1
    report.add_case(row)
    report.add_figure(f"{about}: device's share of a step", row["share_of_device"], "share", "lower", 0.005)
    report.add_figure(f"{about}: host's share of a step", row["share_of_host"], "share", "lower", 0.005)
    report.add_figure(f"{about}: added time of a step", row["longer"], "share", "lower", 0.005)


def copied_ms(card: Card, num_bytes: float) -> float:
    """Return the time in ms in which this card reads this many bytes: half the time of a copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    ms = median(card.spans_ms([[("copy", lambda: target.copy_(source))]], budget_s=0.5)["copy"])
    return ms / 2 * num_bytes / source.numel()


def main(
    method: OneMethod = "",
    contexts: Contexts = "24576,122880",
    chunk: Chunk = CHUNK_TOKENS,
    json_path: Json = None,
    results: Results = None,
) -> None:
    card, lengths, heads = Card(), [int(n) for n in contexts.split(",")], Heads()
    prompts = structured_prompts(heads, max(lengths) + chunk, 2, card.device)
    named_plan = plan_asked(method, heads.model(2))
    report = Report("metrics", card.name, json_path, results)
    products = projections(heads, chunk, card.device, SHAPE["hidden_size"], SHAPE["intermediate_size"])
    rows = [run_prefill(card, prompts, named_plan, length, chunk, products, report) for length in lengths]
    rows.append(run_decodes(card, copied_ms(card, WEIGHT_BYTES), report))
    Console(width=180).print(table_of(f"counting compared with the counted work, {card.name}", COLUMNS, rows))


if __name__ == "__main__":
    typer.run(main)
