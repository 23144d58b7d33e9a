# SPDX-License-Identifier: Apache-2.0
"""The engine ``portable``, compiled by Triton for every card in README, without these cards.

Other tests run it in the interpreter, which accepts code that the compiler refuses, and has no limit on shared memory.
"""

import pytest

from tests.helpers.compiled_attention import attention_kernels
from tests.helpers.compiled_methods import problems
from tests.helpers.offline_compiler import SHARED_KIB, compile_with
from vllm_sparse_kernels.attention import widest_block

QUICK = ["89-128-64-plain", "80-128-128-plain", "89-256-64-plain"]
"""An L4, L40S or RTX 4090, and an A100, each without room for two blocks loaded ahead; and a tile computed in parts."""

MATRIX = [
    f"{capability}-{head_dim}-{block_tokens}-{wanted}"
    for capability, limit_kib in SHARED_KIB.items()
    for head_dim in (64, 128, 256, 512)
    if (block_tokens := widest_block(head_dim, limit_kib << 10))
    for wanted in (("plain",) if head_dim == 64 else ("plain", "options", "stripes"))
]
"""The widest blocks that the engine accepts, which need the most shared memory; it refuses all for head dim 512 on
cards with less than 227 KiB. Head dim 64 needs less than 128 with the same options."""


def assert_all_fit(cases: list[str]) -> None:
    for case in cases:
        kernels = compile_with(attention_kernels, case)
        assert kernels["attend_kernel"]["shared_bytes"] > 0, f"{case}: no shared memory: was it compiled for a card?"
        assert not problems({case: kernels}, SHARED_KIB[int(case.split("-")[0])] << 10)


def test_blocks_that_are_not_loaded_ahead_compile() -> None:
    assert_all_fit(QUICK)


@pytest.mark.full
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_card_and_head_dim_compiles(capability: int) -> None:
    assert_all_fit([case for case in MATRIX if case.startswith(f"{capability}-")])
