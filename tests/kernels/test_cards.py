# SPDX-License-Identifier: Apache-2.0
"""Every kernel of every method compiled for every card of the table, without one, and within its shared memory."""

import json
import os
import subprocess
import sys

import pytest
import torch

from vllm_sparse_kernels.attention import HOPPER, AttendSpec, widest_block
from vllm_sparse_kernels.cards import CARDS, Card, find_card, status_note
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.share_prefill import block_average
from vllm_sparse_kernels.methods.top_p import portable as top_p
from vllm_sparse_kernels.selection import last_queries

BY_TARGET = {card.target: card for card in CARDS}
WHOLE = bool(os.environ.get("ALL_CARDS"))
"""Whether every method is compiled for every card and head dim, as ``make cards`` does."""


def compiled(target: int, head_dim: int, *methods: str) -> dict[str, dict[str, int]]:
    """Return shared memory by method and kernel, from a process in which kernels are not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compiled_methods", str(target), str(head_dim), *methods]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def too_large(table: dict[str, dict[str, int]], card: Card) -> dict[str, int]:
    """Return the kernels that take more shared memory than the card has, by method and name, in bytes."""
    return {
        f"{method}: {kernel}": size
        for method, kernels in table.items()
        for kernel, size in kernels.items()
        if size > card.shared_bytes
    }


def test_kernels_with_the_most_shared_memory_fit_small_cards() -> None:
    table = compiled(89, 128, "share_prefill")
    assert table["share_prefill"].keys() >= {"decide_kernel", "split_lse_kernel", "sums_kernel", "attend_kernel"}
    assert not too_large(table, BY_TARGET[89])


@pytest.mark.full
@pytest.mark.parametrize(("target", "head_dim"), [*((target, 128) for target in BY_TARGET), (80, 256), (90, 256)])
def test_the_default_compiles_and_fits_every_card(target: int, head_dim: int) -> None:
    table = compiled(target, head_dim, "top_p")
    assert table["top_p"]["_scores_kernel"] > 0
    assert not too_large(table, BY_TARGET[target])


@pytest.mark.full
@pytest.mark.skipif(not WHOLE, reason="35 minutes of a core: make cards")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("target", BY_TARGET)
def test_every_method_compiles_and_fits_every_card(target: int, head_dim: int) -> None:
    card = BY_TARGET[target]
    table = compiled(target, head_dim)
    if widest_block(head_dim, card.shared_bytes) is None:
        assert not table, "layers that stay dense launch no kernel"
        return
    assert table.keys() == METHODS.keys()
    assert all(kernels["attend_kernel"] > 0 for kernels in table.values())
    assert not too_large(table, card)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.target)
def test_the_table_lists_hopper_where_hopper_serves(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttendSpec, "capability", card.capability)
    strides = 128 * 4 * 128, 4 * 128, 2 * 128
    spec = AttendSpec(torch.device("cpu"), torch.bfloat16, 8, 2, 128, 128, strides, 128, has_stripes=False)
    assert (HOPPER.refusal(spec) is None) == (HOPPER.name in card.engines)


def test_notes_tell_measured_compiled_and_unknown_cards_apart() -> None:
    assert status_note((9, 0)) is None
    assert "L4, L40S, RTX 4090): the kernels were compiled for it but never run" in str(status_note((8, 9)))
    assert "8.9" in str(status_note((8, 9)))
    assert "compute capability 10.3 is unknown" in str(status_note((10, 3)))
    assert find_card((10, 3)) is None
    assert len(BY_TARGET) == len(CARDS)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("target", [80, 90, 100])
def test_large_cards_keep_the_stages_that_were_measured(target: int, head_dim: int) -> None:
    limit_bytes, tile_bytes = BY_TARGET[target].shared_bytes, 64 * head_dim * 2
    for stack_bytes in (32 << 10, 64 << 10):
        assert last_queries._num_stages(stack_bytes, tile_bytes, limit_bytes) == 3
    if (target, head_dim) != (80, 256):
        assert last_queries._num_stages(128 << 10, tile_bytes, limit_bytes) == 2
        assert top_p._num_stages(head_dim * 2, limit_bytes) == 3
    assert block_average._map_stages(head_dim, limit_bytes) == (2 if head_dim == 256 else 3)


def test_an_a100_at_head_dim_256_has_fewer_stages() -> None:
    limit_bytes = BY_TARGET[80].shared_bytes
    assert last_queries._num_stages(128 << 10, 32 << 10, limit_bytes) == 1
    assert top_p._num_stages(512, limit_bytes) == 2
