# SPDX-License-Identifier: Apache-2.0
"""``hopper``'s own source, warp by warp, under random schedules: right however late any warp, copy or product is."""

import pytest
import torch

from tests.kernels import warps
from vllm_sparse_kernels.attend import hopper
from vllm_sparse_kernels.attend.portable import matrix_args
from vllm_sparse_kernels.reference.attend import attend as reference_attend
from vllm_sparse_kernels.testing.batches import random_batch, random_index

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the host, and says nothing of a device")
LENGTHS = [(130, 200), (0, 63), (301, 129)]


def run(monkeypatch: pytest.MonkeyPatch, block_tokens: int, stripes: int, seed: int, density: float = 0.3) -> None:
    batch = random_batch(LENGTHS, 2, 1, 64, block_tokens, torch.float16, seed=seed)
    index = random_index(batch, block_tokens, density, stripes, seed=seed)
    matrix = matrix_args(batch.cache)
    assert matrix is not None
    monkeypatch.setattr(hopper, "hopper_kernel", warps.Kernel(hopper.hopper_kernel, seed))
    monkeypatch.setattr(hopper, "TensorDescriptor", warps.Matrix)
    monkeypatch.setattr(hopper, "_num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(hopper, "STAGES", {64: 2})
    out, expected = batch.empty_out(), batch.empty_out()
    hopper.run(batch.q, batch.cache, matrix, index, out, batch.scale)
    reference_attend(batch.q, batch.cache, index, expected, batch.scale)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("block_tokens", "stripes"), [(128, 0), (64, 0), (32, 0), (64, 140)])
def test_any_schedule_gives_the_result(
    monkeypatch: pytest.MonkeyPatch, block_tokens: int, stripes: int, seed: int
) -> None:
    run(monkeypatch, block_tokens, stripes, seed)
