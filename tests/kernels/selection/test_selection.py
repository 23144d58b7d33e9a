# SPDX-License-Identifier: Apache-2.0
"""Parts of selections: slabs, products that do not depend on slabs, and widths of blocks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.helpers.batches import random_batch
from tests.helpers.masks import density_of
from tests.helpers.method_cases import DEVICE, all_lists, select
from vllm_sparse_kernels import block_width, engine_choice
from vllm_sparse_kernels.block_width import index_block_tokens
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.sale import scores
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.selection import lines, pooled, slabs

TOP_P = TopP(0.2, ramp_tokens=1, sink_tokens=32, local_tokens=128, most_tokens=None, peak_share=0.2)
LINES = VerticalSlash(30, 10, 64, 5, 5)
HEADS_OF_SALE = [Sale(0.3), Sale(0.2)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "module", "limit", "value"),
    [
        *((BlockSparse(2), pooled, "SLAB_BYTES", value) for value in (1, 3 * 2 * 2 * 64 * 4)),
        (SpargeAttn(0.5, -1.0), pooled, "SLAB_BYTES", 1),
        (SpargeAttn(0.5, -1.0), pooled, "SLAB_BYTES", 3 * 2 * 64 * 4),
        *((LINES, lines, "SLAB_BYTES", value) for value in (0, 2 * 4096 * 2 * lines.KEY_BYTES)),
        (HEADS_OF_SALE, slabs, "SLAB_TOKENS", 512),
        (TOP_P, slabs, "SLAB_TOKENS", 512),
        (TOP_P, slabs, "RUN_BYTES", 1),
    ],
)  # fmt: skip
def test_slabs_change_nothing(monkeypatch, method, module, limit, value):
    """Slabs of a single row or tile, and of several, use less memory and keep the same blocks."""
    batch = random_batch([(700, 70), (0, 3), (130, 140)], 2, 1, 64, 16, torch.float16, DEVICE)
    whole = select(method, batch)
    monkeypatch.setattr(module, limit, value)
    apart = select(method, replace(batch, rows=replace(batch.rows)))
    assert all_lists(apart) == all_lists(whole)
    assert apart.workspace.peak_bytes < whole.workspace.peak_bytes
    assert density_of(whole) < 0.95


@pytest.mark.full
def test_spans_of_keys_change_nothing(monkeypatch):
    """Results are bitwise the same, in blocks of 32."""
    batch = random_batch([(1211, 130), (700, 5)], 2, 1, 64, 16, torch.float16, DEVICE)
    whole = all_lists(select(HEADS_OF_SALE, batch, 32))
    monkeypatch.setattr(scores, "SPAN_TOKENS", 256)
    assert all_lists(select(HEADS_OF_SALE, replace(batch, rows=replace(batch.rows)), 32)) == whole


HOPPER, AMPERE, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (10, 0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SALE = [Sale(), Sale(tau=0.008), Sale(tau=0.0)]


@pytest.fixture(params=[HOPPER, AMPERE, ADA, BLACKWELL], ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Simulate a GPU of this compute capability with Hopper's shared memory, so nothing else differs."""
    monkeypatch.setattr(engine_choice, "_capability", lambda index: request.param)
    monkeypatch.setattr(block_width, "shared_bytes", lambda device: 227 << 10)
    return request.param


@pytest.mark.parametrize("engine", ["auto", "hopper", "flash", "portable"])
def test_sale_alone(capability: tuple[int, int], engine: str) -> None:
    narrow = capability == HOPPER and engine != "portable"
    assert index_block_tokens(SALE, 128, CUDA, engine) == (32 if narrow else 64)


def test_heads_of_a_shape_leave_the_width_to_the_other_heads(capability: tuple[int, int]) -> None:
    narrow = 32 if capability == HOPPER else 64
    assert index_block_tokens([AShape(), *SALE, AShape()], 128, CUDA) == narrow
    assert index_block_tokens([AShape(), TopP()], 128, CUDA) == narrow
    assert index_block_tokens([AShape(), TopP(), BlockSparse()], 128, CUDA) == 64
    assert index_block_tokens([AShape(), TopP(), Dense()], 128, CUDA) == 64
    assert index_block_tokens([AShape(), TopP()], 128, CUDA, "portable") == 64
    assert index_block_tokens([AShape(), AShape(256, 1024)], 128, CUDA) == 128


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ([*SALE, Dense()], 64),
        ([*SALE, SpargeAttn()], 64),
        ([*SALE, Sale(int8_scores=True)], 64),  # available only in portable
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


def test_without_a_gpu_as_on_hopper_and_shared_memory_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [index_block_tokens(SALE, 128, CPU, engine) for engine in ("auto", "portable")] == [32, 64]
    assert index_block_tokens([AnchorAttention(whole_blocks=True)], 128, CPU) == 32
    monkeypatch.setattr(engine_choice, "_capability", lambda index: AMPERE)
    monkeypatch.setattr(block_width, "shared_bytes", lambda device: 99 << 10)
    assert index_block_tokens([Dense()], 128, CUDA) == 64
