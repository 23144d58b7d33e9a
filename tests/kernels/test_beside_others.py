# SPDX-License-Identifier: Apache-2.0
"""``hopper`` beside other processes on its card: each launch gives what the first one gave.

A card that several processes share takes a kernel off its multiprocessors and puts it back, and its warps then go on in
an order of their own. On an H200 this found what neither a process alone nor schedules on the host (``warps``) did: two
variants of the loop, which multiplied an item's first scores while the one before was written out, left NaN in one
launch of seventy; the loop as it is in none of 600,000.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vllm_sparse_kernels.attend import hopper, portable
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.testing.batches import Batch, random_batch, random_index

PROCESSES = 4
SECONDS = 30

ASKEW = [(130, 200), (0, 63), (301, 129), (5000, 1000)]
CASES: list[tuple[list[tuple[int, int]], int, float, int]] = [
    # Rows, block_tokens, density, stripes: items of one step, of a few, and of many different lengths.
    ([(1000, 8192)], 128, 0.0, 0),
    ([(60_000, 2048)], 128, 0.03, 0),
    ([(60_000, 2048)], 64, 0.03, 0),
    ([(30_000, 4096)], 32, 0.05, 0),
    (ASKEW, 128, 0.0, 0),
    (ASKEW, 128, 0.1, 0),
    ([(60_000, 2048)], 128, 0.0, 700),
    (ASKEW, 64, 0.1, 140),
]


class Launches:
    """One case, launched over and over into an output that holds NaN before."""

    def __init__(self, lengths: list[tuple[int, int]], block_tokens: int, density: float, stripes: int) -> None:
        self.batch: Batch = random_batch(lengths, 32, 8, 128, 128, torch.bfloat16, "cuda")
        self.index: SparseIndex = random_index(self.batch, block_tokens, density, stripes)
        self.out = self.batch.empty_out()
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.launch()
        self.first = self.out.clone()

    def launch(self) -> None:
        self.out.fill_(float("nan"))
        with self.index.workspace.frame():
            hopper.attend(self.batch.q, self.batch.cache, self.index, self.out, self.batch.scale)

    def compare(self) -> None:
        self.launch()
        self.wrong += (self.out.view(torch.int16) != self.first.view(torch.int16)).any()

    def check_first(self) -> None:
        expected = self.batch.empty_out()
        with self.index.workspace.frame():
            portable.attend(self.batch.q, self.batch.cache, self.index, expected, self.batch.scale)
        torch.testing.assert_close(self.first, expected, rtol=2e-2, atol=2e-2)


def launch_for(seconds: float) -> list[int]:
    """How often each case's result was another than its first."""
    cases = [Launches(*case) for case in CASES]
    for case in cases:
        case.check_first()
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
    command = [sys.executable, "-m", "tests.kernels.test_beside_others", str(SECONDS)]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    told = [process.communicate(timeout=SECONDS + 240)[0].strip() for process in processes]
    assert told == [str([0] * len(CASES))] * PROCESSES


if __name__ == "__main__":
    print(launch_for(float(sys.argv[1])))
