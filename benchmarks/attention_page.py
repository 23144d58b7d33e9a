# SPDX-License-Identifier: Apache-2.0
"""What `eval attention` found, as a page: tables, heat maps of layers and heads, curves."""

from benchmarks import attention
from benchmarks.attention import LOWEST, Figures, length_name, setting_name
from benchmarks.charts import curves, heat_map
from benchmarks.page import Page
from vllm_sparse_backend.measure.report import Report

MAPS = {
    "recall": "recall_of_heads",
    "recall of the worst thousandth of queries": f"{LOWEST[1]}_of_heads",
    "density": "density_of_heads",
}


def attention_page(report: Report) -> Page:
    models = ", ".join(dict.fromkeys(figures["model"] for figures in report.cases))
    page = Page(f"What is kept of attention: {models}", report)
    for title, rows in attention.chunk_tables(report.cases).items():
        page.heading(title)
        page.table({name: name for name in rows[0]}, rows)
    for figures in report.cases:
        _add_prompt(page, figures)
    return page


def _add_prompt(page: Page, figures: Figures) -> None:
    page.heading(f"{figures['model']}, {length_name(figures)}", f"{attention.EXPLAINED} {attention.QUERIES_EXPLAINED}")
    rows = attention.table_rows(figures)
    page.table({name: name for name in rows[0]} if rows else {}, rows)
    whole = [row for row in figures["settings"] if "output_error" in row]
    errors = {setting_name(row): list(zip(figures["layers"], row["output_error_of_layers"])) for row in whole}
    page.figures({
        "recall against density": _against_density(figures),
        "error of the output by layer": curves(errors, x="layer", y="relative error"),
    })  # fmt: skip
    for row in whole:
        page.figures(
            {f"{setting_name(row)}: {name}": _map(figures, row[key]) for name, key in MAPS.items() if key in row}
        )


def _against_density(figures: Figures) -> str:
    """A line for each method that was swept, a point for others; and the best that could be had."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in figures["settings"]:
        series.setdefault(row["method"], []).append((row["density"], row["recall"]))
    for tokens, name in (("1", "best single keys"), ("64", "best blocks of 64")):
        bound = figures["bounds"][tokens]
        # A point for each hundredth of recall is line enough.
        points = {round(recall, 2): (density, recall) for density, recall in zip(bound["density"], bound["recall"])}
        series[name] = [point for recall, point in points.items() if recall >= 0.5]
    return curves(series, x="density", y="recall", log_x=True)


def _map(figures: Figures, of_heads: list[list[float]]) -> str:
    heads = range(len(of_heads[0]))
    told = [[f"{value:.2f}" for value in heads_of] for heads_of in of_heads]
    return heat_map(
        [str(layer) for layer in figures["layers"]], [str(h) for h in heads], of_heads, told, x="head", y="layer"
    )
