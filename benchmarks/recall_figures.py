# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of what benchmarks.recall measured.

python -m benchmarks.recall_figures docs/results/recall_curves.json [--markdown FILE] [--picture docs/recall.png]
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.attention import EXPLAINED, length_name, table_rows
from benchmarks.tables import markdown_table, put_between
from vllm_sparse_backend.measure.report import table_of
from vllm_sparse_backend.settings.errors import ConfigurationError

BEGIN, END = "<!-- tables: benchmarks.recall_figures -->", "<!-- end of tables -->"

STYLES = {
    "a_shape": ("#8c8c8c", "s"),
    "anchor_attention": ("#d62728", "o"),
    "block_sparse": ("#8c564b", "v"),
    "flex_vertical_slash": ("#17becf", "^"),
    "sale": ("#1f77b4", "D"),
    "share_prefill": ("#2ca02c", "P"),
    "sparge_attn": ("#9467bd", "X"),
    "vertical_slash": ("#ff7f0e", "<"),
}
"""Color and marker of each method's line."""


def show(figures: dict[str, Any]) -> None:
    title = f"{figures['model']}, {length_name(figures)}, the papers' defaults"
    rows = table_rows(figures)
    console = Console(width=120)
    console.print(table_of(title, {name: name for name in rows[0]}, rows, EXPLAINED))
    for name, why in figures["methods_left_out"].items():
        console.print(f"{name} left out: {why}")


def markdown(prompts: list[dict[str, Any]]) -> str:
    """The tables of all prompts, shortest first."""
    parts = []
    for figures in sorted(prompts, key=lambda figures: (figures["num_tokens"], -figures["chunk_tokens"])):
        rows = table_rows(figures)
        lines = [markdown_table(list(rows[0]), [list(row.values()) for row in rows])]
        lines += [f"\n{name} left out: {why}" for name, why in figures["methods_left_out"].items()]
        parts.append(f"{figures['model']}, {length_name(figures)}:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def draw(prompts: list[dict[str, Any]], picture: Path) -> None:
    """Recall against density, a panel a swept prompt, a line a method; larger marks are the papers' defaults."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    prompts = [figures for figures in prompts if any(row["params"] for row in figures["settings"])]
    if not prompts:
        raise ConfigurationError("--picture: no prompt was measured with --sweep, so that there is no curve to draw")
    prompts.sort(key=lambda figures: (figures["num_tokens"], -figures["chunk_tokens"]))
    figure, panels = pyplot.subplots(
        1, len(prompts), figsize=(5.6 * len(prompts), 5), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, figures in zip(panels[0], prompts, strict=True):
        _draw_bounds(panel, figures)
        for method, (color, marker) in STYLES.items():
            rows = sorted(
                (row for row in figures["settings"] if row["method"] == method), key=lambda row: row["density"]
            )
            panel.plot(
                [row["density"] for row in rows], [row["recall"] for row in rows], color=color, marker=marker,
                markersize=3.5, linewidth=1.3, label=method if rows else None,
            )  # fmt: skip
            for row in rows:
                if not row["params"]:
                    panel.plot(
                        row["density"],
                        row["recall"],
                        color=color,
                        marker=marker,
                        markersize=10,
                        markeredgecolor="black",
                    )
        panel.set(
            title=f"{figures['model']}, {length_name(figures)} tokens", xlabel="density (kept share of causal pairs)"
        )
        panel.set(xlim=(0.01, 1.0), ylim=(0.5, 1.005), xscale="log")
        panel.set_xticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0], ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"])
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("recall (kept share of the attention mass)")
    panels[0][-1].legend(loc="lower right", fontsize=8, title="large marks: the paper's defaults", title_fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def _draw_bounds(panel: Any, figures: dict[str, Any]) -> None:
    for n, style, label in (("1", ":", "best single keys"), ("64", "--", "best blocks of 64")):
        bound = figures["bounds"][n]
        panel.plot(bound["density"], bound["recall"], color="black", linestyle=style, linewidth=1, label=label)


def main(
    curves: Annotated[Path, typer.Argument(help="What benchmarks.recall --curves wrote.")],
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="File with marks for the tables.")] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG to draw; needs matplotlib.")] = None,
) -> None:
    prompts = json.loads(curves.read_text())
    for figures in prompts:
        show(figures)
    if markdown_file is not None:
        put_between(markdown_file, BEGIN, END, markdown(prompts))
    if picture is not None:
        draw(prompts, picture)


if __name__ == "__main__":
    typer.run(main)
