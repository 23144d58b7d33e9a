# SPDX-License-Identifier: Apache-2.0
"""Measures how SharePrefill's released code differs from its paper, on captured queries and keys.

    python -m benchmarks.capture MODEL A --tokens 8192
    python -m benchmarks.capture MODEL B --tokens 8192 --skip 20000
    python -m benchmarks.share_prefill_released B --clusters A [--results docs/results/papers.json]

Runs on a CPU in plain torch. As in the package, every pattern consists of blocks of 64 keys for tiles of 128 queries,
and includes the blocks on the diagonal. Patterns are compared at equal density: γ is swept, and the mean recall of the
heads is interpolated at the density of the paper's rule with γ = 0.9. ``methods/share_prefill/method.py`` describes the
differences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.figures import Report
from benchmarks.method_specs import MethodSpec
from benchmarks.options import Results
from benchmarks.plan_quality import select_layer
from vllm_sparse_backend.calibration.capture import Capture
from vllm_sparse_backend.calibration.head_clusters import CPU_SIDE, DISTANCE, Clusters, head_clusters
from vllm_sparse_backend.calibration.prompt_chunks import chunk_rows, paged
from vllm_sparse_backend.cli.common import failures
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_kernels import PagedCache, SparseIndex
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods.flex_prefill.reference import fewest_with_mass, pool
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill
from vllm_sparse_kernels.methods.share_prefill.reference import block_average, js_distance
from vllm_sparse_kernels.rows import TILE_TOKENS

BLOCK_TOKENS = 64
RELEASED_BLOCK_TOKENS = 128
GAMMAS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
BUDGETS = (256, 512, 1024)
"""Keys of best columns and of best diagonals; the released code uses 1,024 for prompts of 128K tokens."""

QUERY_AWARE_DISTANCE = 0.1
RELEASED_DISTANCE = 0.5
RELEASED_MOST_LINES = 0.9
"""The released code's thresholds."""

Curve = list[tuple[float, float]]
"""Density and recall by γ."""


@dataclass(frozen=True)
class Head:
    """Exact and estimated attention of one head on the prompt.

    Attributes:
        layer: Number of the layer.
        head: Number of the query head in the layer.
        cluster: Its cluster, −1 for noise.
        key_mass: [tiles, tokens], exact attention that each tile of queries pays to each key.
        mass: [tiles, blocks], the same for blocks, with the sum 1 in each tile.
        average: [tiles, blocks], the paper's map: the softmax of block-averaged QK.
        columns: [blocks of 128], exact attention of the last 128 queries.
        diagonals: [blocks of 128], the same by distance.
        pooled_distance: Square root of the JSD between ``columns`` and their estimate from the mean query and keys.
        lines: Density and recall of the head's own vertical-slash by γ.
    """

    layer: int
    head: int
    cluster: int
    key_mass: torch.Tensor
    mass: torch.Tensor
    average: torch.Tensor
    columns: torch.Tensor
    diagonals: torch.Tensor
    pooled_distance: float
    lines: Curve


@dataclass(frozen=True)
class Sharing:
    """A head that may take over a pivot's pattern."""

    pivot: Head
    member: Head


class Prompt:
    """Causal pairs of a prompt of whole tiles, against which patterns are measured."""

    def __init__(self, num_tokens: int) -> None:
        first_queries = torch.arange(0, num_tokens, TILE_TOKENS)[:, None]
        self.pairs = (first_queries + TILE_TOKENS - torch.arange(num_tokens)).clamp(0, TILE_TOKENS).float()
        blocks = torch.arange(num_tokens // BLOCK_TOKENS)
        first_blocks = first_queries // BLOCK_TOKENS
        self.causal = blocks < first_blocks + TILE_TOKENS // BLOCK_TOKENS
        self.diagonal = self.causal & (blocks >= first_blocks)

    def measure(self, kept_keys: torch.Tensor, head: Head) -> tuple[float, float]:
        """Return the density and the recall of a pattern.

        Args:
            kept_keys: [tiles, tokens] bool.
            head: The head that has the pattern.

        Returns:
            Shares of causal pairs and of the exact attention.
        """
        density = (self.pairs * kept_keys).sum() / self.pairs.sum()
        return float(density), float((head.key_mass * kept_keys).sum() / head.key_mass.sum())

    def measure_blocks(self, kept: torch.Tensor, head: Head) -> tuple[float, float]:
        """Return the density and the recall of a pattern of blocks [tiles, blocks]; diagonal blocks are added."""
        return self.measure((kept & self.causal | self.diagonal).repeat_interleave(BLOCK_TOKENS, 1), head)


def _groups_of(plan: Plan, layer: int) -> LayerPlan:
    groups = plan.layer(layer)
    if groups is None:
        raise ValueError(f"layer {layer}: given a dense layer, expected heads of flex_vertical_slash")
    return groups


def heads_of_prompt(captured: Capture, clusters: Clusters, every: int) -> Iterator[Head]:
    """Yield the heads of every n-th captured layer, in order."""
    specs = [MethodSpec.parse(f"flex_vertical_slash:gamma={gamma}") for gamma in GAMMAS]
    plans = [spec.plan(captured.shape, None) for spec in specs]
    num_tokens = captured.num_tokens // RELEASED_BLOCK_TOKENS * RELEASED_BLOCK_TOKENS
    rows = chunk_rows(num_tokens, num_tokens, torch.device("cpu"), 0)[0]
    prompt = Prompt(num_tokens)
    for layer in sorted(captured.scales)[::every]:
        q, k, v = (x[:num_tokens] for x in captured.read(layer))
        cache, scale = PagedCache(paged(k), paged(v)), captured.scales[layer]
        indices = [select_layer(_groups_of(plan, layer), q, cache, rows, scale) for plan in plans]
        group = q.shape[1] // k.shape[1]
        for i in range(q.shape[1]):
            yield head_of(
                layer, i, clusters[layer][i], q[:, i].float(), k[:, i // group].float() * scale, indices, prompt
            )


def head_of(
    layer: int, head: int, cluster: int, queries: torch.Tensor, keys: torch.Tensor, indices: Sequence[SparseIndex],
    prompt: Prompt,
) -> Head:  # fmt: skip
    """Return a head's maps; ``keys`` are scaled. ``indices`` hold the vertical-slash of each γ."""
    num_tokens = len(queries)
    key_mass = torch.empty(num_tokens // TILE_TOKENS, num_tokens)
    average = torch.zeros(num_tokens // TILE_TOKENS, num_tokens // BLOCK_TOKENS)
    for i_tile, tile in enumerate(queries.split(TILE_TOKENS)):
        first, last = i_tile * TILE_TOKENS, (i_tile + 1) * TILE_TOKENS
        scores = tile @ keys[:last].T
        scores[:, first:] = scores[:, first:].masked_fill(torch.ones(TILE_TOKENS, TILE_TOKENS).triu(1) > 0, -torch.inf)
        weights = scores.softmax(-1)
        key_mass[i_tile] = torch.nn.functional.pad(weights.sum(0), (0, num_tokens - last))
        estimate = block_average(tile, keys[:last], BLOCK_TOKENS).softmax(-1)
        average[i_tile, : len(estimate)] = estimate
    columns = pool(key_mass[-1], RELEASED_BLOCK_TOKENS) / TILE_TOKENS
    distances = num_tokens - TILE_TOKENS + torch.arange(TILE_TOKENS)[:, None] - torch.arange(num_tokens)
    by_distance = torch.zeros(num_tokens).index_add_(0, distances.clamp(min=0).flatten(), weights.flatten())
    mean_keys = keys.view(-1, RELEASED_BLOCK_TOKENS, keys.shape[1]).mean(1)
    pooled = (queries[-RELEASED_BLOCK_TOKENS:].mean(0) @ mean_keys.T).softmax(-1)
    of_lines = Head(
        layer, head, cluster, key_mass, key_mass.view(len(key_mass), -1, BLOCK_TOKENS).sum(2) / TILE_TOKENS, average,
        columns, pool(by_distance, RELEASED_BLOCK_TOKENS) / TILE_TOKENS, js_distance(pooled, columns), [],
    )  # fmt: skip
    of_lines.lines.extend(prompt.measure(kept_keys(index, head, num_tokens), of_lines) for index in indices)
    return of_lines


def kept_keys(index: SparseIndex, head: int, num_tokens: int) -> torch.Tensor:
    """Return the keys that each tile of a head keeps: [tiles, tokens] bool."""
    kept = torch.zeros(index.rows.num_tiles, num_tokens, dtype=torch.bool)
    for i_tile, of_tile in enumerate(kept):
        of_tile.view(-1, index.block_tokens)[index.blocks_of(head, i_tile)] = True
        of_tile[index.stripes_of(head, i_tile)] = True
    return kept


def of_whole_map(weights: torch.Tensor, gamma: float) -> torch.Tensor:
    """Flag the fewest blocks whose sum reaches γ of the whole map."""
    return fewest_with_mass(weights.flatten(), gamma).view_as(weights)


def of_rows(weights: torch.Tensor, gamma: float) -> torch.Tensor:
    """Flag the fewest blocks that hold γ of each tile's row."""
    return torch.stack([fewest_with_mass(row, gamma) for row in weights])


def best_lines(head: Head, budget: int) -> torch.Tensor:
    """Flag the blocks of the head's best columns and diagonals, of ``budget`` keys each, as the released code does."""
    number = budget // RELEASED_BLOCK_TOKENS
    columns, diagonals = (torch.zeros_like(x, dtype=torch.bool) for x in (head.columns, head.diagonals))
    columns[head.columns.topk(number).indices] = True
    columns[0] = True
    diagonals[head.diagonals.topk(number).indices] = True
    diagonals[0] = True
    blocks = torch.arange(len(columns))
    kept = columns | diagonals[(blocks[:, None] - blocks).clamp(min=0)]
    return kept.repeat_interleave(RELEASED_BLOCK_TOKENS // BLOCK_TOKENS, 1)


def paper_sharing(heads: Sequence[Head], max_sparsity: float, max_distance: float) -> list[Sharing]:
    """Return the heads that share by the paper's Algorithm 3, with their pivots."""
    pivots: dict[int, Head] = {}
    shared = []
    for head in heads:
        estimate = head.average[-1]
        uniform = torch.full_like(estimate, 1 / len(estimate))
        if head.cluster == NOISE or js_distance(estimate, uniform) >= max_sparsity:
            continue
        pivot = pivots.setdefault(head.cluster, head)
        if pivot is not head and js_distance(estimate, pivot.average[-1]) < max_distance:
            shared.append(Sharing(pivot, head))
    return shared


def released_sharing(heads: Sequence[Head], prompt: Prompt) -> list[Sharing]:
    """Return the heads that share by the released code, with their pivots."""
    pivots: dict[int, Head] = {}
    shared = []
    for head in heads:
        if head.cluster == NOISE or head.pooled_distance < QUERY_AWARE_DISTANCE:
            continue
        pivot = pivots.setdefault(head.cluster, head)
        if pivot.layer == head.layer:
            continue
        columns = js_distance(pivot.columns, head.columns)
        diagonals = js_distance(pivot.diagonals, head.diagonals)
        own_lines = pivot.lines[GAMMAS.index(0.9)][1]
        if max(columns, diagonals) < RELEASED_DISTANCE and own_lines < RELEASED_MOST_LINES:
            shared.append(Sharing(pivot, head))
    return shared


def curve(heads: Sequence[Head], prompt: Prompt, pattern: Callable[[int, float], torch.Tensor]) -> Curve:
    """Return the mean density and recall of ``heads`` by γ; ``pattern`` gives the blocks of the i-th head."""
    points = []
    for gamma in GAMMAS:
        measured = [prompt.measure_blocks(pattern(i, gamma), head) for i, head in enumerate(heads)]
        points.append((mean(d for d, _ in measured), mean(r for _, r in measured)))
    return points


def curve_of_lines(heads: Sequence[Head]) -> Curve:
    """Return the mean density and recall by γ of the heads' own vertical-slash."""
    by_gamma = [[head.lines[i] for head in heads] for i in range(len(GAMMAS))]
    return [(mean(d for d, _ in points), mean(r for _, r in points)) for points in by_gamma]


def mean(values: Iterator[float]) -> float:
    """Return the mean."""
    return float(np.mean(list(values)))


def recall_at(density: float, points: Curve) -> float:
    """Interpolate the recall at a density; beyond the curve, return the nearest end's recall."""
    densities, recalls = zip(*sorted(points), strict=True)
    return float(np.interp(density, densities, recalls))


def main(
    capture: Annotated[Path, typer.Argument(help="Capture of the prompt.")],
    clusters: Annotated[Path, typer.Option(help="Capture of another prompt of the model, for the clusters.")],
    distance: Annotated[float, typer.Option(help="Linkage distance up to which heads are joined.")] = DISTANCE,
    every: Annotated[int, typer.Option(help="Measure every n-th layer.", min=1)] = 1,
    results: Results = None,
) -> None:
    """Print recall at equal density for each difference."""
    with failures():
        captured = Capture.open(capture)
        report = Report("share_prefill_released", "CPU", results_path=results)
        numbers = head_clusters(Capture.open(clusters), "cpu", CPU_SIDE, distance)
        with torch.no_grad():
            heads = list(heads_of_prompt(captured, numbers, every))
        prompt = Prompt(heads[0].key_mass.shape[1])
        prefix = f"SharePrefill, {captured.model}, {len(heads)} heads, distance {distance:g}: "

        def add(name: str, value: float, unit: str) -> None:
            print(f"{prefix}{name}: {value:.4g} {unit}")
            report.add_figure(prefix + name, value, unit, "higher")

        clustered = sum(head.cluster != NOISE for head in heads)
        add("clustered heads", clustered, "heads")
        defaults = SharePrefill()
        rules = {
            "paper": paper_sharing(heads, defaults.max_sparsity, defaults.max_distance),
            "paper, δ 1.01": paper_sharing(heads, 1.01, defaults.max_distance),
            "released": released_sharing(heads, prompt),
        }
        for rule, shared in rules.items():
            add(f"heads that share by the rule ({rule})", len(shared), "heads")
            if shared:
                measure_sharing(f"shared by the rule ({rule}), ", shared, prompt, add)
        measure_maps(heads, prompt, add)
        measure_query_aware(heads, prompt, add)


Add = Callable[[str, float, str], None]
"""Adds a figure: name, value and unit."""


def measure_sharing(name: str, shared: Sequence[Sharing], prompt: Prompt, add: Add) -> None:
    """Add the recall of heads that share, with each map and cut and each budget, and the recall of their own lines."""
    members = [sharing.member for sharing in shared]

    def from_pivots(
        choose: Callable[[Head], torch.Tensor], cut: Callable[[torch.Tensor, float], torch.Tensor]
    ) -> Curve:
        patterns = {
            (sharing.pivot.layer, sharing.pivot.head, gamma): cut(choose(sharing.pivot), gamma)
            for sharing in shared
            for gamma in GAMMAS
        }
        return curve(members, prompt, lambda i, gamma: patterns[shared[i].pivot.layer, shared[i].pivot.head, gamma])

    curves = {
        "averages, γ of the whole map (paper)": from_pivots(lambda head: head.average, of_whole_map),
        "averages, γ of each row": from_pivots(lambda head: head.average, of_rows),
        "true mass, γ of the whole map": from_pivots(lambda head: head.mass, of_whole_map),
        "true mass, γ of each row (released)": from_pivots(lambda head: head.mass, of_rows),
        "own vertical-slash": curve_of_lines(members),
    }
    density = curves["averages, γ of the whole map (paper)"][GAMMAS.index(0.9)][0]
    add(f"{name}density of averages with γ 0.9", density, "share")
    for variant, points in curves.items():
        add(f"{name}recall at that density: {variant}", recall_at(density, points), "share")
    for budget in BUDGETS:
        points = curve(members, prompt, partial(with_budget, shared, [best_lines(head, budget) for head in members]))
        at_least, recall = points[GAMMAS.index(0.9)]
        add(f"{name}recall with a budget of {budget} keys, γ 0.9", recall, "share")
        without = recall_at(at_least, curves["averages, γ of the whole map (paper)"])
        add(f"{name}recall without it at that density, {at_least:.3f}", without, "share")


def with_budget(shared: Sequence[Sharing], lines: Sequence[torch.Tensor], i: int, gamma: float) -> torch.Tensor:
    """Return the i-th head's pattern from its pivot's averages, with the head's own best lines."""
    return of_whole_map(shared[i].pivot.average, gamma) | lines[i]


def measure_maps(heads: Sequence[Head], prompt: Prompt, add: Add) -> None:
    """Add the recall of patterns from each head's own map."""
    curves = {
        "averages, γ of the whole map (paper)": curve(heads, prompt, lambda i, g: of_whole_map(heads[i].average, g)),
        "averages, γ of each row": curve(heads, prompt, lambda i, g: of_rows(heads[i].average, g)),
        "true mass, γ of the whole map": curve(heads, prompt, lambda i, g: of_whole_map(heads[i].mass, g)),
        "true mass, γ of each row (released)": curve(heads, prompt, lambda i, g: of_rows(heads[i].mass, g)),
        "own vertical-slash": curve_of_lines(heads),
    }
    density = curves["averages, γ of the whole map (paper)"][GAMMAS.index(0.9)][0]
    add("own maps, density of averages with γ 0.9", density, "share")
    for variant, points in curves.items():
        add(f"own maps, recall at that density: {variant}", recall_at(density, points), "share")


def measure_query_aware(heads: Sequence[Head], prompt: Prompt, add: Add) -> None:
    """Add the number of query-aware heads, and the recall of their query-aware pattern and of their own lines."""
    chosen = [head for head in heads if head.pooled_distance < QUERY_AWARE_DISTANCE]
    add("query-aware heads, pooled estimate within 0.1 of the true mass", len(chosen), "heads")
    if not chosen:
        add("smallest distance of a pooled estimate", min(head.pooled_distance for head in heads), "distance")
        return
    aware = curve(chosen, prompt, lambda i, gamma: of_whole_map(chosen[i].average, gamma))
    density = aware[GAMMAS.index(0.9)][0]
    add("query-aware heads, density with γ 0.9", density, "share")
    add("query-aware heads, recall at that density: query-aware", recall_at(density, aware), "share")
    add(
        "query-aware heads, recall at that density: own vertical-slash",
        recall_at(density, curve_of_lines(chosen)),
        "share",
    )


if __name__ == "__main__":
    typer.run(main)
