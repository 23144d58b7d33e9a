# SPDX-License-Identifier: Apache-2.0
"""Blocks of 32 keys go where every head's method gains from them and the engines take them; nowhere else."""

from collections.abc import Sequence

import pytest
import torch

from vllm_sparse_kernels import width
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.width import index_block_tokens

HOPPER, AMPERE, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (10, 0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SALE = [Sale(), Sale(tau=0.008), Sale(tau=0.0)]


@pytest.fixture(params=[HOPPER, AMPERE, ADA, BLACKWELL], ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A GPU of that kind, with Hopper's shared memory, so that nothing else tells them apart."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(width, "shared_bytes", lambda device: 227 << 10)
    return request.param


@pytest.mark.parametrize("engine", ["auto", "hopper", "flash", "portable"])
def test_sale_alone(capability: tuple[int, int], engine: str) -> None:
    narrow = capability == HOPPER and engine != "portable"
    assert index_block_tokens(SALE, 128, CUDA, engine) == (32 if narrow else 64)


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ([*SALE, Dense()], 64),
        ([*SALE, SpargeAttn()], 64),
        ([*SALE, Sale(int8_scores=True)], 64),  # which portable alone has
        ([*SALE, SpargeAttn(skip_margin=-5.0)], 64),
        ([Dense(), AShape()], 128),
        ([AShape(), SpargeAttn()], 64),
        ([AnchorAttention()], 128),
        ([AnchorAttention(whole_blocks=True), AnchorAttention()], 128),
    ],
)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_what_shares_an_index_with_others_is_as_wide_as_these(
    methods: Sequence[Method], expected: int, device: torch.device, capability: tuple[int, int]
) -> None:
    assert index_block_tokens(methods, 128, device) == expected


def test_without_a_gpu_as_on_hopper() -> None:
    assert index_block_tokens(SALE, 128, CPU) == 32
    assert index_block_tokens(SALE, 128, CPU, "portable") == 64
    assert index_block_tokens([AnchorAttention(whole_blocks=True)], 128, CPU) == 32


def test_shared_memory_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    monkeypatch.setattr(width, "shared_bytes", lambda device: 99 << 10)
    assert index_block_tokens([Dense()], 128, CUDA) == 64
