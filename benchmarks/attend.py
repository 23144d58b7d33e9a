"""`attend` against FlashAttention-3 on the same paged inputs: error first, then the ratio of times.

    python -m benchmarks.attend [--out docs/results/skeleton.json]

Random normal q, k, v in bf16, 32 query heads on 8 kv heads of 128, pages of 128. A case whose error exceeds its budget
(twice that of eager bf16 attention against float64) prints no ratio. Medians of do_bench.

The options, at the longest case: 8-bit scores, whose relative L1 error may be SageAttention's on normal data (0.021,
its table 9); and the skip of products with a λ that leaves nothing out, which shows what asking costs, and with one
that leaves out nearly all that is no block's new maximum, which shows the most that it can save. (Normal data have no
blocks that a useful λ would skip.) There the truth skips the same steps.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from triton.testing import do_bench

from benchmarks.results import Results
from vllm_sparse_kernels import AttendOptions, SparseIndex, attend
from vllm_sparse_kernels.reference.attend import step_margins, walk
from vllm_sparse_kernels.select.dense import Dense
from vllm_sparse_kernels.testing.batches import Batch, random_batch, random_index

CASES = {"32K prompt": (0, 32768), "chunk of 8,192 after 122,880": (122880, 8192)}
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 128
SAMPLED_TILES = 12

OPTIONS = {"8-bit scores": (None, True), "skip of nothing": (-1e9, False), "skip of nearly all": (-1e-6, False)}
SAGE_ATTENTION_L1 = 0.021


def flash_attention(batch: Batch, out: torch.Tensor) -> Callable[[], None]:
    """FlashAttention-3, as vLLM calls it, over the batch's pages."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    rows = batch.rows
    starts = [0]
    for query_len in rows.query_lens:
        starts.append(starts[-1] + query_len)
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=batch.q.device)
    seq_lens = torch.tensor(rows.seq_lens, dtype=torch.int32, device=batch.q.device)
    num_pages = batch.cache.keys.shape[0]
    block_table = torch.where(rows.block_table < num_pages, rows.block_table, 0)

    def run() -> None:
        flash_attn_varlen_func(
            q=batch.q, k=batch.cache.keys, v=batch.cache.values, out=out, cu_seqlens_q=query_start_loc,
            max_seqlen_q=max(rows.query_lens), seqused_k=seq_lens, max_seqlen_k=max(rows.seq_lens),
            softmax_scale=batch.scale, causal=True, block_table=block_table, fa_version=3,
        )  # fmt: skip

    return run


def sampled_error(
    batch: Batch, index: SparseIndex, out: torch.Tensor, seed: int = 0, norm: int = 2, margin: float | None = None
) -> tuple[float, float]:
    """(worst relative error of ``out``, the same of eager attention in out's dtype), on some tiles, in float64.

    With a ``margin`` λ, both leave out what ``attend``'s reference leaves out in float64.
    """
    chosen = random.Random(seed)
    ours = eager = 0.0
    group = batch.num_heads // batch.cache.num_kv_heads
    for _ in range(SAMPLED_TILES):
        i_tile, head = chosen.randrange(batch.rows.num_tiles), chosen.randrange(batch.num_heads)
        tile = batch.rows.tile_list[i_tile]
        k, v = batch.cache.gather(batch.rows.block_table[tile.row], batch.rows.seq_lens[tile.row])
        kept, steps = walk(index, head, i_tile)
        k, v = k[kept, head // group], v[kept, head // group]
        tokens = slice(tile.token, tile.token + tile.length_tokens)
        positions = tile.position + torch.arange(tile.length_tokens, device=k.device)
        hidden = kept[None] > positions[:, None]
        q = batch.q[tokens, head]

        def scores(dtype: torch.dtype, q=q, k=k, hidden=hidden) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return (q.to(dtype) @ k.to(dtype).T * batch.scale).masked_fill(hidden, -torch.inf)

        taken = torch.ones_like(kept) if margin is None else step_margins(scores(torch.float64), steps)[steps] >= margin
        truth, rounded = (
            ((scores(dtype).softmax(-1) * taken).to(dtype) @ v.to(dtype)).double()
            for dtype in (torch.float64, out.dtype)
        )
        ours = max(ours, float((out[tokens, head].double() - truth).norm(norm) / truth.norm(norm)))
        eager = max(eager, float((rounded - truth).norm(norm) / truth.norm(norm)))
    return ours, eager


def median_ms(run: Callable[[], object]) -> float:
    return float(do_bench(run, warmup=50, rep=300, return_mode="median"))


def measure(case: str, block_tokens: int, results: Results) -> None:
    batch = random_batch([CASES[case]], HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, torch.bfloat16, "cuda")
    out, dense_out = batch.empty_out(), batch.empty_out()
    run_dense = flash_attention(batch, dense_out)
    run_dense()
    full = SparseIndex.allocate(batch.rows, HEADS, block_tokens)
    Dense().select(batch.q, batch.cache, full, torch.arange(HEADS, dtype=torch.int32, device="cuda"), batch.scale)
    full_pairs = int(full.kept_pairs())
    dense_ms = median_ms(run_dense)
    for asked in (1.0, 0.2, 0.08):
        index = full if asked == 1.0 else random_index(batch, block_tokens, asked)
        name = f"attend, {case}, blocks of {block_tokens}, density {asked:g}"
        out.fill_(float("nan"))
        attend(batch.q, batch.cache, index, out, batch.scale)
        error, eager = sampled_error(batch, index, out)
        if asked == 1.0:
            whole = (out.float() - dense_out.float()).norm() / dense_out.float().norm()
            results.add(f"{name}: difference from FlashAttention-3", float(whole), "relative", "lower", 2 * eager)
        results.add(f"{name}: error over eager bf16's, against float64", error / eager, "ratio", "lower", 2.0)
        if not error <= 2 * eager:
            print(f"{name}: error {error:.2e} over the budget {2 * eager:.2e}: no ratio")
            continue
        ms = median_ms(lambda index=index: attend(batch.q, batch.cache, index, out, batch.scale))  # type: ignore[misc]
        density = int(index.kept_pairs()) / full_pairs
        bar = 3.0 if asked == 0.2 and block_tokens == 128 else None
        results.add(f"{name}: times faster than FlashAttention-3", dense_ms / ms, "ratio", "higher", bar)
        results.add(f"{name}: kept pairs", density, "share", "lower")
        print(f"{name}: {ms:.3f} ms, FlashAttention-3 {dense_ms:.3f} ms, efficiency {dense_ms * density / ms:.2f}")
        if case == list(CASES)[-1] and block_tokens == 128 and asked in (1.0, 0.2):
            measure_options(batch, index, name, ms, results)


def measure_options(batch: Batch, index: SparseIndex, name: str, plain_ms: float, results: Results) -> None:
    """What each option makes of the time that the same index takes without."""
    for option, (margin, int8) in OPTIONS.items():
        options = AttendOptions.of([margin] * HEADS, [int8] * HEADS, batch.q.device)
        out = batch.empty_out()
        attend(batch.q, batch.cache, index, out, batch.scale, options=options)
        error, eager = sampled_error(batch, index, out, norm=1 if int8 else 2, margin=margin)
        what, value, budget = ("error over eager bf16's, against float64", error / eager, 2.0)
        if int8:
            what, value, budget = ("relative L1 error against float64", error, SAGE_ATTENTION_L1)
        results.add(f"{name}, {option}: {what}", value, "ratio", "lower", budget)
        if not value <= budget:
            print(f"{name}, {option}: error {error:.2e} over the budget: no ratio")
            continue
        ms = median_ms(lambda: attend(batch.q, batch.cache, index, out, batch.scale, options=options))  # noqa: B023
        results.add(f"{name}, {option}: times faster than without", plain_ms / ms, "ratio", "higher")
        print(f"{name}, {option}: {ms:.3f} ms, without {plain_ms:.3f} ms")


def main(out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None) -> None:
    results = Results(out)
    for case in CASES:
        for block_tokens in (128, 64):
            measure(case, block_tokens, results)
    results.show()


if __name__ == "__main__":
    typer.run(main)
