# SPDX-License-Identifier: Apache-2.0
"""Ablations of the papers in one table, over captured queries, keys and values: the effect of each part of a method.

    python -m benchmarks.ablations CAPTURE [--clusters CAPTURE] [--chunk 8192]

CAPTURE is a folder that ``benchmarks.capture`` wrote. ``--clusters`` names a capture of another prompt, for
SharePrefill. Each method is measured as in its paper, then without the part in question, and again without it at equal
density. For equal density, the method's main parameter is set so that it keeps as many pairs, because removing a part
mostly changes the number of kept pairs. Methods select as on a server, chunk by chunk.

Recall is measured for single queries, as the mean and as the minimum of all but a thousandth of them. (All layers,
heads and queries form one population.) Density and recall describe the selection. The column "skipped" is the share of
steps that SpargeAttn's second stage leaves out (products of P and V or whole steps). It affects only the output.

Some ablations of the papers are not possible, because no parameter describes them: MInference with the lines of another
prompt (its "static" of table 4); SALE without 4 bits (appendix E) and without a separate τ for each head, which only a
calibrated profile has; SpargeAttn's Hilbert curve, which a causal mask rules out. A vertical-slash always keeps its
diagonal blocks and one line of the other kind, as in MInference's appendix D.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import Report
from benchmarks.method_specs import Clusters, MethodSpec
from benchmarks.options import Clusters as ClustersOption, Device, Json, Results, device_label
from benchmarks.plan_quality import PlanQuality, PlanRequest, kept_shares, measure_plans, selections
from benchmarks.recall import length_name
from benchmarks.tables import markdown_table
from vllm_sparse_backend.calibration.capture import Capture
from vllm_sparse_backend.calibration.head_clusters import head_clusters
from vllm_sparse_backend.cli.common import device_of, failures, split
from vllm_sparse_backend.config.errors import ConfigurationError, not_one_of
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels import PagedCache, SparseIndex
from vllm_sparse_kernels.attention.reference import step_margins, walk
from vllm_sparse_kernels.layer import methods_by_head
from vllm_sparse_kernels.methods.base import Method

COLUMNS = ("paper", "what", "density", "skipped", "recall", "worst thousandth", "error of output")
COMPLETE = "complete"

SEARCH_STEPS = 10
CLOSE = 0.01
"""Largest relative difference between densities that count as equal."""


@dataclass(frozen=True)
class Knob:
    """A field of a method that keeps more pairs if larger, and the range to search. Integers change by factors."""

    field: str
    low: float
    high: float

    def limits(self, num_tokens: int) -> tuple[float, float]:
        """Return the range. Integers count tokens or blocks, so the prompt limits them."""
        return self.low, min(self.high, num_tokens) if isinstance(self.high, int) else self.high

    def between(self, low: float, high: float) -> float:
        return round(math.sqrt(low * high)) if isinstance(self.low, int) else (low + high) / 2


@dataclass(frozen=True)
class Variant:
    """A method, or the method without a part. The first variant of a paper is the complete method."""

    paper: str
    what: str
    method: str
    params: dict[str, Any] = field(default_factory=dict)
    knob: Knob | None = None
    matched: bool = False
    """Whether the knob was set to keep as many pairs as the complete method."""

    @property
    def name(self) -> str:
        return f"{self.what}, equal density" if self.matched else self.what

    def at(self, value: float) -> "Variant":
        assert self.knob is not None
        return replace(self, params=self.params | {self.knob.field: value}, matched=True)


VERTICALS, SLASHES = Knob("vertical_tokens", 1, 1 << 17), Knob("slash_tokens", 1, 1 << 17)
LINES = {"vertical_tokens": 512, "slash_tokens": 2048}
THETA, MASS = Knob("theta", 0.0, 64.0), Knob("kept_mass", 0.001, 1.0)

VARIANTS = (
    Variant("StreamingLLM", COMPLETE, "a_shape"),
    Variant("StreamingLLM", "window alone", "a_shape", {"sink_tokens": 0}, Knob("local_tokens", 1, 1 << 17)),
    # The lines of most heads in the file that the authors publish for Llama-3.1; their table 8 and table 4.
    Variant("MInference", COMPLETE, "vertical_slash", LINES),
    Variant("MInference", "only vertical", "vertical_slash", LINES | {"slash_tokens": 1}, VERTICALS),
    Variant("MInference", "only slash", "vertical_slash", LINES | {"vertical_tokens": 1}, SLASHES),
    Variant(
        "MInference", "no lines forced", "vertical_slash", LINES | {"forced_verticals": 0, "forced_slashes": 0}, SLASHES
    ),
    Variant("MInference", "only A-shape", "a_shape", {}, Knob("local_tokens", 1, 1 << 17)),
    Variant("MInference", "only block-sparse", "block_sparse", {}, Knob("top_blocks", 1, 2048)),
    # Table 4.
    Variant("AnchorAttention", COMPLETE, "anchor_attention"),
    Variant("AnchorAttention", "without anchor", "anchor_attention", {"use_anchor": False}, THETA),
    Variant("AnchorAttention", "without groups (step 1)", "anchor_attention", {"step_tiles": 1}, THETA),
    # Table 5; the sink and smooth keys come from the authors' code.
    Variant("SpargeAttn", COMPLETE, "sparge_attn"),
    Variant("SpargeAttn", "without self-similarity judge", "sparge_attn", {"min_similarity": 0.0}, MASS),
    Variant("SpargeAttn", "without smooth keys", "sparge_attn", {"smooth_keys": False}, MASS),
    Variant("SpargeAttn", "without sink", "sparge_attn", {"keep_sink": False}, MASS),
    # Table 6, M_pv together with M_g.
    Variant("SpargeAttn", "with second stage, λ = −4", "sparge_attn", {"skip_margin": -4.0}),
    Variant("SALE", COMPLETE, "sale"),
    Variant("SALE", "without sink", "sale", {"sink_tokens": 0}),
    # Table 2. Without sharing every head takes the vertical-slash that SharePrefill falls back to.
    Variant("SharePrefill", COMPLETE, "share_prefill"),
    Variant("SharePrefill", "without sharing (τ = 0)", "flex_vertical_slash", {}, Knob("gamma", 0.01, 1.0)),
    Variant("SharePrefill", "without exclusion (δ = 1.01)", "share_prefill", {"max_sparsity": 1.01}),
)  # fmt: skip

PAPERS = tuple(dict.fromkeys(variant.paper for variant in VARIANTS))


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    variant: Variant
    density: float
    recall: float
    worst_hundredth: float
    worst_thousandth: float
    worst: float
    skipped: float
    output_error: float
    """‖O − Õ‖₂ / ‖O‖₂ of a layer over all heads and tokens, mean over layers."""


class Bench:
    """Measures variants on a captured prompt."""

    def __init__(self, captured: Capture, clusters: Clusters | None, chunk_tokens: int, device: str) -> None:
        self.captured, self.clusters, self.chunk_tokens, self.device = captured, clusters, chunk_tokens, device

    def plans(self, variants: Sequence[Variant]) -> list[Plan]:
        return [
            MethodSpec(v.method, tuple(v.params.items())).plan(self.captured.shape, self.clusters) for v in variants
        ]

    def measure(self, variants: Sequence[Variant]) -> list[Row]:
        requests = [PlanRequest(plan, with_output=True, with_queries=True) for plan in self.plans(variants)]
        measured = measure_plans(self.captured, requests, self.chunk_tokens, self.device, bounds=())
        return [self._row(*of_variant) for of_variant in zip(variants, measured.kept, strict=True)]

    def _row(self, variant: Variant, kept: PlanQuality) -> Row:
        skipped = self._skipped(variant) if "skip_margin" in variant.params else 0.0
        hundredth, thousandth, worst = kept.quantiles()
        return Row(
            variant, kept.mean_density, kept.mean_recall, hundredth, thousandth, worst, skipped, kept.mean_error
        )  # fmt: skip

    def _skipped(self, variant: Variant) -> float:
        """Return the share of steps whose product λ leaves out."""
        skipped = steps = 0
        plans = self.plans([variant])
        for selected in selections(self.captured, plans, self.chunk_tokens, self.device):
            if selected.groups is not None and selected.index is not None:
                counts = skipped_steps(
                    selected.q, selected.cache, selected.index, methods_by_head(selected.groups), selected.scale
                )
                skipped, steps = skipped + counts[0], steps + counts[1]
        return skipped / max(steps, 1)

    def as_dense(self, targets: Sequence[tuple[Variant, float]]) -> list[Variant]:
        """Return each variant with the knob that comes closest to a density, by bisection of all variants together."""
        ranges = [v.knob.limits(self.captured.num_tokens) for v, _ in targets if v.knob is not None]
        best: list[tuple[float, Variant]] = [(math.inf, v) for v, _ in targets]
        for _ in range(SEARCH_STEPS):
            open_ones = [i for i, (off, _) in enumerate(best) if off > CLOSE]
            if not open_ones:
                break
            tried = {i: targets[i][0].knob.between(*ranges[i]) for i in open_ones}  # type: ignore[union-attr]
            plans = self.plans([targets[i][0].at(value) for i, value in tried.items()])
            densities = kept_shares(self.captured, plans, self.chunk_tokens, self.device)
            for (i, value), density in zip(tried.items(), densities, strict=True):
                variant, target = targets[i]
                best[i] = min(best[i], (abs(density / target - 1), variant.at(value)), key=lambda pair: pair[0])
                low, high = ranges[i]
                ranges[i] = (value, high) if density < target else (low, value)
        return [variant for _, variant in best]


def skipped_steps(
    q: torch.Tensor, cache: PagedCache, index: SparseIndex, methods: Sequence[Method], scale: float
) -> tuple[int, int]:
    """Count skipped steps and all steps of one row, over the heads that have a λ."""
    rows, group, skipped, steps = index.rows, index.num_heads // cache.num_kv_heads, 0, 0
    margins = {head: method.skip_margin for head, method in enumerate(methods) if method.skip_margin is not None}
    keys = cache.gather(rows.block_table[0], rows.seq_lens[0])[0].float() if margins else q
    for head, margin in margins.items():
        for i_tile, tile in enumerate(rows.tile_list):
            kept, step_of = walk(index, head, i_tile)
            queries = q[tile.token : tile.token + tile.length_tokens, head].float() * scale
            positions = tile.position + torch.arange(tile.length_tokens, device=q.device)
            scores = (queries @ keys[kept, head // group].T).masked_fill(kept > positions[:, None], -torch.inf)
            is_skipped = step_margins(scores, step_of) < margin
            skipped, steps = skipped + int(is_skipped.sum()), steps + len(is_skipped)
    return skipped, steps


def ablate(bench: Bench, variants: Sequence[Variant], equal_density: bool) -> list[Row]:
    """Return all rows of the table. Each variant is followed by itself at the complete method's density."""
    rows = bench.measure(variants)
    complete = {row.variant.paper: row.density for row in rows if row.variant.what == COMPLETE}
    targets = [(v, complete[v.paper]) for v in variants if v.knob is not None and v.paper in complete]
    if not equal_density or not targets:
        return rows
    matched = bench.measure(bench.as_dense(targets))
    after = {v.paper + v.what: row for (v, _), row in zip(targets, matched, strict=True)}
    return [r for row in rows for r in (row, after.get(row.variant.paper + row.variant.what)) if r is not None]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with the columns ``COLUMNS``."""

    def name(variant: Variant) -> str:
        if not variant.matched or variant.knob is None:
            return variant.name
        return f"{variant.name}: {variant.knob.field} {variant.params[variant.knob.field]:.6g}"

    cells = [
        [
            row.variant.paper if row.variant.what == COMPLETE else "", name(row.variant), f"{row.density:.3f}",
            f"{row.skipped:.3f}" if row.skipped else "", f"{row.recall:.4f}", f"{row.worst_thousandth:.4f}",
            f"{row.output_error:.3f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(COLUMNS, cells)


def add_rows(report: Report, rows: Sequence[Row], where: str) -> None:
    """Add rows as figures of a results file. A case of the JSON has all values of a row."""
    for row in rows:
        variant = row.variant
        name = f"ablation, {variant.paper}, {variant.name}, {where}"
        report.add_figure(f"{name}: density", row.density, "share", "lower")
        report.add_figure(f"{name}: recall", row.recall, "share", "higher")
        report.add_figure(f"{name}: recall of the worst thousandth", row.worst_thousandth, "share", "higher")
        report.add_figure(f"{name}: relative error of the output", row.output_error, "relative", "lower")
        if row.skipped:
            report.add_figure(f"{name}: steps skipped", row.skipped, "share", "higher")
        figures = {key: value for key, value in vars(row).items() if key != "variant"}
        setting = {"paper": variant.paper, "what": variant.name, "method": variant.method, "params": variant.params}
        report.add_case(setting | figures)


def variants_of(papers: Sequence[str], bench: Bench) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants, and reasons for papers left out. Raises ConfigurationError for a paper without ablations."""
    if unknown := [paper for paper in papers if paper not in PAPERS]:
        raise ConfigurationError(f"--papers: {not_one_of(unknown[0], PAPERS)}")
    left_out = {}
    if "SharePrefill" in papers:
        try:
            bench.plans([v for v in VARIANTS if v.paper == "SharePrefill"])
        except BenchError as error:
            missing = "--clusters does not name a capture of another prompt"
            left_out["SharePrefill"] = missing if bench.clusters is None else str(error)
    return [v for v in VARIANTS if v.paper in papers and v.paper not in left_out], left_out


def main(
    captured: Annotated[Path, typer.Argument(help="Folder of `benchmarks.capture`.")],
    clusters: ClustersOption = None,
    device: Device = None,
    chunk: Annotated[
        int, typer.Option(help="Tokens of a step (--max-num-batched-tokens); 0 for the whole prompt.")
    ] = 8192,
    papers: Annotated[str, typer.Option(help="Papers whose ablations to measure.")] = ",".join(PAPERS),
    equal_density: Annotated[bool, typer.Option(help="Also measure at the complete method's density.")] = True,
    json_path: Json = None,
    results: Results = None,
) -> None:
    with failures():
        device, capture = device_of(device), Capture.open(captured)
        by_layer = None if clusters is None else head_clusters(Capture.open(clusters), device)
        tokens = chunk or capture.num_tokens
        bench = Bench(capture, by_layer, tokens, device)
        variants, left_out = variants_of(split(papers), bench)
        rows = ablate(bench, variants, equal_density)
        where = f"{length_name({'num_tokens': capture.num_tokens, 'chunk_tokens': tokens})}, {capture.model}"
        add_rows(Report("ablations", device_label(device), json_path, results), rows, where)
        print(f"{where}:\n\n{table(rows)}")
        for paper, why in left_out.items():
            print(f"\n{paper} left out: {why}")


if __name__ == "__main__":
    typer.run(main)
