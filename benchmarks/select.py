"""What selection costs: each method at its defaults against FlashAttention-3's time for the same rows.

    python -m benchmarks.select [--out docs/results/methods.json]

A chunk of 8,192 queries after 122,880, random normal q, k, v in bf16, 32 query heads on 8 kv heads of 128, pages of
128. The index is checked on the tiles of a few heads before anything is timed; a method that fails it prints no time.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.attend import CASES, HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, flash_attention, median_ms, sampled_error
from benchmarks.results import Results
from vllm_sparse_kernels import SparseIndex, attend
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.select import METHODS
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.testing.batches import Batch, random_batch

CASE = "chunk of 8,192 after 122,880"
SHARE_BARS = {"sale": 0.30}
SHARE_BAR = 0.15
WORKSPACE_BAR_MIB = 512


def measure(name: str, method: Method, batch: Batch, dense_ms: float, results: Results) -> None:
    heads = torch.arange(HEADS, dtype=torch.int32, device="cuda")
    layout = method.stripe_layout(batch.rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layouts = dict.fromkeys(range(HEADS), layout) if layout.capacity else None
    index = SparseIndex.allocate(batch.rows, HEADS, method.block_tokens, layouts)
    method.select(batch.q, batch.cache, index, heads, batch.scale)
    torch.cuda.synchronize()
    workspace = (torch.cuda.max_memory_allocated() - before) / 2**20
    out = batch.empty_out()
    attend(batch.q, batch.cache, index, out, batch.scale)
    error, eager = sampled_error(batch, index, out)
    if not error <= 2 * eager:
        print(f"{name}: error {error:.2e} over the budget {2 * eager:.2e}: no times")
        return
    ms = median_ms(lambda: method.select(batch.q, batch.cache, index, heads, batch.scale))
    density = int(index.kept_pairs()) / (HEADS * causal_pairs(batch.rows))
    bar = SHARE_BARS.get(name, SHARE_BAR)
    results.add(f"{name}, {CASE}: selection over FlashAttention-3's time", ms / dense_ms, "ratio", "lower", bar)
    results.add(f"{name}, {CASE}: index and workspace", workspace, "MiB", "lower", WORKSPACE_BAR_MIB)
    results.add(f"{name}, {CASE}: density on random data", density, "share", "lower")


def main(out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None) -> None:
    results = Results(out)
    batch = random_batch([CASES[CASE]], HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, torch.bfloat16, "cuda")
    dense_ms = median_ms(flash_attention(batch, batch.empty_out()))
    for name, entry in METHODS.items():
        measure(name, entry.parameters(), batch, dense_ms, results)
        torch.cuda.empty_cache()
    results.show()


if __name__ == "__main__":
    typer.run(main)
