# SPDX-License-Identifier: Apache-2.0
"""Recall against density: a panel a prompt, a line a method, large marks the defaults.

python -m benchmarks.plots docs/results/recall_curves.json recall.png
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.recall import length_name

MARKERS = "so^vDPX<"


def draw(prompts: list[dict[str, Any]], picture: Path) -> None:
    """Of prompts that were measured with ``--sweep``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    prompts = sorted(prompts, key=lambda figures: (figures["num_tokens"], -figures["chunk_tokens"]))
    figure, panels = pyplot.subplots(
        1, len(prompts), figsize=(5.6 * len(prompts), 5), sharey=True, squeeze=False, layout="constrained"
    )
    methods = sorted({row["method"] for figures in prompts for row in figures["settings"]} - {"dense"})
    for panel, figures in zip(panels[0], prompts, strict=True):
        for tokens, bound in figures["bounds"].items():
            label = f"best blocks of {tokens}"
            panel.plot(bound["density"], bound["recall"], color="black", linestyle=":", linewidth=1, label=label)
        for i, method in enumerate(methods):
            rows = sorted((row["density"], row["recall"], not row["params"]) for row in figures["settings"]
                          if row["method"] == method)  # fmt: skip
            style = {"color": f"C{i}", "marker": MARKERS[i % len(MARKERS)]}
            panel.plot([r[0] for r in rows], [r[1] for r in rows], **style, markersize=3.5, label=method)
            own = [r for r in rows if r[2]]
            panel.plot([r[0] for r in own], [r[1] for r in own], **style, linestyle="", markersize=10)
        panel.set(title=f"{figures['model']}, {length_name(figures)}", xlabel="density (kept share of causal pairs)")
        panel.set(xlim=(0.01, 1.0), ylim=(0.5, 1.005), xscale="log")
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("recall (kept share of the attention mass)")
    panels[0][-1].legend(loc="lower right", fontsize=8)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def main(
    curves: Annotated[Path, typer.Argument(help="What `benchmarks.recall --sweep --curves` wrote.")],
    picture: Annotated[Path, typer.Argument(help="PNG to draw.")],
) -> None:
    prompts = [p for p in json.loads(curves.read_text()) if any(row["params"] for row in p["settings"])]
    draw(prompts, picture)


if __name__ == "__main__":
    typer.run(main)
