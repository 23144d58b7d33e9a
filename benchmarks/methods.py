# SPDX-License-Identifier: Apache-2.0
"""Times of whole methods (selection and attention) against FlashAttention on the same chunk, and their output errors.

    python -m benchmarks.methods [--method NAME:FIELD=VALUE] [--captured MODEL] [--profile NAME] [--kv-cache-dtype fp8]

Data is a model's on a text, or normal with planted keys (``planted_prompt``): a tenth of the keys has nearly all of the
mass. A chunk is prefilled after its context through all layers of the data, as on a server: a pass has one set of rows,
and its layers follow each other, on the engine that a server would use. Times are device times, summed over layers. The
output's error is ‖O − Õ‖₂ / ‖O‖₂ of the chunk relative to FlashAttention's output, mean over layers, including rounding
to bf16.

With an fp8 cache, the method and FlashAttention run on fp8, and errors are relative to results on the unrounded bf16
data: the output's error relative to FlashAttention on bf16, next to the error of FlashAttention on fp8; and the effect
of fp8 on a method, relative to the same method on bf16, including its selection.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.attention_check import check_attention
from benchmarks.attention_prompts import Heads, chunk_of, planted_prompt
from benchmarks.captured_prompts import capture_model
from benchmarks.figures import FigureReport
from benchmarks.options import ChunkOptions, difference, numbers, run_alone, show
from vllm_sparse_backend.calibration.capture import default_text
from vllm_sparse_backend.calibration.costs import TimedLayer
from vllm_sparse_backend.calibration.cuda_device import Card, Span
from vllm_sparse_backend.cli.common import failures
from vllm_sparse_backend.config.method_parameters import changed_fields, make_method
from vllm_sparse_backend.config.plan import layer_plans
from vllm_sparse_backend.config.profile import name_of_profile
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import FP8, PagedCache

PLANTED_LAYERS = 2
"""Layers of planted keys, all different."""

PASSES = 16
"""Measured passes of a case."""

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
    prompts: Sequence[Batch]
    """Prompts by layer."""
    unrounded: Sequence[Batch]
    """The prompts before they were rounded to fp8; empty without rounding."""


def parse_method(text: str) -> Method:
    """Parse a text such as ``anchor_attention:theta=9``, or a name. Raises BenchError for anything else."""
    name, _, fields = text.partition(":")
    pairs = [part.partition("=") for part in fields.split(",") if part]
    try:
        return make_method(name.strip(), {field.strip(): json.loads(value) for field, _, value in pairs})
    except ValueError as error:
        expected = "expected NAME or NAME:FIELD=NUMBER,FIELD=NUMBER"
        raise BenchError(f"--method: given {text!r}: {error}; {expected}") from None


def figure_name(method: Method) -> str:
    """Return a method's name with the parameters that differ from its defaults."""
    params = changed_fields(method).items()
    values = [f"{name}={f'{x:g}' if isinstance(x, float) else json.dumps(x)}" for name, x in params]
    return " ".join([name_of(method), *values])


def methods_named(texts: Sequence[str]) -> list[Method]:
    """Return the named methods; without names, all methods at their defaults."""
    if texts:
        return [parse_method(text) for text in texts]
    # share_prefill runs with a profile only.
    return [spec.parameters() for name, spec in METHODS.items() if name not in ("dense", "share_prefill")]


def run_methods(
    card: Card,
    inputs: Inputs,
    plans: Mapping[str, Sequence[LayerPlan | None]],
    contexts: Sequence[int],
    query_len: int,
    report: FigureReport,
) -> Iterator[dict[str, Any]]:
    """Measure each method after each context, and yield each case when it is reported."""
    for context_len in contexts:
        chunks = chunks_of(inputs.prompts, context_len, query_len)
        dense_outs = dense_outputs(card, chunks)
        unrounded = chunks_of(inputs.unrounded, context_len, query_len)
        truths = dense_outputs(card, unrounded) or dense_outs
        for method, plan in plans.items():
            layers = layers_of(card, chunks, plan)
            _run_layers(layers)
            kept_pairs = sum(int(layer.call.index.kept_pairs()) for layer in layers)
            row: dict[str, Any] = {
                "data": inputs.name,
                "method": method,
                "engine": layers[0].served.engine.name,
                "context_len": context_len,
                "density": kept_pairs / sum(chunk.num_heads * causal_pairs(chunk.rows) for chunk in chunks),
                "output_error": fmean(difference(layer.out, truth) for layer, truth in zip(layers, truths)),
                "index_mib": max(layer.call.index.workspace.peak_bytes for layer in layers) / 2**20,
            }
            if unrounded:
                exact = layers_of(card, unrounded, plan)
                _run_layers(exact)
                stock_error = fmean(map(difference, dense_outs, truths))
                fp8_error = fmean(difference(a.out, b.out) for a, b in zip(layers, exact))
                row |= {"stock_error": stock_error, "fp8_error": fp8_error, "fp8_ratio": fp8_error / stock_error}
            if (problem := wrong_attention(layers)) is None:
                row |= _times(card, layers, chunks)
                _add_figures(report, row, f"FlashAttention-{card.flash_version}")
            else:
                row["problem"] = problem
            report.add_case(row)
            yield row


def chunks_of(prompts: Sequence[Batch], context_len: int, query_len: int) -> list[Batch]:
    """Return the chunk in each layer as one step, in which all layers share rows."""
    chunks = [chunk_of(prompt, context_len, query_len) for prompt in prompts]
    return [replace(chunk, rows=chunks[0].rows) for chunk in chunks]


def dense_outputs(card: Card, chunks: Sequence[Batch]) -> list[torch.Tensor]:
    outs = [chunk.empty_out() for chunk in chunks]
    for chunk, out in zip(chunks, outs):
        card.dense(chunk, out)()
    return outs


def layers_of(card: Card, chunks: Sequence[Batch], plan: Sequence[LayerPlan | None]) -> list[TimedLayer]:
    """Return the layers of a plan without dense layers."""
    layers = zip(chunks, plan, strict=True)
    return [TimedLayer.of(chunk, layer, card.engines) for chunk, layer in layers if layer]


def _run_layers(layers: Sequence[TimedLayer]) -> None:
    layers[0].batch.rows.state.clear()
    for layer in layers:
        layer.select()
        layer.attend()


def wrong_attention(layers: Sequence[TimedLayer]) -> str | None:
    """Return why a layer's attention is wrong. With options, it is an approximation beyond rounding."""
    checks = [
        check_attention(layer.batch, layer.call.index, layer.out) for layer in layers if layer.served.options is None
    ]
    return next((str(check) for check in checks if not check.passed), None)


def _times(card: Card, layers: Sequence[TimedLayer], chunks: Sequence[Batch]) -> dict[str, float]:
    """Return the times of a layer in ms, and relative to FlashAttention's."""
    ours: list[Span] = []
    for layer in layers:
        ours += [("select", layer.select), ("attend", layer.attend)]
    dense: list[Span] = [("dense", card.dense(chunk, chunk.empty_out())) for chunk in chunks]
    taken = card.spans_ms([dense, ours], chunks[0].rows.state.clear, PASSES)
    taken["whole"] = [select + attend for select, attend in zip(taken["select"], taken["attend"])]
    ms = {name: median(passes) / len(layers) for name, passes in taken.items()}
    shares = {f"{name}_share": ms[name] / ms["dense"] for name in ("select", "attend", "whole")}
    return {f"{name}_ms": value for name, value in ms.items()} | shares | {"times_faster": ms["dense"] / ms["whole"]}


def _add_figures(report: FigureReport, row: dict[str, Any], dense_name: str) -> None:
    after, data, method = f"after {row['context_len']:,}", row["data"], row["method"]
    selection = f"selection, {method}, {data}, chunk {after}: share of {dense_name}"
    report.add_figure(selection, row["select_share"], "share", "lower")
    whole = f"whole method, {method}, {data}, {after}"
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


@dataclass(frozen=True, kw_only=True)
class MeasureMethods(ChunkOptions):
    """Measure whole methods against dense attention."""

    method: Annotated[list[str] | None, typer.Option(help="NAME or NAME:FIELD=VALUE,…; repeatable. Default: all.")] = (
        None
    )
    captured: Annotated[Path | None, typer.Option(help="Model whose attention is measured. Default: planted keys.")] = (
        None
    )
    text: Annotated[Path | None, typer.Option(help="Text file, or folder of *.py. Default: vLLM's sources.")] = None
    skip: Annotated[int, typer.Option(help="Tokens of the text to leave out before the prompt.", min=0)] = 0
    profile: Annotated[list[str] | None, typer.Option(help="Profile of the captured model; repeatable.")] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], typer.Option(help="dtype of the cache: auto, or fp8 (with fp8 queries).")
    ] = "auto"

    def run(self) -> None:
        """Measure, and show the results."""
        with failures():
            if self.profile and self.captured is None:
                raise BenchError("--profile: given without --captured, expected the profile's model")
            is_fp8, lengths = self.kv_cache_dtype == "fp8", numbers(self.contexts)
            card, num_tokens = Card(), max(lengths) + self.chunk
            methods = methods_named(self.method or ()) if self.method or not self.profile else []
            of_profiles: dict[str, list[list[Method]]] = {}
            if self.captured is None:
                prompts = [planted_prompt(Heads(), num_tokens, card.device, seed) for seed in range(PLANTED_LAYERS)]
                name = "planted"
            else:
                text = self.text or default_text()
                captured = capture_model(self.captured, text, self.skip, num_tokens, card.device)
                prompts, name = list(captured.prompts), self.captured.name
                for profile in self.profile or ():
                    of_profiles[f"profile {name_of_profile(profile)}"] = captured.methods_of_profile(profile)
            of_methods = {figure_name(method): [[method] * prompts[0].num_heads] * len(prompts) for method in methods}
            plans = {label: layer_plans(heads) for label, heads in (of_methods | of_profiles).items()}
            report = self.report("methods", card)
            inputs = Inputs(name, prompts, ())
            if is_fp8:
                inputs = Inputs(f"{name} in fp8", [in_fp8(prompt) for prompt in prompts], prompts)
            rows = run_methods(card, inputs, plans, lengths, self.chunk, report)
            about = f"{report.device}, {inputs.name}, chunk of {self.chunk:,}"
            show(
                f"methods against FlashAttention-{card.flash_version}, {about}",
                rows,
                FP8_COLUMNS if is_fp8 else COLUMNS,
            )


if __name__ == "__main__":
    run_alone(MeasureMethods)
