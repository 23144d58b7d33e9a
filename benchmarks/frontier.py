# SPDX-License-Identifier: Apache-2.0
"""What answers cost with each method: its cheapest setting that keeps them, and answers against density.

Of global settings alone, which have no model's name on them; benchmarks.quality calls this and writes where it says.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.performance import CHUNKS
from benchmarks.recall_figures import STYLES
from benchmarks.tables import markdown_table

LENGTHS = ("12,000", "32,000", "65,000", "130,000")
LONGEST = LENGTHS[-1]
DRAWN = LENGTHS[:2]
LAST_CHUNK = {"32,000": "24,576", "130,000": "122,880"}
"""Where the density of whole prompts was not measured, that of a chunk after so many tokens stands for it."""

PAPERS = {
    "MInference": ("vertical_slash", "block_sparse", "a_shape"),
    "AnchorAttention": ("anchor_attention",),
    "SpargeAttn": ("sparge_attn",),
    "SALE": ("sale",),
    "SharePrefill": ("share_prefill",),
    "FlexPrefill": ("flex_vertical_slash",),
}
LEAST_ANSWERS, LEAST_OF_SALE, MOST_PERPLEXITY, MOST_DENSITY = 0.90, 0.99, 1.02, 0.8
"""Of stock's answers and perplexity at every length, asked of a setting that is to be shipped; and what it may keep."""
HELD = 0.95
"""Of stock's answers: the lowest density that holds as many is told."""


@dataclass
class Setting:
    """One method with its parameters, as a label has them; what was not measured is not there."""

    label: str
    right: dict[str, float] = field(default_factory=dict)
    """Answers ÷ stock's, by length."""
    perplexity: dict[str, float] = field(default_factory=dict)
    density: dict[str, float] = field(default_factory=dict)
    faster: dict[str, float] = field(default_factory=dict)
    """Than FlashAttention, by the tokens before the chunk."""

    @property
    def method(self) -> str:
        return self.label.split(" ")[0]

    @property
    def params(self) -> dict[str, Any]:
        pairs = (param.split("=", 1) for param in self.label.split(" ")[1:])
        return {name: _value(text) for name, text in pairs}

    @property
    def least_right(self) -> float:
        return min(self.right.values())

    @property
    def most_perplexity(self) -> float:
        return max(self.perplexity.values())

    def keeps(self, least: float) -> bool:
        """Whether it may be shipped for a method of which so many answers are asked."""
        whole = self.right.keys() >= set(LENGTHS) and self.density.get(LONGEST, 1.0) < MOST_DENSITY
        return whole and self.least_right >= least and self.most_perplexity <= MOST_PERPLEXITY

    @property
    def cost(self) -> tuple[float, float]:
        """The fastest after the longest context first, then, of those that were not timed, the sparsest."""
        return -self.faster.get(CHUNKS[0], 0.0), self.density.get(LONGEST, 1.0)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def settings_of(
    shares: Mapping[str, Mapping[str, Mapping[str, float]]],
    densities: Mapping[tuple[str, str], float],
    speeds: Mapping[tuple[str, str], tuple[float, float]],
) -> list[Setting]:
    """From shares of stock's by label and length, densities by both, and speed and density by label and context."""
    known = {method for methods in PAPERS.values() for method in methods}
    found = []
    for label, of in shares.items():
        if label.split(" ")[0] not in known:
            continue
        one = Setting(label)
        for tokens, share in of.items():
            if {"right", "perplexity"} <= share.keys():
                one.right[tokens], one.perplexity[tokens] = share["right"], share["perplexity"]
            if (label, tokens) in densities:
                one.density[tokens] = densities[label, tokens]
            elif (timed := speeds.get((label, LAST_CHUNK.get(tokens, "")))) is not None:
                one.density[tokens] = timed[1]
        one.faster = {after: speeds[label, after][0] for after in CHUNKS if (label, after) in speeds}
        found.append(one)
    return [one for one in found if one.right]


def of_paper(settings: Iterable[Setting], paper: str) -> list[Setting]:
    return [one for one in settings if one.method in PAPERS[paper]]


def least_of(paper: str) -> float:
    return LEAST_OF_SALE if paper == "SALE" else LEAST_ANSWERS


def shipped(settings: Sequence[Setting]) -> dict[str, Setting | None]:
    """The cheapest of each paper that may be shipped."""
    found: dict[str, Setting | None] = {}
    for paper in PAPERS:
        keeping = [one for one in of_paper(settings, paper) if one.keeps(least_of(paper))]
        found[paper] = min(keeping, key=lambda one: one.cost, default=None)
    return found


def shipped_table(settings: Sequence[Setting]) -> str:
    """The line to write for each paper, and what it loses; of papers that have none the nearest, and how near."""
    rows, missing = [], []
    for paper, one in shipped(settings).items():
        tried = of_paper(settings, paper)
        if one is not None:
            line = json.dumps({"profile": profile_name(one)})
            speeds = [f"{one.faster[after]:.1f}×" if after in one.faster else "" for after in CHUNKS[::-1]]
            kept = [f"{one.density[n]:.2f}" if n in one.density else "" for n in (LENGTHS[1], LONGEST)]
            what = f"{one.least_right:.3f}", f"{one.most_perplexity:.3f}"
            rows.append([paper, f"`{line}`", f"`{one.label}`", *what, *kept, *speeds])
        elif tried:
            best = max(tried, key=lambda one: (one.least_right, -one.most_perplexity))
            kept = [s.density[LONGEST] for s in tried if LONGEST in s.density]
            reach = f", which keep up to {max(kept):.2f} of the pairs of {LONGEST} tokens" if kept else ""
            missing.append(
                f"**{paper} has none** of those tried below a density of {MOST_DENSITY}: of {len(tried)} "
                f"setting{'s' * (len(tried) > 1)}{reach},\nthe best, `{best.label}`, keeps "
                f"{best.least_right:.2f} of the answers."
            )
    head = ["paper", "`sparse_prefill`", "setting", "answers, least", "perplexity, most"]
    head += [f"density, {n}" for n in (LENGTHS[1], LONGEST)] + [f"after {after}" for after in CHUNKS[::-1]]
    return "\n\n".join([markdown_table(head, rows), *missing])


def lowest_table(settings: Sequence[Setting]) -> str:
    """For each method and length the sparsest setting that holds ``HELD`` of stock's answers there."""
    rows = []
    for method in (method for methods in PAPERS.values() for method in methods):
        row = [method]
        for tokens in LENGTHS:
            of = [
                s for s in settings if s.method == method and s.right.get(tokens, 0.0) >= HELD and tokens in s.density
            ]
            best = min(of, key=lambda s: s.density[tokens], default=None)
            params = " ".join(best.label.split(" ")[1:]) or "as it is" if best else ""
            row.append(f"{best.density[tokens]:.3f} ({params})" if best else "none")
        rows.append(row)
    return markdown_table(["method", *(f"{n} tokens" for n in LENGTHS)], rows)


def draw(settings: Sequence[Setting], picture: Path) -> None:
    """Answers against density, a panel a length: a mark for each setting, a line along each method's best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(DRAWN), figsize=(12.6, 5), sharey=True, squeeze=False, layout="constrained")
    named: set[str] = set()
    for panel, tokens in zip(panels[0], DRAWN, strict=True):
        for method, (color, marker) in STYLES.items():
            points = sorted((s.density[tokens], s.right[tokens], " " not in s.label) for s in settings
                            if s.method == method and tokens in s.density and tokens in s.right)  # fmt: skip
            if not points:
                continue
            best = [point for i, point in enumerate(points) if all(point[1] > other[1] for other in points[:i])]
            label = method if method not in named else None
            named.add(method)
            panel.plot([p[0] for p in best], [p[1] for p in best], color=color, linewidth=1.3)
            panel.plot([p[0] for p in points], [p[1] for p in points], color=color, marker=marker, linestyle="",
                       markersize=4.5, label=label)  # fmt: skip
            own = [p for p in points if p[2]]
            panel.plot([p[0] for p in own], [p[1] for p in own], color=color, marker=marker, linestyle="",
                       markersize=10, markeredgecolor="black")  # fmt: skip
        panel.axhline(LEAST_ANSWERS, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=f"{tokens} tokens", xlabel="density (kept share of causal pairs)", xscale="log")
        panel.set(xlim=(0.02, 1.0), ylim=(0.0, 1.03))
        panel.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1.0], ["0.02", "0.05", "0.1", "0.2", "0.5", "1"])
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("right answers inside the prompt ÷ stock's")
    figure.legend(loc="outside right upper", fontsize=8, title="large: the paper's default", title_fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def profile_name(one: Setting) -> str:
    return f"{one.method}-answers"


def profile_texts(settings: Sequence[Setting]) -> dict[str, str]:
    """Name → text of the profile of each paper's shipped setting."""
    found = {}
    for paper, one in shipped(settings).items():
        if one is not None:
            spec = json.dumps({"method": one.method} | one.params).replace('"', "")
            found[profile_name(one)] = (
                f"# {paper} at the cheapest setting tried that keeps the answers: docs/quality.md has what it loses.\n"
                f"format: 1\nmodel: any\ndefault: {spec}\nprovenance:\n"
                f'  source: "python -m benchmarks.quality, of answers of code-lm-29m-128k; calibrated for no model"\n'
            )
    return found


def write_profiles(settings: Sequence[Setting], folder: Path) -> None:
    """One file each; those of settings that no longer keep enough go."""
    texts = profile_texts(settings)
    for path in folder.glob("*-answers.yaml"):
        if path.stem not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def figures(settings: Sequence[Setting], rows: Mapping[str, Mapping[str, Any]], of: str) -> list[dict[str, Any]]:
    """Of shipped settings, with their bars. ``rows``: where a setting's figures come from, by label."""
    found = []
    for paper, one in shipped(settings).items():
        if one is None:
            continue
        about = {key: rows[one.label][key] for key in ("device", "command")}
        name = f"shipped setting of {paper} ({one.label}), {of}"
        for what, value, bar, better in (
            ("right answers ÷ stock's, least of all lengths", one.least_right, least_of(paper), "higher"),
            ("perplexity ÷ stock's, most of all lengths", one.most_perplexity, MOST_PERPLEXITY, "lower"),
            (f"density, {LONGEST} tokens", one.density.get(LONGEST), MOST_DENSITY, "lower"),
        ):
            if value is not None:
                unit = "share" if what.startswith("density") else "ratio"
                found.append({"name": f"{name}: {what}", "value": round(value, 4), "unit": unit, "bar": bar,
                              "better": better, **about})  # fmt: skip
    return found
