# SPDX-License-Identifier: Apache-2.0
"""Kernels with their own barriers next to other processes on a card: each launch gives the result of the first.

A card that several processes share takes a kernel off its multiprocessors and resumes it later, and its warps then
continue in another order. On an H200, these cases of attention found faults that neither a single process nor random
schedules of an emulator found: two variants of the loop, which multiplied an item's first scores while the previous
item was written out, left NaN in one of seventy launches. On an H100, they found a fault in the variant for stripes,
because Triton had given the memory of an unused barrier to outputs: up to 102 launches of a process differed.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.batches import every_head, new_index, random_batch, random_index
from tests.helpers.lined import lined_batch
from tests.helpers.method_cases import select_on_fastest
from vllm_sparse_kernels.attention.hopper import engine as hopper
from vllm_sparse_kernels.attention.portable import engine as portable
from vllm_sparse_kernels.methods.sale.method import Sale

PROCESSES = 4
SECONDS = 30

ASKEW = [(130, 200), (0, 63), (301, 129), (5000, 1000)]
CASES: list[tuple[int, list[tuple[int, int]], int, float, int]] = [
    # head_dim, rows, block_tokens, density, stripes: items of a single step, of a few, and of many different lengths.
    (128, [(1000, 8192)], 128, 0.0, 0),
    (128, [(60_000, 2048)], 128, 0.03, 0),
    (128, [(60_000, 2048)], 64, 0.03, 0),
    (128, [(30_000, 4096)], 32, 0.05, 0),
    (128, ASKEW, 128, 0.0, 0),
    (128, ASKEW, 128, 0.1, 0),
    (128, [(60_000, 2048)], 128, 0.0, 700),
    (128, ASKEW, 64, 0.1, 140),
    (64, ASKEW, 32, 0.1, 0),
    (64, ASKEW, 64, 0.1, 140),
    (256, ASKEW, 32, 0.1, 0),
    (256, ASKEW, 64, 0.1, 140),
]


class Launches:
    """A repeated launch and the result of the first."""

    def __init__(self, launch: Callable[[], torch.Tensor]) -> None:
        self.launch = launch
        self.first = launch().clone()
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def compare(self) -> None:
        self.wrong += (self.launch().view(torch.int16) != self.first.view(torch.int16)).any()


def attention(
    head_dim: int, lengths: list[tuple[int, int]], block_tokens: int, density: float, stripes: int
) -> Launches:
    """Return launches of attention into an output full of NaN, of which the first result is correct."""
    batch = random_batch(lengths, 32, 8, head_dim, 128, torch.bfloat16, "cuda")
    index = random_index(batch, block_tokens, density, stripes)
    out, expected = batch.empty_out(), batch.empty_out()

    def launch() -> torch.Tensor:
        out.fill_(float("nan"))
        with index.workspace.frame():
            hopper.attend(batch.call(index), out)
        return out

    launches = Launches(launch)
    with index.workspace.frame():
        portable.attend(batch.call(index), expected)
    torch.testing.assert_close(launches.first, expected, rtol=2e-2, atol=2e-2)
    return launches


def selection(context_len: int, query_len: int) -> Launches:
    """Return launches of SALE, whose scores come from the other kernel with its own barriers. They return the number of
    blocks of each tile."""
    batch = lined_batch([(context_len, query_len)], 32, 8, 128, 128, torch.bfloat16)
    index = new_index(batch.rows, batch.num_heads, 32)
    method = Sale(tau=0.03)
    call = batch.call(index, every_head(method, batch.num_heads))

    def launch() -> torch.Tensor:
        with index.workspace.frame():
            select_on_fastest(call)
        return index.block_counts

    return Launches(launch)


def launch_for(seconds: float) -> list[int]:
    """Return how often each case's result differed from its first."""
    cases = [*(attention(*case) for case in CASES), selection(30_000, 4096)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for case in cases * 10:
            case.compare()
        torch.cuda.synchronize()
    return [int(case.wrong) for case in cases]


@pytest.mark.gpu
def test_processes_that_share_a_card_do_not_change_each_others_results() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper: it is for GPUs of compute capability 9.0 (H100, H200)")
    command = [sys.executable, "-m", "tests.kernels.methods.test_beside_others", str(SECONDS)]
    root = Path(__file__).parents[3]
    processes = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    reports = [process.communicate(timeout=SECONDS + 240)[0].strip() for process in processes]
    assert reports == [str([0] * (len(CASES) + 1))] * PROCESSES


if __name__ == "__main__":
    print(launch_for(float(sys.argv[1])))
