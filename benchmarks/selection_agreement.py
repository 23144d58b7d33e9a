# SPDX-License-Identifier: Apache-2.0
"""Measure how well the selection engines of a method agree. The trial at a server's start requires a minimum.

    python -m benchmarks.selection_agreement [--results docs/results/mend.json]

Each method selects blocks of ``sharpened`` random batches on its Hopper engine and on its portable engine. For each
batch, the agreement is the number of blocks that both engines keep, divided by the number that at least one of them
keeps. The figure is the minimum over all batches. This needs a GPU on which the Hopper engine runs.
"""

from collections.abc import Sequence

import torch
import typer
from rich.console import Console

from benchmarks.figures import Report
from benchmarks.options import Json, Results
from tests.helpers.batches import random_batch
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.evaluation.report import BenchError, table_of
from vllm_sparse_kernels.engine_trial import LEAST_AGREEMENT, Batch, agreement, sharpened
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.layer import Layer, layer_plan
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec

METHODS = ("top_p", "sale")
HEAD_DIMS = (64, 128, 256)
NUM_HEADS, NUM_KV_HEADS = 8, 2
LENGTHS = ([(0, 3_000)], [(15_904, 4_096), (0, 4_000)])
"""(context_len, query_len) of each batch's rows: one row of 3,000 tokens, and two rows of 20,000 and 4,000."""
SEEDS = (0, 1)
PAGE_TOKENS = 128
FIGURE = "blocks that the Hopper and the portable engine both keep, of those that either keeps, least of four batches"


def sharpened_batches(head_dim: int, device: str) -> list[Batch]:
    """Return a batch for each of ``LENGTHS`` and ``SEEDS``."""
    heads = (NUM_HEADS, NUM_KV_HEADS, head_dim)
    batches = [
        random_batch(lengths, *heads, PAGE_TOKENS, torch.bfloat16, device, seed)
        for lengths in LENGTHS
        for seed in SEEDS
    ]
    return [sharpened(batch) for batch in batches]


def least_agreement(method: str, head_dim: int, batches: Sequence[Batch]) -> float:
    """Return the lowest agreement between a method's first and last selection engines.

    Args:
        method: Name of a method with several selection engines, run with its default parameters.
        head_dim: Elements of a head's query or key.
        batches: Batches, with the same heads.

    Returns:
        A share from 0 to 1.

    Raises:
        BenchError: The first engine does not run on the device of the batches.
    """
    device = batches[0].q.device
    layer = Layer.of(layer_plan([make_method(method, {})] * batches[0].num_heads), head_dim, device)
    (group,), (heads,) = layer.groups, layer.head_ids
    first, *_, last = group.method.select_engines
    refusal = first.refusal(SelectSpec(group.method, device, head_dim))
    if refusal is not None:
        raise BenchError(f"{method}: the selection engine {first.name} is not usable here: {refusal}")

    def select(engine: SelectEngine, batch: Batch) -> SparseIndex:
        index = layer.allocate_index(batch.rows)
        index.block_counts.zero_()
        engine.select(group.method, batch.q, batch.cache, index, heads, batch.scale)
        index.check(heads.tolist())
        return index

    return min(agreement(select(first, batch), select(last, batch), heads.tolist()) for batch in batches)


def main(json_path: Json = None, results: Results = None) -> None:
    """Measure every method and head dimension, and print a table."""
    if not torch.cuda.is_available():
        typer.echo("selection engines: given no CUDA device, expected one on which the Hopper engine runs", err=True)
        raise typer.Exit(1)
    report = Report("selection_agreement", torch.cuda.get_device_name(), json_path, results)
    try:
        for method in METHODS:
            for head_dim in HEAD_DIMS:
                share = least_agreement(method, head_dim, sharpened_batches(head_dim, "cuda"))
                report.add_case({"method": method, "head_dim": head_dim, "share": share})
                name = f"{method}, head dim {head_dim}: {FIGURE}"
                report.add_figure(name, share, "share", "higher", LEAST_AGREEMENT)
    except BenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    columns = {name: name for name in ("method", "head_dim", "share")}
    Console().print(table_of("Agreement of selection engines", columns, report.cases, ""))
    if any(case["share"] < LEAST_AGREEMENT for case in report.cases):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
