# SPDX-License-Identifier: Apache-2.0
"""``hopper``'s own source, warp by warp, under random schedules: right however late any warp, copy or product is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.batches import random_batch, random_index
from tests.kernels import warps
from vllm_sparse_kernels.attend import hopper
from vllm_sparse_kernels.attend.portable import matrix_args
from vllm_sparse_kernels.attend.reference import attend as reference_attend

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the host, and says nothing of a device"),
]

# Tiles that lie askew and that are not full; items of one step and of several.
LENGTHS = [(130, 200), (0, 63), (301, 129)]
SEEDS = range(4)
V_FULL = "no. 5"


def run(
    monkeypatch: pytest.MonkeyPatch,
    block_tokens: int,
    stripes: int,
    density: float,
    seed: int,
    instead: warps.Fault | None = None,
    head_dim: int = 64,
) -> None:
    batch = random_batch(LENGTHS, 2, 1, head_dim, block_tokens, torch.float16, seed=seed)
    index = random_index(batch, block_tokens, density, stripes, seed=seed)
    matrix = matrix_args(batch.cache)
    assert matrix is not None
    monkeypatch.setattr(hopper, "hopper_kernel", warps.Kernel(hopper.hopper_kernel, seed, instead))
    monkeypatch.setattr(hopper, "TensorDescriptor", warps.Matrix)
    monkeypatch.setattr(hopper, "_num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(hopper, "STAGES", {head_dim: 2})
    out, expected = batch.empty_out(), batch.empty_out()
    hopper.run(batch.q, batch.cache, matrix, index, out, batch.scale)
    monkeypatch.undo()
    reference_attend(batch.q, batch.cache, index, expected, batch.scale)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3, equal_nan=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("block_tokens", "stripes", "density", "head_dim"),
    [(128, 0, 0.3, 64), (64, 0, 0.3, 128), (32, 0, 0.0, 64), (64, 140, 0.3, 64), (128, 20, 0.0, 128)],
)
def test_any_schedule_gives_the_result(
    monkeypatch: pytest.MonkeyPatch, block_tokens: int, stripes: int, density: float, head_dim: int, seed: int
) -> None:
    run(monkeypatch, block_tokens, stripes, density, seed, head_dim=head_dim)


def run_all(monkeypatch: pytest.MonkeyPatch, stripes: int, fault: warps.Fault) -> None:
    for seed in range(20):
        run(monkeypatch, 64, stripes, 0.3, seed, fault)


def test_warps_that_do_not_meet_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that falls behind finds a barrier a phase too late, and waits for ever."""
    with pytest.raises(warps.Deadlock, match=r"warp \d of produce 2 of program \d waits for parity"):
        run_all(monkeypatch, 140, lambda gluon: {"_wait_for_room": gluon.mbarrier_wait})


def test_reading_what_has_not_arrived_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(gluon: warps.Gluon) -> dict[str, Any]:
        def wait(barrier: warps.Barrier, parity: Any, pred: Any = True) -> None:
            gluon.mbarrier_wait(barrier, parity, pred and V_FULL not in barrier.name)

        return {"mbarrier": SimpleNamespace(**{**vars(gluon.names()["mbarrier"]), "wait": wait})}

    with pytest.raises(AssertionError, match="not close"):
        run_all(monkeypatch, 0, hasty)
