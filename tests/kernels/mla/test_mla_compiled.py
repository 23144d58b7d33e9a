# SPDX-License-Identifier: Apache-2.0
"""Kernels of MLA's prefill, compiled for every card that this package knows, without a GPU."""

import pytest

from tests.helpers.compiled_methods import MAX_PROGRAM_REGISTERS, problems
from tests.helpers.compiled_mla import compiled
from tests.helpers.offline_compiler import SHARED_KIB

pytestmark = pytest.mark.full

VARIANTS = {
    "attend_kernel": 4,  # new tokens or a chunk, A-shape or lists
    "_round_kernel": 3,  # all queries or half of them, keys
    "_moments_kernel": 2,  # 64 or 128 channels
    "round_kept_kernel": 5,  # 64 or 128 channels of all queries, 128 of half of them, 64 or 128 of keys
    "_products_kernel": 10,  # new tokens or a chunk, of each method
    "_sums_kernel": 4,  # new tokens or a chunk, all queries or half of them, as below
    "_masses_kernel": 4,
    "_choose_kernel": 4,
    "_drop_kernel": 4,
}
"""Variants of each kernel that serve every batch: warm-up compiles them all."""

MOST_SPILLED_BYTES = 192
"""Limit of a thread's stack. Some assemblers spill a few addresses before and after loops. On Hopper, the products of
192 channels spill in the loop over the keys of the tiles themselves, whose products are masked."""


@pytest.mark.parametrize("target", SHARED_KIB)
def test_every_kernel_compiles_and_fits(target: int) -> None:
    kernels = compiled(target)
    assert {name: usage["variants"] for name, usage in kernels.items()} == VARIANTS
    assert problems({"mla": kernels}, SHARED_KIB[target] << 10) == {}
    spills = {
        name: usage["stack_bytes"] for name, usage in kernels.items() if usage["stack_bytes"] > MOST_SPILLED_BYTES
    }
    assert spills == {}
    if target == 90:
        products = kernels["_products_kernel"]
        assert 2 * products["registers_per_program"] <= MAX_PROGRAM_REGISTERS, "two programs must fit a multiprocessor"
        assert 2 * (products["shared_bytes"] + 1024) <= SHARED_KIB[target] << 10
