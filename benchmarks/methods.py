# SPDX-License-Identifier: Apache-2.0
"""Times of whole methods (selection and attention) against FlashAttention on the same chunk, and their output errors.

    python -m benchmarks.methods [--method NAME:FIELD=VALUE] [--profile NAME] [--captured FOLDER] [--kv-cache-dtype fp8]

Data is a capture, or normal with planted keys (``planted_prompt``): a tenth of the keys has nearly all of the mass.
A chunk is prefilled after its context through all layers of the data, as on a server: a pass has one set of rows, and
its layers follow each other. Times are device times, summed over layers. The output's error is ‖O − Õ‖₂ / ‖O‖₂ of the
chunk relative to FlashAttention's output, mean over layers, including rounding to bf16.

With an fp8 cache, the method and FlashAttention run on fp8, and errors are relative to results on the unrounded bf16
data: the output's error relative to FlashAttention on bf16, next to the error of FlashAttention on fp8; and the effect
of fp8 on a method, relative to the same method on bf16, including its selection.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import typer

from benchmarks.attention_check import Check, check_attention
from benchmarks.captured_prompts import captured_prompts, plan_of_profile
from benchmarks.figures import Report
from benchmarks.method_specs import MethodSpec, methods_named
from benchmarks.options import (
    Chunk,
    Contexts,
    Engines,
    Json,
    Methods,
    Model,
    Page,
    Results,
    difference,
    engines_named,
    is_default,
    show,
)
from vllm_sparse_backend.calibration.capture import Capture
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.cli.common import failures, split, token_counts
from vllm_sparse_backend.config.errors import not_one_of
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import name_of_profile
from vllm_sparse_backend.evaluation.attention_prompts import AttentionPrompt, Heads, planted_prompt
from vllm_sparse_backend.evaluation.cuda_device import Card, Run
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.paged import FP8, PagedCache

COLUMNS = {
    "method": "method",
    "engine": "engine",
    "context_len": "after",
    "density": "density",
    "output_error": "output error",
    "dense_ms": "dense ms",
    "select_share": "select ÷ dense",
    "attend_share": "attend ÷ dense",
    "whole_share": "whole ÷ dense",
    "times_faster": "times faster",
    "index_mib": "index, MiB",
    "problem": "not timed",
}
FP8_COLUMNS = {
    **COLUMNS,
    "stock_error": "dense's error",
    "fp8_error": "error by fp8",
    "fp8_ratio": "by fp8 ÷ dense's",
}


@dataclass(frozen=True)
class Inputs:
    """Prompts on which methods are measured."""

    name: str
    prompts: Sequence[AttentionPrompt]
    """Prompts by layer."""
    unrounded: Sequence[AttentionPrompt] = ()
    """The prompts before they were rounded to fp8."""


def layers_of(
    prompts: Sequence[AttentionPrompt], plan: Sequence[LayerPlan | None], context_len: int, query_len: int, engine: str
) -> list[TimedLayer]:
    """Return the chunk in each layer as one step, in which all layers share rows. ``plan`` has no dense layer."""
    rows = prompts[0].chunk(context_len, query_len).rows
    chunks = [replace(prompt.chunk(context_len, query_len), rows=rows) for prompt in prompts]
    return [TimedLayer.of(chunk, layer, engine) for chunk, layer in zip(chunks, plan, strict=True) if layer is not None]


def run_methods(
    card: Card,
    inputs: Inputs,
    plans: Sequence[tuple[MethodSpec | str, Plan]],
    contexts: Sequence[int],
    query_len: int,
    engines: Sequence[str],
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Measure each method after each context with each engine, and yield each case when it is reported."""
    prompts, unrounded = inputs.prompts, inputs.unrounded
    for context_len in contexts:
        chunks = [prompt.chunk(context_len, query_len) for prompt in prompts]
        dense_outs = [chunk.empty_out() for chunk in chunks]
        dense = [card.dense(chunk, out) for chunk, out in zip(chunks, dense_outs, strict=True)]
        for run in dense:
            run()
        truths = [_dense_out(card, prompt.chunk(context_len, query_len)) for prompt in unrounded] or dense_outs
        for method, plan in plans:
            for engine in (card.engines[name] for name in engines):
                layers = layers_of(prompts, plan.layers, context_len, query_len, engine.name)
                row = {"data": inputs.name, "method": str(method), "engine": engine.name, "context_len": context_len}
                row["query_len"] = query_len
                if why := next((w for layer in layers if (w := layer.refusal(engine))), None):
                    row["problem"] = why
                else:
                    _measure(card, layers, engine, dense, truths, row)
                    if unrounded:
                        row["stock_error"] = fmean(map(difference, dense_outs, truths))
                        exact = layers_of(unrounded, plan.layers, context_len, query_len, engine.name)
                        _add_fp8_error(layers, exact, engine, row)
                report.add_case(row)
                if "problem" not in row:
                    first = layers[0]
                    default = is_default(card.engines, engine.name, first.batch.cache, first.index, first.options)
                    _add_figures(report, row, default, card.dense_name)
                yield row


def _dense_out(card: Card, batch: Batch) -> torch.Tensor:
    out = batch.empty_out()
    card.dense(batch, out)()
    return out


def _add_fp8_error(
    layers: Sequence[TimedLayer], exact: Sequence[TimedLayer], engine: AttendEngine, row: dict[str, Any]
) -> None:
    """Add the effect of the cache's rounding on the method. ``layers`` have run; ``exact`` are the same in bf16."""
    exact[0].batch.rows.state.clear()
    for layer in exact:
        layer.run(engine)
    row["fp8_error"] = fmean(difference(a.out, b.out) for a, b in zip(layers, exact, strict=True))
    row["fp8_ratio"] = row["fp8_error"] / row["stock_error"]


def _measure(
    card: Card,
    layers: Sequence[TimedLayer],
    engine: AttendEngine,
    dense: Sequence[Run],
    truths: Sequence[torch.Tensor],
    row: dict[str, Any],
) -> None:
    layers[0].batch.rows.state.clear()
    checks: list[Check] = []
    for layer in layers:
        layer.run(engine)
        if layer.options is None:  # with options the result is an approximation beyond rounding
            checks.append(check_attention(layer.batch, layer.index, layer.out))
    kept = sum(int(layer.index.kept_pairs()) for layer in layers)
    row["density"] = kept / sum(layer.batch.num_heads * causal_pairs(layer.batch.rows) for layer in layers)
    row["output_error"] = fmean(difference(layer.out, truth) for layer, truth in zip(layers, truths, strict=True))
    row["index_mib"] = max(layer.index.workspace.peak_bytes for layer in layers) / 2**20
    if failed := [check for check in checks if not check.passed]:
        row["problem"] = str(failed[0])
        return
    ours = [span for layer in layers for span in (("select", layer.select), ("attend", partial(layer.attend, engine)))]
    taken = card.spans_ms([[("dense", run) for run in dense], ours], layers[0].batch.rows.state.clear)
    dense_ms, select_ms, attend_ms = (median(taken[name]) / len(layers) for name in ("dense", "select", "attend"))
    whole_ms = median(s + a for s, a in zip(taken["select"], taken["attend"], strict=True)) / len(layers)
    row |= {"dense_ms": dense_ms, "select_ms": select_ms, "attend_ms": attend_ms, "whole_ms": whole_ms}
    row |= {"select_share": select_ms / dense_ms, "attend_share": attend_ms / dense_ms}
    row |= {"whole_share": whole_ms / dense_ms, "times_faster": dense_ms / whole_ms}


def _add_figures(report: Report, row: dict[str, Any], is_default: bool, dense_name: str) -> None:
    of_engine = "" if is_default else f", {row['engine']}"
    after, data = f"after {row['context_len']:,}", row["data"]
    on_data = "" if data == "planted" else f", {data}"
    report.add_figure(
        f"selection, {row['method']}{on_data}, chunk {after}: share of {dense_name}", row["select_share"], "share",
        "lower",
    )  # fmt: skip
    whole = f"whole method, {row['method']}{of_engine}, {data}, {after}"
    report.add_figure(f"{whole}: times faster", row["times_faster"], "ratio", "higher")
    report.add_figure(f"{whole}: density", row["density"], "share", "lower")
    report.add_figure(f"{whole}: output error", row["output_error"], "relative", "lower")
    if "fp8_ratio" in row:
        report.add_figure(f"{whole}: error by fp8 over dense's", row["fp8_ratio"], "ratio", "lower")


def in_fp8(batch: Batch) -> Batch:
    """Return the batch rounded to fp8 with scales of 1, as on a server whose checkpoint has no scales."""
    most = torch.finfo(FP8).max
    pairs = torch.stack((batch.cache.keys, batch.cache.values), 3).flatten(3)
    q, pairs = (x.float().clamp(-most, most).to(FP8) for x in (batch.q, pairs))
    return replace(batch, q=q, cache=PagedCache(*pairs.split(batch.cache.head_dim, -1)), out_dtype=batch.q.dtype)


def of_capture(
    folder: Path, num_heads: int, texts: Sequence[str], profiles: Sequence[str], card: Card
) -> tuple[list[AttentionPrompt], list[tuple[MethodSpec | str, Plan]], str]:
    """Return (prompts by layer, plans for their heads, name of the model)."""
    capture = Capture.open(folder)
    copies, layers = (
        max(1, num_heads // capture.shape.num_heads),
        sorted(capture.scales),
    )  # the capture lacks other layers
    shape = replace(
        capture.shape, num_layers=len(layers), num_heads=capture.shape.num_heads * copies,
        num_kv_heads=capture.shape.num_kv_heads * copies,
    )  # fmt: skip
    specs = methods_named(texts) if texts or not profiles else []
    plans: list[tuple[MethodSpec | str, Plan]] = [(spec, spec.plan(shape)) for spec in specs]
    plans += [
        (f"profile {name_of_profile(name)}", plan_of_profile(name, capture.shape, copies, layers)) for name in profiles
    ]
    return captured_prompts(capture, copies, card.device), plans, capture.model


@dataclass(frozen=True, kw_only=True)
class MeasureMethods:
    """Measure whole methods against dense attention."""

    method: Methods = None
    profile: Annotated[list[str] | None, typer.Option(help="Profile of the capture's model; repeatable.")] = None
    captured: Annotated[Path | None, typer.Option(help="Folder of `benchmarks.capture`. Default: planted keys.")] = None
    contexts: Contexts = "24576,122880"
    chunk: Chunk = 8192
    layers: Annotated[int, typer.Option(help="Layers of planted keys, all different.", min=1)] = 2
    repeat_heads: Annotated[int, typer.Option(help="Number of heads to which captured heads are repeated.")] = 32
    engines: Engines = ""
    model: Model = None
    page_size: Page = 128
    kv_cache_dtype: Annotated[str, typer.Option(help="dtype of the cache: auto, or fp8 (with fp8 queries).")] = "auto"
    json_path: Json = None
    results: Results = None

    def run(self) -> None:
        """Measure, and show the results."""
        with failures():
            if self.kv_cache_dtype not in (known := ("auto", "fp8")):
                raise BenchError(f"--kv-cache-dtype: {not_one_of(self.kv_cache_dtype, known)}")
            if self.profile and self.captured is None:
                raise BenchError("--profile: given without --captured, expected a capture of the profile's model")
            is_fp8, lengths = self.kv_cache_dtype == "fp8", token_counts("--contexts", self.contexts, least=0)
            card, heads = Card(), Heads.of(self.model, self.page_size)
            texts, profiles = self.method or (), self.profile or ()
            plans: list[tuple[MethodSpec | str, Plan]]
            if self.captured is not None:
                prompts, plans, name = of_capture(self.captured, self.repeat_heads, texts, profiles, card)
            else:
                name, num_tokens = "planted", max(lengths) + self.chunk
                prompts = [planted_prompt(heads, num_tokens, card.device, seed) for seed in range(self.layers)]
                plans = [(spec, spec.plan(heads.model(self.layers))) for spec in methods_named(texts)]
            data = f"{name} in fp8" if is_fp8 else name
            report = Report("methods", card.name, self.json_path, self.results)
            engines = engines_named(card, split(self.engines))
            measured = [AttentionPrompt(in_fp8(prompt.whole)) for prompt in prompts] if is_fp8 else prompts
            inputs = Inputs(data, measured, prompts if is_fp8 else ())
            rows = run_methods(card, inputs, plans, lengths, self.chunk, engines, report)
            title = f"methods against {card.dense_name}, {card.name}, {data}, chunk of {self.chunk:,}"
            show(title, FP8_COLUMNS if is_fp8 else COLUMNS, rows)


if __name__ == "__main__":
    run_alone(MeasureMethods)
