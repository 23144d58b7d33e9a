# SPDX-License-Identifier: Apache-2.0
"""`attend` over random indices against FlashAttention on the same pages: the efficiency of a kept pair.

    python -m benchmarks.attend [--contexts 24576,122880] [--densities 1,0.5,0.2] [--stripes 1024,8192]

Efficiency is FlashAttention's time × density ÷ the engine's time, including all of the engine's work between index and
output. At an efficiency of 1, a kept pair costs as much as in FlashAttention. Blocks, or
single keys ("stripes"), are drawn at random for each head and tile, and the diagonal is always kept. Every case is
checked before it is timed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.attention_check import BUDGET, Check, check_attention
from benchmarks.attention_prompts import Heads, chunk_of, planted_prompt
from benchmarks.figures import FigureReport
from benchmarks.options import ChunkOptions, difference, numbers, run_alone, show
from vllm_sparse_backend.calibration.cuda_device import Card, Span
from vllm_sparse_backend.cli.common import failures
from vllm_sparse_kernels import IndexLayout, SparseIndex, StripeLayout, Workspace
from vllm_sparse_kernels.attention import AttendSpec
from vllm_sparse_kernels.engine_choice import choose_engine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs

NUM_INPUTS = 2
"""Number of inputs that are timed in turn, so that no input is in a cache."""

PASSES = 16
"""Passes of a case: a card at its power limit changes its clock by about 3 %, which few passes would show."""

COLUMNS = {
    "engine": "engine",
    "context_len": "after",
    "query_len": "chunk",
    "block_tokens": "blocks of",
    "stripes": "stripes",
    "density": "density",
    "dense_ms": "dense ms",
    "ms": "ms",
    "times_faster": "times faster",
    "efficiency": "efficiency",
    "error_ratio": "error ÷ eager's",
    "problem": "not timed",
}


class Case(NamedTuple):
    """Random blocks kept with probability ``density``, and up to ``stripes`` single keys per tile."""

    block_tokens: int
    density: float
    stripes: int = 0

    def __str__(self) -> str:
        if self.stripes:
            return f"stripes {self.stripes:,}"
        return f"blocks of {self.block_tokens}, density {self.density:g}"


def run_attend(
    card: Card, context_len: int, query_len: int, cases: Sequence[Case], report: FigureReport
) -> Iterator[dict[str, Any]]:
    """Measure the cases of a chunk, and yield each case when it is reported."""
    prompts = (planted_prompt(Heads(), context_len + query_len, card.device, seed) for seed in range(NUM_INPUTS))
    batches = [chunk_of(prompt, context_len, query_len) for prompt in prompts]
    for case in cases:
        row = {"context_len": context_len, "query_len": query_len, **_measure(card, case, batches)}
        report.add_case(row)
        if "efficiency" in row:
            name = f"attend, chunk after {context_len:,}, {case}: efficiency"
            report.add_figure(name, row["efficiency"], "ratio", "higher")
        yield row


def random_index(batch: Batch, case: Case) -> SparseIndex:
    """Return the case's index over a batch of one row."""
    rows, device = batch.rows, batch.rows.device
    generator = torch.Generator(device).manual_seed(0)
    heads = range(batch.num_heads)
    stripes = [StripeLayout.per_tile(rows, case.stripes)] * batch.num_heads
    index = IndexLayout.build(rows, case.block_tokens, stripes).new_index(Workspace(device))
    for i_tile, tile in enumerate(rows.tile_list):
        for head in heads:
            draw = torch.rand(index.num_causal_blocks(tile), generator=generator, device=device)
            index.set_blocks(head, i_tile, draw < case.density)
            if case.stripes and tile.position:
                count = min(case.stripes, tile.position)
                index.set_stripes(
                    head, i_tile, torch.randint(0, tile.position, (count,), generator=generator, device=device)
                )
    return index


def _measure(card: Card, case: Case, batches: Sequence[Batch]) -> dict[str, Any]:
    indices = [random_index(batch, case) for batch in batches]
    engine = choose_engine(card.engines.values(), AttendSpec.of(batches[0].cache, indices[0], None)).engine
    outs, dense_outs = ([batch.empty_out() for batch in batches] for _ in range(2))

    def ours(i: int) -> None:
        with indices[i].workspace.frame():
            engine.attend(batches[i].call(indices[i]), outs[i])

    dense: list[Span] = [("dense", card.dense(batch, out)) for batch, out in zip(batches, dense_outs, strict=True)]
    ours(0)
    dense[0][1]()
    check = check_attention(batches[0], indices[0], outs[0])
    everything = sum(batch.num_heads * causal_pairs(batch.rows) for batch in batches)
    row: dict[str, Any] = {
        "engine": engine.name, "block_tokens": case.block_tokens, "stripes": case.stripes or None,
        "density": sum(int(index.kept_pairs()) for index in indices) / everything, "error_ratio": check.ratio,
    }  # fmt: skip
    if problem := _problem(case, check, outs[0], dense_outs[0]):
        return row | {"problem": problem}
    sparse: list[Span] = [("ours", partial(ours, i)) for i in range(len(batches))]
    taken = card.spans_ms([dense, sparse], num_passes=PASSES)
    row["dense_ms"], row["ms"] = (median(taken[name]) / len(batches) for name in ("dense", "ours"))
    row["times_faster"] = row["dense_ms"] / row["ms"]
    row["efficiency"] = row["times_faster"] * row["density"]
    return row


def _problem(case: Case, check: Check, out: torch.Tensor, dense_out: torch.Tensor) -> str | None:
    """Return why a result is wrong, compared with float64 on sampled tiles, and with FlashAttention if all is kept."""
    if not check.passed:
        return str(check)
    if case.density >= 1 and not (apart := difference(out, dense_out)) <= BUDGET * check.eager:
        return f"{apart:.2e} from FlashAttention's result, at most {BUDGET * check.eager:.2e}"
    return None


@dataclass(frozen=True, kw_only=True)
class Attend(ChunkOptions):
    """`attend` over random indices against FlashAttention on the same pages."""

    blocks: Annotated[str, typer.Option(help="Widths of blocks in keys, comma-separated.")] = "128,64,32"
    densities: Annotated[str, typer.Option(help="Shares of blocks to keep, comma-separated.")] = "1,0.5,0.2,0.08,0.03"
    stripes: Annotated[str, typer.Option(help="Single keys per tile, comma-separated.")] = "1024,8192"

    def run(self) -> None:
        """Measure each width of blocks at each density, and single keys with only the diagonal blocks."""
        blocks = numbers(self.blocks)
        densities = [float(density) for density in self.densities.split(",")]
        cases = [Case(block_tokens, density) for block_tokens in blocks for density in densities]
        cases += [Case(max(blocks), 0.0, stripes) for stripes in numbers(self.stripes)]
        with failures():
            card = Card()
            report = self.report("attend", card)
            # One context at a time: the inputs of two might not fit into memory.
            rows = chain.from_iterable(
                run_attend(card, context_len, self.chunk, cases, report) for context_len in numbers(self.contexts)
            )
            show(f"attend against FlashAttention-{card.flash_version}, {report.device}, {Heads()}", rows, COLUMNS)


if __name__ == "__main__":
    run_alone(Attend)
