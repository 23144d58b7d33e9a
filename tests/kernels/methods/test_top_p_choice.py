# SPDX-License-Identifier: Apache-2.0
"""The fewest blocks that reach a share of given masses: ``choice.py`` against the reference's sort."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.helpers.batches import new_index
from tests.helpers.method_cases import DEVICE, kept_blocks
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.call import Call, HeadGroup
from vllm_sparse_kernels.methods.top_p import choice
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.reference import fewest

UNIT = 2.0**-14
"""Masses are multiples of this unit with sums below 1, so float32 adds them without rounding, in any order."""


def check_choice(method: TopP, sizes: list[int], reach: int) -> int:
    """Check which blocks are kept for a tile whose causal blocks have these masses, and return their number.

    Args:
        method: The method of the tile's head.
        sizes: The blocks' masses in units, repeated until ``reach``. A negative number marks a peak.
        reach: Number of keys in the tile's causal reach; its only query is at the last key.
    """
    rows = Rows((0,), (1,), (reach - 1,), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
    num_blocks, width = -(-reach // 32), choice.mass_width(reach)
    repeated = (sizes * num_blocks)[:num_blocks]
    masses = torch.full((1, 1, width), torch.nan, device=DEVICE)
    masses[0, 0, :num_blocks] = torch.tensor(repeated, device=DEVICE) * UNIT
    index = new_index(rows, 1, 32)
    no_cache: Any = None  # the choice reads masses only
    call = Call(torch.empty(1, 1, 64, device=DEVICE), no_cache, index, 1.0, HeadGroup((0,), (method,)))
    choice.write_block_lists(call, masses, 0)
    expected = fewest(method, masses[0, 0, :num_blocks].abs().double(), reach - 1) | (masses[0, 0, :num_blocks] < 0)
    assert kept_blocks(index, 0, 0).tolist() == expected.tolist(), (repeated, method)
    return int(expected.sum())


@settings(max_examples=250)
@given(
    sizes=st.lists(st.one_of(st.integers(-40, 40), st.sampled_from([0, 0, 1, 7, 7, 500])), min_size=1, max_size=30),
    kept_mass=st.integers(1, 63).map(lambda x: x / 64),
    most_tokens=st.sampled_from([None, 512, 128, 32]),
    sink=st.sampled_from([0, 32, 128, 992, 4096]),
    local=st.sampled_from([128, 256]),
    ramp=st.sampled_from([0, 1, 2, 4]),
    reach=st.one_of(st.integers(1, 1100), st.integers(900, 1100)),
    held=st.sampled_from([16, 4096]),
)
def test_random_masses(
    sizes: list[int], kept_mass: float, most_tokens: int | None, sink: int, local: int, ramp: int, reach: int, held: int
) -> None:
    """Masses with ties, zeros and peaks. With few masses in registers, those of long rows take several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "HELD_BLOCKS", held)
        ramp_tokens = max(1, ramp * (reach - 1))  # of the position, so that float32 has the share without rounding
        method = TopP(kept_mass, ramp_tokens, sink_tokens=sink, local_tokens=local, most_tokens=most_tokens)
        check_choice(method, sizes, reach)


def test_less_is_dropped_in_short_contexts() -> None:
    """The share falls to p until the position reaches ``ramp_tokens``."""
    kept = {
        ramp: check_choice(TopP(0.25, ramp, most_tokens=None), [3, 1, 7, 2], 1025)
        for ramp in (1, 512, 1024, 2048, 4096, 49152)
    }
    assert kept[1] == kept[512] == kept[1024] < kept[2048] < kept[4096] < kept[49152]
