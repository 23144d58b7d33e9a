"""What selection costs: each method at its defaults against FlashAttention-3's time for the same rows.

    python -m benchmarks.select [--out docs/results/methods.json]

A chunk of 8,192 queries after 122,880, random normal q, k, v in bf16, 32 query heads on 8 kv heads of 128, pages of
128. Attention over the index is checked on some tiles before anything is timed, and so is dense attention by the
method's own selection when it is set to keep everything; a method that fails either prints no time. SharePrefill's
heads are one cluster, and its time is that of a layer that makes the pivot.
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
from vllm_sparse_kernels.select.share_prefill import SharePrefill
from vllm_sparse_kernels.testing.batches import Batch, random_batch
from vllm_sparse_kernels.testing.full_density import FULL_DENSITY

CASE = "chunk of 8,192 after 122,880"
SHARE_BARS = {"sale": 0.30}
SHARE_BAR = 0.15
WORKSPACE_BAR_MIB = 512
EVERY_HEAD = torch.arange(HEADS, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")


CLUSTERED = {"share_prefill": SharePrefill(cluster=0)}


def select(method: Method, batch: Batch) -> SparseIndex:
    """A new index that ``method`` fills as one layer of a new step."""
    batch.rows.state.clear()
    layout = method.stripe_layout(batch.rows)
    layouts = dict.fromkeys(range(HEADS), layout) if layout.capacity else None
    index = SparseIndex.allocate(batch.rows, HEADS, method.block_tokens, layouts)
    method.select(batch.q, batch.cache, index, EVERY_HEAD, batch.scale)
    return index


def measure_full(name: str, batch: Batch, dense_out: torch.Tensor, results: Results) -> bool:
    """Whether the method, set to keep everything, gives FlashAttention-3's result within the budget."""
    index = select(merged(FULL_DENSITY[name]), batch)
    out = batch.empty_out()
    attend(batch.q, batch.cache, index, out, batch.scale)
    error, eager = sampled_error(batch, index, out)
    whole = float((out.float() - dense_out.float()).norm() / dense_out.float().norm())
    density = int(index.kept_pairs()) / (HEADS * causal_pairs(batch.rows))
    results.add(f"{name}, {CASE}, set to keep everything: density", density, "share", "higher", 1.0)
    about = f"{name}, {CASE}, set to keep everything: difference from FlashAttention-3"
    results.add(about, whole, "relative", "lower", 2 * eager)
    return density == 1.0 and whole <= 2 * eager and error <= 2 * eager


def measure(name: str, method: Method, batch: Batch, dense_ms: float, results: Results) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index = select(method, batch)
    torch.cuda.synchronize()
    workspace = (torch.cuda.max_memory_allocated() - before) / 2**20
    out = batch.empty_out()
    attend(batch.q, batch.cache, index, out, batch.scale)
    error, eager = sampled_error(batch, index, out)
    if not error <= 2 * eager:
        print(f"{name}: error {error:.2e} over the budget {2 * eager:.2e}: no times")
        return

    def run() -> None:
        batch.rows.state.clear()
        method.select(batch.q, batch.cache, index, EVERY_HEAD, batch.scale)

    density = int(index.kept_pairs()) / (HEADS * causal_pairs(batch.rows))
    bar = SHARE_BARS.get(name, SHARE_BAR)
    results.add(
        f"{name}, {CASE}: selection over FlashAttention-3's time", median_ms(run) / dense_ms, "ratio", "lower", bar
    )
    results.add(f"{name}, {CASE}: index and workspace", workspace, "MiB", "lower", WORKSPACE_BAR_MIB)
    results.add(f"{name}, {CASE}: density on random data", density, "share", "lower")


def merged(method: Method) -> Method:
    """What a plan makes of equal methods on all heads."""
    return method.merged([method] * HEADS)


def main(out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None) -> None:
    results = Results(out)
    batch = random_batch([CASES[CASE]], HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, torch.bfloat16, "cuda")
    dense_out = batch.empty_out()
    dense_ms = median_ms(flash_attention(batch, dense_out))
    for name, entry in METHODS.items():
        if not measure_full(name, batch, dense_out, results):
            print(f"{name}: set to keep everything it is not dense attention: no times")
            continue
        measure(name, merged(CLUSTERED.get(name, entry.parameters())), batch, dense_ms, results)
        torch.cuda.empty_cache()
    results.show()


if __name__ == "__main__":
    typer.run(main)
