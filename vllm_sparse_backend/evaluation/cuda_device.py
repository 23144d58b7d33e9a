# SPDX-License-Identifier: Apache-2.0
"""The CUDA device that is measured: vLLM's FlashAttention on it, and two kinds of times.

*Device time* is how long the device is busy: it waits before a contestant's turn so that the host gets ahead, and then
runs the contestant until its clock is that of a server which runs this layer after layer. *Wall time* is what a server
spends, including launches by the host, which dominate for a few new tokens. Both alternate with FlashAttention's in the
same run, over several inputs, and are reported as medians.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels.attention import engines
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.rows import to_device

Run = Callable[[], object]

Span = tuple[str, Run]
"""A name and what is timed under it."""

CYCLES_A_MS = 2_000_000
"""Of the device's clock, about."""

AHEAD_CYCLES = 10 * CYCLES_A_MS
"""The device waits this long before each contestant's turn of device time."""

HOST_SHARE = 0.8
"""Of a pass's device time: where the host takes more to launch it, the device waits for the host before it is timed. A
server's device has other work then, so what the host takes is hidden there."""

STEADY_MS = 60.0
"""How long each runs before it is timed. Under load a card lowers its clock within tens of milliseconds, and more for
what draws more power: right after a rest FlashAttention took 22.6 ms for what takes it 26 ms in the long run.
"""

MIN_PASSES, MAX_PASSES = 5, 60


class Card:
    """Raises BenchError where there is no CUDA device, or none of vLLM's FlashAttention."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise BenchError(
                "this benchmark needs a CUDA device, and torch sees none (`sparse-prefill bench serve` and "
                "`sparse-prefill demo` run without)"
            )
        try:
            from vllm_sparse_backend.serving.compat import flash_attention
        except ImportError as error:
            raise BenchError(f"this compares with vLLM's FlashAttention, and vLLM does not import: {error}") from None
        if (flash := flash_attention()) is None:
            raise BenchError(f"vLLM has no FlashAttention for {torch.cuda.get_device_name()} to compare with")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        self.flash_version = _flash_version(self.device)
        self.dense_name = f"FlashAttention-{self.flash_version}"
        self.engines = engines(flash)

    def dense(self, batch: Batch, out: torch.Tensor) -> Run:
        """vLLM's FlashAttention over the batch's pages, as vLLM calls it, ready to be run."""
        from vllm_sparse_backend.serving.compat import flash_attn_varlen_func

        varlen, rows = flash_attn_varlen_func(), batch.rows
        starts = [0]
        for query_len in rows.query_lens:
            starts.append(starts[-1] + query_len)
        query_start_loc = to_device(starts, torch.int32, self.device)
        seq_lens = to_device(rows.seq_lens, torch.int32, self.device)
        num_pages = batch.cache.keys.shape[0]
        block_table = torch.where(rows.block_table < num_pages, rows.block_table, 0)

        def run() -> None:
            varlen(
                q=batch.q, k=batch.cache.keys, v=batch.cache.values, out=out, cu_seqlens_q=query_start_loc,
                max_seqlen_q=max(rows.query_lens), seqused_k=seq_lens, max_seqlen_k=max(rows.seq_lens),
                softmax_scale=batch.scale, causal=True, block_table=block_table, fa_version=self.flash_version,
            )  # fmt: skip

        return run

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def spans_ms(
        self, contestants: Sequence[Sequence[Span]], new_pass: Run = lambda: None, budget_s: float = 2.0
    ) -> dict[str, list[float]]:
        """Device time by name, summed over the spans of each pass, in which the contestants take turns.

        A contestant's spans run in their order, again and again for ``STEADY_MS`` and then once measured, so that each
        is timed at the clock that the card holds under it. ``new_pass`` is called before each time. As many passes as
        fit ``budget_s``, after two that compile and tell how long a contestant takes.
        """
        taken: dict[str, list[float]] = {name: [] for spans in contestants for name, _ in spans}
        repeats, device_ms = [1] * len(contestants), [math.inf] * len(contestants)
        for measured in _passes(budget_s):
            sums = dict.fromkeys(taken, 0.0)
            for i, spans in enumerate(contestants):
                torch.cuda._sleep(AHEAD_CYCLES)
                host_ms = [_launch_ms(spans, new_pass) for _ in range(repeats[i] - 1)][:1]
                if host_ms and host_ms[0] > HOST_SHARE * device_ms[i]:
                    torch.cuda._sleep(int(host_ms[0] * CYCLES_A_MS))
                span_ms = self._spans_ms(spans, new_pass)
                device_ms[i] = min(device_ms[i], sum(span_ms.values()))
                repeats[i] = 1 + math.ceil(STEADY_MS / max(device_ms[i], 1e-2 * STEADY_MS))
                for name, ms in span_ms.items():
                    sums[name] += ms
            if measured:
                for name, ms in sums.items():
                    taken[name].append(ms)
        return taken

    def _spans_ms(self, spans: Sequence[Span], new_pass: Run) -> dict[str, float]:
        events = []
        new_pass()
        for name, run in spans:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            events.append((name, start, stop))
        self.synchronize()
        sums = dict.fromkeys((name for name, _ in spans), 0.0)
        for name, start, stop in events:
            sums[name] += start.elapsed_time(stop)
        return sums

    def wall_ms(self, contestants: Mapping[str, Sequence[Run]], budget_s: float = 1.0) -> dict[str, list[float]]:
        """Wall time of one run, mean over a contestant's runs, which follow each other without waiting; per pass."""
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for measured in _passes(budget_s):
            order = list(contestants)
            if len(next(iter(taken.values()))) % 2:
                order.reverse()
            for name in order:
                self.synchronize()
                began = time.perf_counter()
                for run in contestants[name]:
                    run()
                self.synchronize()
                if measured:
                    taken[name].append((time.perf_counter() - began) * 1e3 / len(contestants[name]))
        return taken


def _launch_ms(spans: Sequence[Span], new_pass: Run) -> float:
    """What the host takes for one pass; the first one's is its own, later ones may wait for the device's queue."""
    began = time.thread_time()
    new_pass()
    for _, run in spans:
        run()
    return (time.thread_time() - began) * 1e3


def _passes(budget_s: float) -> Iterable[bool]:
    """False for the passes that warm up, then True until ``budget_s`` is spent."""
    yield False
    yield False
    began = time.perf_counter()
    for i in range(MAX_PASSES):
        if i >= MIN_PASSES and time.perf_counter() - began >= budget_s:
            return
        yield True


def _flash_version(device: torch.device) -> int:
    """Return the version of FlashAttention that a server's dense attention takes."""
    if torch.cuda.get_device_capability(device)[0] == 9:
        return 3
    from vllm_sparse_backend.serving.compat import flash_attention_version

    return flash_attention_version() or 2
