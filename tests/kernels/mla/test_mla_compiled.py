# SPDX-License-Identifier: Apache-2.0
"""Kernels of MLA's prefill, compiled for every card that this package knows, without a GPU."""

import pytest

from tests.helpers.compiled_methods import MAX_PROGRAM_REGISTERS, problems
from tests.helpers.compiled_mla import mla_kernels
from tests.helpers.offline_compiler import SHARED_KIB, compile_with

pytestmark = pytest.mark.full

VARIANTS = {
    "attend_kernel": 4,  # new tokens or a chunk, window or lists
    "_moments_kernel": 1,
    "_round_queries_kernel": 1,
    "_round_keys_kernel": 1,
    "_products_kernel": 2,  # new tokens or a chunk, as below
    "_sums_kernel": 2,
    "_choose_kernel": 2,
    "_drop_kernel": 2,
}
"""Variants of each kernel that serve every batch: warm-up compiles them all."""

MOST_SPILLED_BYTES = 192
"""Limit of a thread's stack. Some assemblers spill a few addresses before and after loops."""


@pytest.mark.parametrize("target", SHARED_KIB)
def test_every_kernel_compiles_and_fits(target: int) -> None:
    kernels = compile_with(mla_kernels, target)
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
