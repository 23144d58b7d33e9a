"""What methods cost on a trained model's attention: selection and `attend` of all layers against FlashAttention-3.

    python -m benchmarks.captured MODEL [--length 32768] [--text FOLDER] [--out docs/results/methods.json]

Queries, keys and values are captured as in `benchmarks.recall`, which says what the methods keep of them. Heads are
repeated to 32, an 8B model's number, as a few heads do not fill the card; copies of a head are in clusters of their
own. The prompt is prefilled as a server does it, chunk by chunk of 8,192; times are medians of whole passes. A method
whose attention over its own selection is off the budget anywhere gets no ratio.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.attend import flash_attention, sampled_error
from benchmarks.recall import CLUSTER_TOKENS, default_text, head_clusters, plan_of
from benchmarks.recall_figures import length_name
from benchmarks.results import Results
from vllm_sparse_backend.calibrate.share_prefill import Clusters
from vllm_sparse_backend.evaluate.capture import Capture, capture, read_tokens, text_files
from vllm_sparse_backend.evaluate.quality import PAGE_TOKENS, paged, select_layer
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_kernels import PagedCache, Rows, SparseIndex, attend
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.select import METHODS
from vllm_sparse_kernels.select.share_prefill import NOISE
from vllm_sparse_kernels.testing.batches import Batch

HEADS, CHUNK_TOKENS, PASSES = 32, 8192, 5
AHEAD_CYCLES = 20_000_000
"""The device waits this long (about 10 ms) before what is timed, so that the host is never what it waits for."""


def repeated_clusters(clusters: Clusters, copies: int) -> Clusters:
    """Clusters of heads that stand there ``copies`` times; no copy shares with another."""
    apart = 1 + max(max(heads) for heads in clusters)
    return tuple(
        tuple(c if c == NOISE else c + copy * apart for copy in range(copies) for c in heads) for heads in clusters
    )


def batches(captured: Capture, copies: int) -> list[list[Batch]]:
    """Per layer, one batch a chunk."""
    device = torch.device("cuda")
    table = torch.arange(ceil_div(captured.num_tokens, PAGE_TOKENS), dtype=torch.int32, device=device)[None]
    layers = []
    for layer in sorted(captured.scales):
        q, k, v = (x.repeat(1, copies, 1) for x in captured.read(layer, device))
        cache = PagedCache(paged(k), paged(v))
        chunks = [
            (start, min(CHUNK_TOKENS, captured.num_tokens - start))
            for start in range(0, captured.num_tokens, CHUNK_TOKENS)
        ]
        layers.append([
            Batch(q[start : start + n], cache, Rows((0,), (n,), (start,), table), captured.scales[layer])
            for start, n in chunks
        ])  # fmt: skip
    return layers


class Timer:
    """Milliseconds of device time between ``start`` and ``stop``, added up."""

    def __init__(self) -> None:
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self.spans.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self.spans[-1][0].record()

    def stop(self) -> None:
        self.spans[-1][1].record()

    def total_ms(self) -> float:
        torch.cuda.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in self.spans)


def one_pass(
    layers: list[list[Batch]], plan: Plan, selecting: Timer, attending: Timer
) -> Iterator[tuple[Batch, SparseIndex, torch.Tensor]]:
    """Prefill chunk by chunk through all layers; yields each (batch, index, out)."""
    for i_chunk in range(len(layers[0])):
        rows = of_new_step(layers[0][i_chunk].rows)
        for layer, chunks in enumerate(layers):
            batch, groups = replace(chunks[i_chunk], rows=rows), plan.layer(layer)
            assert groups is not None
            out = torch.empty_like(batch.q)
            torch.cuda._sleep(AHEAD_CYCLES)
            selecting.start()
            index = select_layer(groups, batch.q, batch.cache, rows, batch.scale)
            selecting.stop()
            attending.start()
            attend(batch.q, batch.cache, index, out, batch.scale)
            attending.stop()
            yield batch, index, out


def of_new_step(rows: Rows) -> Rows:
    """The same rows, with no state."""
    return Rows(rows.tokens, rows.query_lens, rows.context_lens, rows.block_table)


def dense_ms(layers: list[list[Batch]]) -> float:
    """FlashAttention-3 on all chunks of all layers."""
    totals = []
    for _ in range(PASSES + 1):
        timer = Timer()
        for chunks in layers:
            for batch in chunks:
                run = flash_attention(batch, torch.empty_like(batch.q))
                torch.cuda._sleep(AHEAD_CYCLES)
                timer.start()
                run()
                timer.stop()
        totals.append(timer.total_ms())
    return statistics.median(totals[1:])


def measure(name: str, what: str, layers: list[list[Batch]], plan: Plan, stock_ms: float, results: Results) -> None:
    kept = causal = 0
    worst = 0.0
    for batch, index, out in one_pass(layers, plan, Timer(), Timer()):
        error, eager = sampled_error(batch, index, out)
        worst = max(worst, error / eager)
        kept += int(index.kept_pairs())
        causal += HEADS * causal_pairs(batch.rows)
    if not worst <= 2:
        print(f"{name}: error {worst:.1f} times eager bf16's, over the budget of 2: no times")
        return
    taken = []
    for _ in range(PASSES):
        selecting, attending = Timer(), Timer()
        for _ in one_pass(layers, plan, selecting, attending):
            pass
        taken.append((selecting.total_ms(), attending.total_ms()))
    select_ms, attend_ms = (statistics.median(t) for t in zip(*taken, strict=True))
    ratio = stock_ms / (select_ms + attend_ms)
    print(f"{name}: select {select_ms:.2f} ms, attend {attend_ms:.2f} ms, FlashAttention-3 {stock_ms:.2f} ms")
    results.add(f"{name}, {what}: selection and attend, times faster than FlashAttention-3", ratio, "ratio", "higher")
    results.add(f"{name}, {what}: selection over FlashAttention-3's time", select_ms / stock_ms, "ratio", "lower")
    results.add(f"{name}, {what}: density", kept / causal, "share", "lower")


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model in Hugging Face's format.")],
    length: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 32768,
    text: Annotated[
        Path | None, typer.Option(help="Text file, or folder of *.py; vLLM's sources unless given.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps captures for the next run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
) -> None:
    results = Results(out, f"python -m benchmarks.captured {model.name} --length {length}")
    files = text_files(text or default_text())
    with tempfile.TemporaryDirectory() as aside:
        folder = cache or Path(aside)
        prompt = read_tokens(model, files, min(CLUSTER_TOKENS, length), skip=length)
        clusters = head_clusters(capture(model, prompt, folder / "clusters", "cuda"), "cuda")
        captured = capture(model, read_tokens(model, files, length), folder / str(length), "cuda")
        copies = HEADS // captured.shape.num_heads
        shape = replace(captured.shape, num_heads=HEADS, num_kv_heads=captured.shape.num_kv_heads * copies)
        layers = batches(captured, copies)
        stock_ms = dense_ms(layers)
        size = length_name({"num_tokens": length, "chunk_tokens": CHUNK_TOKENS})
        what = f"{size}, {captured.model}, heads repeated to {HEADS}"
        for name in METHODS:
            plan = plan_of(name, {}, replace(captured, shape=shape), repeated_clusters(clusters, copies), Path(aside))
            measure(name, what, layers, plan, stock_ms, results)
            torch.cuda.empty_cache()
    results.show()


if __name__ == "__main__":
    typer.run(main)
