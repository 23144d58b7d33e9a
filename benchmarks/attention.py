# SPDX-License-Identifier: Apache-2.0
"""What methods keep of captured attention, as figures and as tables: recall, density, error of the output."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kept import Asked, Kept, Measured, measure_plans, plan_of
from vllm_sparse_backend.measure.report import Report
from vllm_sparse_backend.profiling.capture import Capture
from vllm_sparse_backend.profiling.clusters import Clusters
from vllm_sparse_backend.settings.errors import ConfigurationError

Figures = dict[str, Any]
"""Of one prompt in chunks of one size."""

SWEEPS: dict[str, list[dict[str, Any]]] = {
    "a_shape": [{"local_tokens": n} for n in (256, 1024, 2048, 8192, 16384)],
    "anchor_attention": [{"theta": x} for x in (4.0, 6.0, 8.0, 10.0, 14.0, 16.0)],
    "block_sparse": [{"top_blocks": n} for n in (8, 16, 32, 64, 160, 256)],
    "dense": [],
    "flex_vertical_slash": [{"gamma": x} for x in (0.5, 0.7, 0.8, 0.95, 0.98)],
    "sale": [{"tau": x} for x in (0.064, 0.032, 0.016, 0.008, 0.002, 0.001)],
    "share_prefill": [{"gamma": x} for x in (0.5, 0.7, 0.8, 0.95, 0.98)],
    "sparge_attn": [{"kept_mass": x} for x in (0.3, 0.5, 0.7, 0.8, 0.95, 0.98)],
    "vertical_slash": [{"vertical_tokens": 1000 * n // 16, "slash_tokens": 6096 * n // 16} for n in (1, 2, 4, 8, 24)],
}
"""Each method's main knob, beside the default."""

EXPLAINED = (
    "Lowest layer: mean recall of its heads. Best 64s, best keys: density at which blocks of 64 keys, or single keys, "
    "chosen with knowledge of the exact attention would reach the same mean recall."
)
QUERIES_EXPLAINED = (
    "Hundredth, thousandth, worst: of all layers' and heads' queries, so many have no more recall. Density (paper): at "
    "the granularity of the method's paper, where that is finer than what is computed and known."
)
LOWEST = ("hundredth", "thousandth", "worst")
"""Names of ``quality.QUANTILES``."""


@dataclass(frozen=True)
class Setting:
    """A method with parameters that differ from its defaults."""

    method: str
    params: dict[str, Any] = field(default_factory=dict)
    whole: bool = True
    """With its heads and layers and the error of its output; a point of a curve has none of them."""

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.params.items())])


def swept(settings: Sequence[Setting]) -> list[Setting]:
    """Each with the points of its method's curve behind it."""
    return [
        one
        for setting in settings
        for one in (setting, *(Setting(setting.method, params, False) for params in SWEEPS.get(setting.method, [])))
    ]


def measure(
    captured: Capture,
    settings: Sequence[Setting],
    clusters: Clusters | None,
    chunk_tokens: int,
    device: str,
    queries: bool = False,
    on_layer: Callable[[], None] = lambda: None,
) -> Figures:
    """One prompt's figures. ``queries``: recall of single queries, and density at the papers' granularity, too."""
    with tempfile.TemporaryDirectory() as folder:
        asked, ran, left_out = [], [], {}
        for setting in settings:
            try:
                plan = plan_of(setting.method, setting.params, captured.shape, clusters, Path(folder))
            except ConfigurationError as error:
                left_out[setting.method] = str(error)
                continue
            asked.append(Asked(plan, setting.whole, setting.whole and queries))
            ran.append(setting)
        measured = measure_plans(captured, asked, chunk_tokens, device, on_layer=on_layer)
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
        "settings": _figures(ran, measured, queries),
    }


def _figures(ran: Sequence[Setting], measured: Measured, queries: bool) -> list[Figures]:
    figures = []
    for setting, kept in zip(ran, measured.kept, strict=True):
        row: Figures = {"method": setting.method, "params": setting.params}
        row |= {"recall": kept.mean_recall, "density": kept.mean_density}
        if setting.whole:
            row |= {"recall_of_heads": _rounded(kept.recall), "density_of_heads": _rounded(kept.density)}
            row |= {"output_error": kept.mean_error, "output_error_of_layers": _rounded([kept.output_error])[0]}
        if setting.whole and queries:
            row |= _of_queries(kept)
        figures.append(row)
    return figures


def _of_queries(kept: Kept) -> Figures:
    lowest = {
        f"{name}_of_heads": _rounded([[head[i] for head in layer] for layer in kept.lowest_recalls])
        for i, name in enumerate(LOWEST)
    }
    return dict(zip(LOWEST, kept.quantiles(), strict=True)) | lowest | {"paper_density": kept.mean_paper_density}


def _rounded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(x, 4) for x in row] for row in rows]


def setting_name(row: Figures) -> str:
    return str(Setting(row["method"], row["params"]))


def add_figures(figures: Figures, report: Report) -> None:
    """Rows of a results file: of settings that were measured whole."""
    for row in figures["settings"]:
        if "output_error" not in row:
            continue
        at = "" if row["params"] else " at the paper's defaults"
        what = f"{setting_name(row)}, {length_name(figures)}, {figures['model']}"
        report.add_figure(f"{what}: recall{at}", row["recall"], "share", "higher")
        report.add_figure(f"{what}: density{at}", row["density"], "share", "lower")
        report.add_figure(f"{what}: relative error of the output", row["output_error"], "relative", "lower")
        if LOWEST[1] in row:
            report.add_figure(f"{what}: recall of the worst thousandth{at}", row[LOWEST[1]], "share", "higher")


def length_name(figures: dict[str, Any]) -> str:
    """32K for a prompt of 32,768 tokens, with the chunk's size where it is not vLLM's default."""
    tokens, chunk = figures["num_tokens"], figures["chunk_tokens"]
    name = f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
    alike = min(chunk, tokens) == min(8192, tokens)
    return name if alike else f"{name} in chunks of {chunk:,}"


def table_rows(figures: Figures) -> list[dict[str, str]]:
    """A row of texts, by the columns' headings, for each setting that was measured whole."""
    rows = []
    for row in figures["settings"]:
        if "output_error" not in row:
            continue
        by_layer = [sum(heads) / len(heads) for heads in row["recall_of_heads"]]
        lowest = min(by_layer)
        heads = [
            (x, layer, h) for layer, of in zip(figures["layers"], row["recall_of_heads"]) for h, x in enumerate(of)
        ]
        head_recall, layer, head = min(heads)
        cells = {"method": setting_name(row), "density": f"{row['density']:.3f}"}
        if LOWEST[0] in row:
            known = row["paper_density"]
            cells |= {"density (paper)": "" if known is None else f"{known:.3f}"}
        cells["recall"] = f"{row['recall']:.4f}"
        cells |= {name: f"{row[name]:.4f}" for name in LOWEST if name in row}
        cells |= {
            "lowest layer": f"{lowest:.3f} ({figures['layers'][by_layer.index(lowest)]})",
            "lowest head": f"{head_recall:.3f} ({layer}.{head})",
            "error of output": f"{row['output_error']:.3f}",
            "best 64s": f"{needed(figures, '64', row['recall']):.3f}",
            "best keys": f"{needed(figures, '1', row['recall']):.3f}",
        }
        rows.append(cells)
    return rows


def needed(figures: dict[str, Any], block_tokens: str, recall: float) -> float:
    """Density at which the best choice of blocks reaches ``recall``."""
    density, reached = figures["bounds"][block_tokens]["density"], figures["bounds"][block_tokens]["recall"]
    after = next((i for i, x in enumerate(reached) if x >= recall - 1e-9), len(reached) - 1)
    if after == 0 or reached[after] == reached[after - 1]:
        return density[after]
    share = (recall - reached[after - 1]) / (reached[after] - reached[after - 1])
    return density[after - 1] + share * (density[after] - density[after - 1])


def chunk_tables(all_figures: Sequence[Figures]) -> dict[str, list[dict[str, Any]]]:
    """By a title for each prompt that was measured in chunks of more than one size: what depends on it."""
    prompts: dict[tuple[str, str], list[Figures]] = {}
    for figures in all_figures:
        prompts.setdefault((figures["model"], figures["prompt_sha256"]), []).append(figures)
    return {
        f"{of[0]['model']}, {of[0]['num_tokens']:,} tokens, by size of chunks": _chunk_rows(of)
        for of in prompts.values()
        if len(of) > 1
    }


def _chunk_rows(all_figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """For each setting and size."""
    rows = []
    for name in dict.fromkeys(setting_name(row) for figures in all_figures for row in figures["settings"]):
        for figures in all_figures:
            size = min(figures["chunk_tokens"], figures["num_tokens"])
            for row in figures["settings"]:
                if setting_name(row) == name and "output_error" in row:
                    whole = "whole" if size == figures["num_tokens"] else f"{size:,}"
                    cells = {key: f"{row[key]:.4f}" for key in ("density", "recall", *LOWEST[1:2]) if key in row}
                    rows.append(
                        {"method": name, "chunk": whole, **cells, "error of output": f"{row['output_error']:.4f}"}
                    )
    return rows
