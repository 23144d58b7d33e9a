# SPDX-License-Identifier: Apache-2.0
"""The cost of the online guard relative to the attention that it checks, and the errors that it measures.

    python -m benchmarks.guard [--method NAME:FIELD=VALUE] [--results docs/results/production.json]

A check is the guard's work in one layer: FlashAttention for 128 queries over all of their keys (the chunk's last
queries, which have the most keys), the comparison of both outputs, and a copy of the sums to the host. It is compared
with FlashAttention, and with selection and attention of the whole chunk. The share at a rate is relative to attention
only; relative to a whole step it is smaller. The wall time of a check includes the host's work.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import typer
from rich.console import Console

from benchmarks.figures import Report
from benchmarks.options import CHUNK_TOKENS, Chunk, Contexts, Json, OneMethod, Results, layers_served, plan_asked
from tests.helpers.structured import structured_prompts
from vllm_sparse_backend.config.plan import DEFAULT, Plan
from vllm_sparse_backend.config.settings import GuardConfig
from vllm_sparse_backend.evaluation.attention_prompts import AttentionPrompt, Heads
from vllm_sparse_backend.evaluation.cuda_device import Card, Run, Span
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer, new_step
from vllm_sparse_backend.evaluation.report import table_of
from vllm_sparse_backend.serving.worker.guard import PROBE_TOKENS, Guard, squared_peaks
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.engine_trial import Batch

COLUMNS = {
    "context_len": "after",
    "engine": "engine",
    "dense_ms": "dense ms",
    "sparse_ms": "sparse ms",
    "check_ms": "check ms",
    "check_wall_ms": "check, wall ms",
    "share_of_dense": "check ÷ dense",
    "share_at_rate": "rate × check ÷ sparse",
    "error": "error",
    "worst_layer": "largest of a layer",
    "worst_queries": "largest of 128",
    "peak": "peak error",
    "peak_p99": "peak error, p99",
    "last_queries": "last 128",
}


class NoCounts:
    """A recorder that ignores counts."""

    def count(self, name: str, labels: Mapping[str, object], amount: float = 1) -> None:
        pass

    def gauge(self, name: str, labels: Mapping[str, object], value: float) -> None:
        pass


@dataclass
class Checked:
    """A layer during a pass, with a check of its last queries."""

    layer: TimedLayer
    dense: Run
    exact: torch.Tensor
    guard: Guard

    @staticmethod
    def of(layer: TimedLayer, card: Card, guard: Guard) -> "Checked":
        rows = layer.batch.rows
        (query_len,), (context_len,) = rows.query_lens, rows.context_lens
        number = min(PROBE_TOKENS, query_len)
        last = Rows((0,), (number,), (context_len + query_len - number,), rows.block_table)
        batch = Batch(layer.batch.q[-number:], layer.batch.cache, last, layer.batch.scale)
        exact = torch.empty_like(batch.q)
        return Checked(layer, card.dense(batch, exact), exact, guard)

    def run(self) -> None:
        self.dense()
        self.guard.compare((0, DEFAULT), self.layer.out[-len(self.exact) :], self.exact)


def run_guard(
    card: Card,
    prompts: Sequence[AttentionPrompt],
    plan: Plan,
    contexts: Sequence[int],
    query_len: int,
    name: str,
    report: Report,
    budget_s: float = 2.0,
) -> Iterator[dict[str, Any]]:
    """Measure a chunk after each context, and yield each case when it is reported. ``name`` names method and data."""
    settings = GuardConfig(bound=1e9)  # large enough that the guard never trips
    for context_len in contexts:
        engine, layers = layers_served(card, prompts, plan, context_len, query_len)
        outs = [torch.empty_like(layer.out) for layer in layers]
        dense = [card.dense(layer.batch, out) for layer, out in zip(layers, outs, strict=True)]
        for run, layer in zip(dense, layers, strict=True):
            run()
            layer.run(engine)
        row: dict[str, Any] = {"what": name, "engine": engine.name, "context_len": context_len, "query_len": query_len}
        row |= _errors([layer.out for layer in layers], outs)
        guard = Guard(settings, NoCounts())  # type: ignore[arg-type]
        checks = [Checked.of(layer, card, guard) for layer in layers]
        row |= _times(card, engine, dense, checks, budget_s)
        row["share_of_dense"] = row["check_ms"] / row["dense_ms"]
        row["share_at_rate"] = settings.rate * row["check_ms"] / row["sparse_ms"]
        report.add_case(row)
        figure = f"guard, {name}, after {context_len:,}: share of sparse attention's time at rate {settings.rate:g}"
        report.add_figure(figure, row["share_at_rate"], "share", "lower")
        yield row


def _times(
    card: Card, engine: AttendEngine, dense: Sequence[Run], checks: Sequence[Checked], budget_s: float
) -> dict[str, Any]:
    """Return the times per layer."""
    layers, clear = [check.layer for check in checks], new_step([check.layer for check in checks])

    def new_pass() -> None:
        clear()
        checks[0].guard.judge_arrived()

    contestants: list[list[Span]] = [
        [("dense", run) for run in dense],
        [("sparse", partial(layer.run, engine)) for layer in layers],
        [("check", check.run) for check in checks],
    ]
    taken = card.spans_ms(contestants, new_pass, budget_s)
    times = {f"{name}_ms": median(samples) / len(layers) for name, samples in taken.items()}
    wall = card.wall_ms({"check": [check.run for check in checks]})["check"]
    checks[0].guard.judge_arrived()
    return times | {"check_wall_ms": median(wall)}


def _errors(outs: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return errors over 128 queries at a time, as the guard computes them: mean, maximum of a layer, and maximum.

    Peak errors are those of single queries; 1 % of all checks have a larger peak error than ``peak_p99``.
    """
    by_layer = [
        [
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(out.split(PROBE_TOKENS), exact.split(PROBE_TOKENS), strict=True)
        ]
        for out, exact in zip(outs, dense, strict=True)
    ]
    means = [fmean(errors) for errors in by_layer]
    peaks = torch.tensor([peak for out, exact in zip(outs, dense, strict=True) for peak in _peaks(out, exact)])
    return {
        "error": fmean(means),
        "worst_layer": max(means),
        "worst_queries": max(map(max, by_layer)),
        "peak": float(peaks.max()),
        "peak_p99": float(peaks.quantile(0.99)),
        "last_queries": fmean(errors[-1] for errors in by_layer),
    }


def _peaks(out: torch.Tensor, dense: torch.Tensor) -> list[float]:
    """Return the peak error of each check of a layer."""
    squares = []
    for part, exact in zip(out.float().split(PROBE_TOKENS), dense.float().split(PROBE_TOKENS), strict=True):
        squares.append(squared_peaks((part - exact).square().sum(2), exact.square().sum(2)).max())
    return torch.stack(squares).sqrt().tolist()


def main(
    method: OneMethod = "",
    contexts: Contexts = "24576,122880",
    chunk: Chunk = CHUNK_TOKENS,
    json_path: Json = None,
    results: Results = None,
) -> None:
    card, lengths, heads = Card(), [int(n) for n in contexts.split(",")], Heads()
    prompts = structured_prompts(heads, max(lengths) + chunk, 2, card.device)
    label, plan = plan_asked(method, heads.model(2))
    report = Report("guard", card.name, json_path, results)
    name = f"{label}, structured"
    rows = list(run_guard(card, prompts, plan, lengths, chunk, name, report))
    Console(width=180).print(table_of(f"guard against {card.dense_name}, {card.name}, {name}", COLUMNS, rows))


if __name__ == "__main__":
    typer.run(main)
