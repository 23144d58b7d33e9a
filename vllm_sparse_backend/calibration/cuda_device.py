# SPDX-License-Identifier: Apache-2.0
"""The measured CUDA device: vLLM's FlashAttention on it, and device times.

*Device time* is the time during which the device is busy. The device waits before a contestant's turn, so that the host
gets ahead, and then runs the contestant until the device's clock matches that of a server, which runs layer after
layer. Contestants alternate with FlashAttention in the same run, over several inputs, and are reported as medians.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from vllm_sparse_backend.calibration.external import require_module
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_kernels.attention import engines
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.rows import to_device

Run = Callable[[], object]

Span = tuple[str, Run]
"""A name, and the timed function."""

CYCLES_A_MS = 2_000_000
"""Approximate clock rate of the device."""

AHEAD_CYCLES = 10 * CYCLES_A_MS
"""Wait of the device before each contestant's turn, for device times."""

HOST_SHARE = 0.8
"""Share of a pass's device time. If the host takes longer than this to launch the pass, the device waits for the host
before it is timed. On a server the device has other work at that time, which hides the host's time."""

STEADY_MS = 60.0
"""Time for which each contestant runs before it is timed. Under load a card lowers its clock within tens of
milliseconds, and more for work that draws more power: right after a rest, FlashAttention took 22.6 ms for work that
takes 26 ms in the long run.
"""

PASSES = 5

WARM_UP_PASSES = 2
"""Passes that compile and estimate the duration."""


class Card:
    """The CUDA device of this process.

    Raises ConfigurationError if there is none, or if vLLM has no FlashAttention for it.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "this needs a CUDA device, but torch finds none (`sparse-prefill bench serve` and "
                "`sparse-prefill demo` also run on a CPU)"
            )
        compat = require_module("vllm_sparse_backend.serving.compat", "this needs vLLM, for its FlashAttention")
        flash = compat.flash_attention()
        if flash is None:
            raise ConfigurationError(f"vLLM has no FlashAttention for {torch.cuda.get_device_name()} to compare with")
        self.device = compat.current_device()
        # As a server's dense attention.
        self.flash_version = 3 if compat.is_hopper() else compat.flash_attention_version() or 2
        self.engines = engines(flash)

    def dense(self, batch: Batch, out: torch.Tensor) -> Run:
        """Return a function that runs vLLM's FlashAttention over the batch's pages, as vLLM calls it."""
        from vllm_sparse_backend.serving.compat import flash_attn_varlen_func

        varlen, rows = flash_attn_varlen_func(), batch.rows
        query_start_loc = to_device([0, *accumulate(rows.query_lens)], torch.int32, self.device)
        seq_lens = to_device(rows.seq_lens, torch.int32, self.device)

        def run() -> None:
            varlen(
                q=batch.q, k=batch.cache.keys, v=batch.cache.values, out=out, cu_seqlens_q=query_start_loc,
                max_seqlen_q=max(rows.query_lens), seqused_k=seq_lens, max_seqlen_k=max(rows.seq_lens),
                softmax_scale=batch.scale, causal=True, block_table=rows.block_table, fa_version=self.flash_version,
            )  # fmt: skip

        return run

    def spans_ms(
        self, contestants: Sequence[Sequence[Span]], new_pass: Run = lambda: None, num_passes: int = PASSES
    ) -> dict[str, list[float]]:
        """Return the device times in ms by name, summed over the spans of each pass. Contestants take turns.

        A contestant's spans run in order: first repeatedly for ``STEADY_MS`` without measurement, and then once with
        measurement. The card's clock is then steady under this load. ``new_pass`` is called before each repetition.
        """
        taken: dict[str, list[float]] = {name: [] for spans in contestants for name, _ in spans}
        repeats, device_ms = [1] * len(contestants), [math.inf] * len(contestants)
        for i_pass in range(WARM_UP_PASSES + num_passes):
            for i, spans in enumerate(contestants):
                torch.cuda._sleep(AHEAD_CYCLES)
                host_ms = [_launch_ms(spans, new_pass) for _ in range(repeats[i] - 1)][:1]
                if host_ms and host_ms[0] > HOST_SHARE * device_ms[i]:
                    torch.cuda._sleep(int(host_ms[0] * CYCLES_A_MS))
                span_ms = self._spans_ms(spans, new_pass)
                device_ms[i] = min(device_ms[i], sum(span_ms.values()))
                repeats[i] = 1 + math.ceil(STEADY_MS / max(device_ms[i], 1e-2 * STEADY_MS))
                if i_pass >= WARM_UP_PASSES:
                    for name, ms in span_ms.items():
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
        torch.cuda.synchronize(self.device)
        sums = dict.fromkeys((name for name, _ in spans), 0.0)
        for name, start, stop in events:
            sums[name] += start.elapsed_time(stop)
        return sums


def _launch_ms(spans: Sequence[Span], new_pass: Run) -> float:
    """Return the host's time for one pass in ms. Only the first pass counts: later passes may wait for a full queue."""
    began = time.thread_time()
    new_pass()
    for _, run in spans:
        run()
    return (time.thread_time() - began) * 1e3
