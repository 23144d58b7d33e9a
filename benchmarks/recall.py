# SPDX-License-Identifier: Apache-2.0
"""Measures methods on a model's own attention: recall (also of single queries), density and output error.

    python -m benchmarks.capture MODEL CAPTURE --tokens 32768
    python -m benchmarks.recall CAPTURE [--method sale] [--chunks 2048,8192,0]

Methods select on captured queries and keys as on a server, chunk by chunk, and are compared with exact attention layer
by layer. Errors of earlier layers do not accumulate here. SharePrefill's clusters come from ``--clusters``, a capture
of another prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import Report
from benchmarks.method_specs import Clusters, MethodSpec, methods_named
from benchmarks.options import Clusters as ClustersOption, Device, Json, Methods, Results, device_label
from benchmarks.plan_quality import PlanQuality, PlanRequest, measure_plans
from vllm_sparse_backend.calibration.capture import Capture
from vllm_sparse_backend.calibration.head_clusters import head_clusters
from vllm_sparse_backend.cli.common import device_of, failures, token_counts, wide_console
from vllm_sparse_backend.evaluation.report import BenchError, table_of

Figures = dict[str, Any]
"""Figures of one prompt with one chunk size."""

EXPLAINED = (
    "Lowest layer: mean recall of its heads. Best 64s, best keys: density at which blocks of 64 keys, or single keys, "
    "chosen with knowledge of the exact attention would reach the same mean recall."
)
QUERIES_EXPLAINED = (
    "Hundredth, thousandth, worst: of all layers' and heads' queries, so many have no more recall. Density (paper): at "
    "the granularity of the method's paper, if that is finer than the computed granularity and known."
)
LOWEST = ("hundredth", "thousandth", "worst")
"""Names of ``plan_quality.QUANTILES``."""


def measure(
    captured: Capture, methods: Sequence[MethodSpec], clusters: Clusters | None, chunk_tokens: int, device: str
) -> Figures:
    """Return one prompt's figures."""
    requests, ran, left_out = [], [], {}
    for method in methods:
        try:
            requests.append(PlanRequest(method.plan(captured.shape, clusters), with_output=True, with_queries=True))
        except BenchError as error:
            left_out[method.method] = str(error)
            continue
        ran.append(method)
    measured = measure_plans(captured, requests, chunk_tokens, device)
    return {
        "model": captured.model,
        "num_tokens": captured.num_tokens,
        "chunk_tokens": chunk_tokens,
        "prompt_sha256": captured.prompt_sha256,
        "layers": measured.layers,
        "layers_left_out": captured.left_out,
        "methods_left_out": left_out,
        "clusters": clusters,
        "bounds": {str(n): dict(zip(("density", "recall"), bound.curve())) for n, bound in measured.bounds.items()},
        "settings": [_figures(method, kept) for method, kept in zip(ran, measured.kept, strict=True)],
    }


def _figures(method: MethodSpec, kept: PlanQuality) -> Figures:
    row: Figures = {"method": method.method, "params": dict(method.params), "name": str(method)}
    row |= {"recall": kept.mean_recall, "density": kept.mean_density}
    row |= {"recall_of_heads": _rounded(kept.recall), "density_of_heads": _rounded(kept.density)}
    row |= {"output_error": kept.mean_error, "output_error_of_layers": _rounded([kept.output_error])[0]}
    return row | _of_queries(kept)


def _of_queries(kept: PlanQuality) -> Figures:
    lowest = {
        f"{name}_of_heads": _rounded([[head[i] for head in layer] for layer in kept.lowest_recalls])
        for i, name in enumerate(LOWEST)
    }
    return dict(zip(LOWEST, kept.quantiles(), strict=True)) | lowest | {"paper_density": kept.mean_paper_density}


def _rounded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(x, 4) for x in row] for row in rows]


def add_figures(figures: Figures, report: Report) -> None:
    """Add rows of a results file."""
    for row in figures["settings"]:
        at = "" if row["params"] else " at the method's defaults"
        what = f"{row['name']}, {length_name(figures)}, {figures['model']}"
        report.add_figure(f"{what}: recall{at}", row["recall"], "share", "higher")
        report.add_figure(f"{what}: density{at}", row["density"], "share", "lower")
        report.add_figure(f"{what}: relative error of the output", row["output_error"], "relative", "lower")
        report.add_figure(f"{what}: recall of the worst thousandth{at}", row[LOWEST[1]], "share", "higher")


def length_name(figures: dict[str, Any]) -> str:
    """Return a name such as 32K for 32,768 tokens, with the chunk size if it is not vLLM's default."""
    tokens, chunk = figures["num_tokens"], figures["chunk_tokens"]
    name = f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
    alike = min(chunk, tokens) == min(8192, tokens)
    return name if alike else f"{name} in chunks of {chunk:,}"


def table_rows(figures: Figures) -> list[dict[str, str]]:
    """Return a row of texts for each setting, by heading."""
    rows = []
    for row in figures["settings"]:
        by_layer = [sum(heads) / len(heads) for heads in row["recall_of_heads"]]
        lowest, known = min(by_layer), row["paper_density"]
        head_recall, layer, head = min(
            (x, layer, h)
            for layer, recalls in zip(figures["layers"], row["recall_of_heads"])
            for h, x in enumerate(recalls)
        )
        cells = {
            "method": row["name"],
            "density": f"{row['density']:.3f}",
            "density (paper)": "" if known is None else f"{known:.3f}",
            "recall": f"{row['recall']:.4f}",
            **{name: f"{row[name]:.4f}" for name in LOWEST},
            "lowest layer": f"{lowest:.3f} ({figures['layers'][by_layer.index(lowest)]})",
            "lowest head": f"{head_recall:.3f} ({layer}.{head})",
            "error of output": f"{row['output_error']:.3f}",
            "best 64s": f"{needed(figures, '64', row['recall']):.3f}",
            "best keys": f"{needed(figures, '1', row['recall']):.3f}",
        }
        rows.append(cells)
    return rows


def needed(figures: dict[str, Any], block_tokens: str, recall: float) -> float:
    """Return the density at which the best choice of blocks reaches ``recall``."""
    density, reached = figures["bounds"][block_tokens]["density"], figures["bounds"][block_tokens]["recall"]
    after = next((i for i, x in enumerate(reached) if x >= recall - 1e-9), len(reached) - 1)
    if after == 0 or reached[after] == reached[after - 1]:
        return density[after]
    share = (recall - reached[after - 1]) / (reached[after] - reached[after - 1])
    return density[after - 1] + share * (density[after] - density[after - 1])


def show(figures: Figures) -> None:
    rows = table_rows(figures)
    if rows:
        title = f"{figures['model']}, {length_name(figures)}"
        caption = f"{EXPLAINED} {QUERIES_EXPLAINED}"
        wide_console().print(table_of(title, {name: name for name in rows[0]}, rows, caption))
    for name, why in figures["methods_left_out"].items():
        print(f"{name} left out: {why}")


def main(
    captured: Annotated[list[Path], typer.Argument(help="Folders of `benchmarks.capture`.")],
    method: Methods = None,
    chunks: Annotated[str, typer.Option(help="Tokens of a step, comma-separated; 0 for the whole prompt.")] = "8192",
    clusters: ClustersOption = None,
    device: Device = None,
    json_path: Json = None,
    results: Results = None,
) -> None:
    with failures():
        device, sizes = device_of(device), token_counts("--chunks", chunks, least=0)
        report = Report("recall", device_label(device), json_path, results)
        for capture in [Capture.open(folder) for folder in captured]:
            specs = methods_named(method or ())
            by_layer = None
            if any(spec.method == "share_prefill" for spec in specs):
                by_layer = head_clusters(Capture.open(clusters) if clusters else capture, device)
            for size in dict.fromkeys(size or capture.num_tokens for size in sizes):
                figures = measure(capture, specs, by_layer, size, device)
                report.add_case(figures)
                add_figures(figures, report)
                show(figures)


if __name__ == "__main__":
    typer.run(main)
