# SPDX-License-Identifier: Apache-2.0
"""Measures the share of attention that each query keeps under ``top_p``, by its own estimate and in true mass.

    python -m benchmarks.kept_shares MODEL --tokens 16384,32768 --out docs/results/floor.json

Captures queries and keys of every layer on a text (``benchmarks.capture``), and selects blocks with the float32 rule
(``methods/top_p/reference.py``), chunk by chunk as on a server. For every query past ``--min-tokens``:

* the estimated share is the part of the query's own estimated sum that lies in its kept blocks, to which ``floor``
  refers. A floor holds for scored queries, so the default settings of this program with a floor score ``all``;
* the true share is the part of its exact softmax that lies in them.

Blocks have 32 keys, as on Hopper and on CPUs. Other GPUs use wider blocks, so their queries keep more. The rule here
computes in float32. Kernels round: on Hopper, an estimated share is off by up to a ninth.

This needs no server and no Triton. It runs on CPU and on CUDA devices; memory holds the scores of one tile.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer

from benchmarks.capture import capture, read_tokens
from benchmarks.figures import Report
from benchmarks.method_specs import MethodSpec
from benchmarks.options import CHUNK_TOKENS, Chunk, Device, Text, device_label
from vllm_sparse_backend.calibration.capture import Capture, default_text, prompt_tokens
from vllm_sparse_backend.calibration.prompt_chunks import chunk_rows
from vllm_sparse_backend.cli.common import device_of, failures, token_counts, wide_console
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.evaluation.crossover_bench import method_label
from vllm_sparse_backend.evaluation.report import BenchError, table_of
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import (
    KEY_BLOCK,
    below_floor,
    causal_scores,
    estimated_vectors,
    fewest,
    peaks,
    round_to_e4m3,
    scored_queries,
)
from vllm_sparse_kernels.rows import Rows

FLOOR = 0.5
"""Floor of the default settings, and the share below which queries are counted."""

ROUNDING = 1e-6
"""Shares that are below a floor by no more than this are rounding errors of float32 sums."""

QUANTILES = {"least": 0.0, "0.1th percentile": 0.001, "1st percentile": 0.01, "median": 0.5}
BELOW = f"queries below {FLOOR:g}"

SETTINGS = (
    "top_p",
    f'top_p:queries="all",floor={FLOOR}',
    'top_p:channels="low_rank"',
    f'top_p:queries="all",channels="low_rank",floor={FLOOR}',
)


@dataclass
class KeptShares:
    """Shares that the queries of all heads and layers keep under one setting: a tensor [queries] for each tile."""

    estimated: list[torch.Tensor] = field(default_factory=list)
    true: list[torch.Tensor] = field(default_factory=list)

    def merged(self) -> "KeptShares":
        """Return the same shares, in one tensor on the CPU."""
        return KeptShares([torch.cat(self.estimated).cpu()], [torch.cat(self.true).cpu()])


def measure(
    captured: Capture, methods: Sequence[TopP], num_tokens: int, chunk_tokens: int, min_tokens: int, device: str
) -> list[KeptShares]:
    """Measure the kept shares of every query of a prompt.

    Args:
        captured: Queries and keys of the prompt.
        methods: The settings.
        num_tokens: Length of the prompt, at most that of the capture. Longer captures have the same first tokens.
        chunk_tokens: Tokens of a step, on which the estimate depends.
        min_tokens: Dense first positions, whose queries are left out.
        device: Where to compute.

    Returns:
        The shares of each setting.
    """
    results = [KeptShares() for _ in methods]
    for layer, scale in sorted(captured.scales.items()):
        tensors = captured.read(layer, device)
        dtype = tensors.q.dtype
        queries, keys = tensors.q[:num_tokens].float(), tensors.k[:num_tokens].float()
        layer_shares = [KeptShares() for _ in methods]
        for rows in chunk_rows(num_tokens, chunk_tokens, torch.device("cpu"), min_tokens):
            first, end = rows.context_lens[0], rows.seq_lens[0]
            step = _Step(queries[first:end], keys[:end], rows, scale)
            step.add_shares(methods, layer_shares, dtype)
        for result, shares in zip(results, layer_shares, strict=True):
            merged = shares.merged()
            result.estimated += merged.estimated
            result.true += merged.true
    return [result.merged() for result in results]


@dataclass(frozen=True)
class _Step:
    """One layer's queries [query_len, num_heads, head_dim] of a chunk, and keys [seq_len, num_kv_heads, head_dim]."""

    queries: torch.Tensor
    keys: torch.Tensor
    rows: Rows
    scale: float

    def add_shares(self, methods: Sequence[TopP], results: Sequence[KeptShares], dtype: torch.dtype) -> None:
        """Add the shares of this chunk's queries under each method. ``dtype`` is that of the model's keys."""
        exact = self._by_kv_head(self.queries, self.keys)
        estimates = {}
        for method in {method.channels: method for method in methods}.values():
            vectors = estimated_vectors(method, self.queries, self.keys, dtype)
            rounded = (round_to_e4m3(vectors[0], 1), round_to_e4m3(vectors[1], KEY_BLOCK))
            estimates[method.channels] = self._by_kv_head(*rounded)
        for tile in self.rows.tile_list:
            first = tile.position - self.rows.context_lens[0]
            span = (first, tile.length_tokens, tile.position)
            masses = self._scores(*exact, *span).softmax(-1).unflatten(-1, (-1, KEY_BLOCK)).sum(-1)
            shares = {
                channels: self._scores(*vectors, *span).unflatten(-1, (-1, KEY_BLOCK)).amax(-1).softmax(-1)
                for channels, vectors in estimates.items()
            }
            for method, result in zip(methods, results, strict=True):
                estimate = shares[method.channels]
                scored = scored_queries(method, tile.length_tokens).to(estimate.device)
                kept = _kept_blocks(method, estimate[:, scored], tile.position)[:, None]
                result.estimated.append(((estimate * kept).sum(-1) / estimate.sum(-1)).flatten())
                result.true.append(((masses * kept).sum(-1) / masses.sum(-1)).flatten())

    def _by_kv_head(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [num_kv_heads, group, query_len, channels] and keys [num_kv_heads, seq_len, channels]."""
        grouped = queries.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
        return grouped.contiguous(), keys.transpose(0, 1).contiguous()

    def _scores(
        self, queries: torch.Tensor, keys: torch.Tensor, first: int, length: int, position: int
    ) -> torch.Tensor:
        """Return the scores of a tile [num_heads, queries, keys in whole blocks]; see ``causal_scores``."""
        tile = queries[:, :, first : first + length]
        products = tile.flatten(1, 2) @ keys[:, : position + length].mT
        positions = torch.arange(position, position + length, device=queries.device)
        return causal_scores(products.unflatten(1, tile.shape[1:3]).flatten(0, 1), positions, self.scale)


def _kept_blocks(method: TopP, shares: torch.Tensor, position: int) -> torch.Tensor:
    """Return the blocks [num_heads, blocks] that a tile keeps, from the shares [num_heads, queries, blocks] of its
    scored queries."""
    kept = fewest(method, shares.mean(1), position) | peaks(method, shares)
    if not method.floor:
        return kept
    return kept | torch.stack([below_floor(method, *head) for head in zip(shares, kept, strict=True)])


def statistics(shares: torch.Tensor) -> dict[str, float]:
    """Return the quantiles of ``QUANTILES`` of some shares, and the share of queries below ``FLOOR``.

    Args:
        shares: [queries].

    Returns:
        Values by name. A quantile is the lowest share that at least this part of all queries does not exceed.
    """
    ordered = shares.sort().values
    ranks = {name: max(math.ceil(share * len(ordered)) - 1, 0) for name, share in QUANTILES.items()}
    values = {name: float(ordered[rank]) for name, rank in ranks.items()}
    return values | {BELOW: float((ordered < FLOOR - ROUNDING).double().mean())}


def settings(texts: Sequence[str], head_dim: int) -> list[TopP]:
    """Return the settings to measure.

    Args:
        texts: Values of ``--method``; empty for the defaults, without ``low_rank`` if it keeps all channels.
        head_dim: Elements of a head's query or key.

    Returns:
        Methods.

    Raises:
        BenchError: A text names another method than ``top_p``, or cannot be parsed.
    """
    methods = []
    for text in texts or SETTINGS:
        spec = MethodSpec.parse(text)
        method = make_method(spec.method, dict(spec.params))
        if not isinstance(method, TopP):
            raise BenchError(f"--method: given {text!r}, expected top_p or default, whose queries have kept shares")
        if not texts and method.channels == "low_rank" and not method.is_low_rank(head_dim):
            continue
        methods.append(method)
    return methods


def add_rows(report: Report, about: str, method: TopP, shares: KeptShares) -> list[dict[str, str]]:
    """Add a setting's figures to the report, and return two rows of its table."""
    rows = []
    for kind, values in (("estimated", shares.estimated[0]), ("true", shares.true[0])):
        figures = statistics(values)
        is_bound = kind == "estimated" and method.floor > 0 and method.queries == "all"
        for name, value in figures.items():
            what = f"{about}: share of queries whose {kind} kept share is below {FLOOR:g}"
            if name != BELOW:
                what = f"{about}: {kind} kept share of a query, {name}"
            bar = {"least": method.floor, BELOW: 0.0}.get(name) if is_bound else None
            report.add_figure(what, value, "share", "lower" if name == BELOW else "higher", bar)
        cells = {name: f"{value:.2g}" if name == BELOW else f"{value:.4f}" for name, value in figures.items()}
        rows.append({"setting": method_label(method), "share": kind, **cells, "queries": f"{len(values):,}"})
    return rows


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model in Hugging Face's format.")],
    tokens: Annotated[str, typer.Option(help="Lengths of the prompt, comma-separated.")] = "16384,32768",
    method: Annotated[
        list[str] | None,
        typer.Option(help="top_p:FIELD=VALUE,…; repeatable. Default: with and without a floor, also for low_rank."),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Dense first positions, which are left out.", min=0)] = 2048,
    chunk: Chunk = CHUNK_TOKENS,
    text: Text = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option("--out", help="List of figures to merge this run's into.")] = None,
) -> None:
    """Measure every length and setting, and print a table for each length."""
    with failures(), TemporaryDirectory(prefix="kept-shares-") as folder:
        device, lengths = device_of(device), token_counts("--tokens", tokens, least=min_tokens + 1)
        report = Report("kept_shares", device_label(device), results_path=out)
        ids = read_tokens(model, text or default_text(), prompt_tokens(model, max(lengths), max(lengths)))
        start = time.perf_counter()
        captured = capture(model, ids, Path(folder), device)
        print(f"{captured.model}: {len(captured.scales)} layers captured in {time.perf_counter() - start:.0f} s")
        methods = settings(method or (), captured.shape.head_dim)
        for num_tokens in lengths:
            start = time.perf_counter()
            measured = measure(captured, methods, num_tokens, chunk, min_tokens, device)
            rows = []
            for setting, shares in zip(methods, measured, strict=True):
                about = f"{method_label(setting)}, {captured.model}, {num_tokens:,} tokens, float32"
                rows += add_rows(report, about, setting, shares)
            title = f"{captured.model}, {num_tokens:,} tokens, in {time.perf_counter() - start:.0f} s"
            wide_console().print(table_of(title, {name: name for name in rows[0]}, rows, ""))


if __name__ == "__main__":
    typer.run(main)
