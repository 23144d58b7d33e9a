# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the card: the CPU, with dense attention as the reference, and invented times."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from vllm_sparse_backend.config.layer_weights import LinearSizes
from vllm_sparse_backend.evaluation.attention_prompts import Heads
from vllm_sparse_backend.evaluation.cuda_device import Run
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.attention.reference import attend as reference
from vllm_sparse_kernels.engine_trial import Batch

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=64, page_tokens=64, dtype=torch.float16)


class CpuCard:
    """``ms`` returns the time of a span or contestant by its name. Each still runs once."""

    name, dense_name, device = "a CPU", "FlashAttention-3", torch.device("cpu")

    def __init__(self, ms: Callable[[str], float] = lambda name: {"dense": 8.0}.get(name, 2.0)) -> None:
        self.ms = ms
        # Kernels are slow in the interpreter and not under test here, so the reference stands in for them.
        self.engines = {"portable": AttendEngine("portable", lambda spec: None, reference)}
        self.ran: list[str] = []

    def dense(self, batch: Batch, out: torch.Tensor) -> Run:
        def run() -> None:
            rows, group = batch.rows, batch.num_heads // batch.cache.num_kv_heads
            k, v = (x.float() for x in batch.cache.gather(rows.block_table[0], rows.seq_lens[0]))
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", batch.q.float(), k) * batch.scale
            scores.masked_fill_(~torch.ones_like(scores, dtype=torch.bool).tril_(rows.context_lens[0]), -torch.inf)
            out.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))

        return run

    def linear(self, sizes: LinearSizes, num_tokens: int) -> Run:
        return lambda: None

    def spans_ms(
        self, contestants: Sequence[Sequence[tuple[str, Run]]], new_pass: Run = lambda: None, budget_s: float = 0.0
    ) -> dict[str, list[float]]:
        spans = [span for spans in contestants for span in spans]
        taken: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name, _ in spans}
        new_pass()
        for name, run in spans:
            run()
            self.ran.append(name)
            taken[name] = [ms + self.ms(name) for ms in taken[name]]
        return taken

    def wall_ms(self, contestants: Mapping[str, Sequence[Run]], budget_s: float = 0.0) -> dict[str, list[float]]:
        for runs in contestants.values():
            for run in runs:
                run()
        linear_ms = 3.0  # in every contestant's time
        return {name: [linear_ms + (name != "linear") * self.ms(name)] * 3 for name in contestants}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> CpuCard:
    """Return the card that the commands use."""
    device = CpuCard()
    for module in ("vllm_sparse_backend.evaluation.cuda_device", "benchmarks.attend", "benchmarks.methods"):
        monkeypatch.setattr(f"{module}.Card", lambda: device)
    monkeypatch.setattr(Heads, "of", staticmethod(lambda model, page_size=128: HEADS))
    return device
