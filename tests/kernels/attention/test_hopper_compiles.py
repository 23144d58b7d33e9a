# SPDX-License-Identifier: Apache-2.0
"""The engine ``hopper`` compiles for its card without a GPU, and its machine code has the properties that make it
fast."""

import pytest

from tests.helpers.hopper_code import exponents, figures_of
from tests.helpers.offline_compiler import compile_with

pytestmark = pytest.mark.full

CASES = [
    "128-128-blocks-bf16",
    "128-32-stripes-bf16",
    "128-32-blocks+pages-bf16",
    "128-128-stripes+pages-bf16",
    "64-64-stripes-fp16",
    "64-128-blocks+sinks-bf16",
    "128-64-stripes+sinks-bf16",
    "256-32-blocks+pages-bf16",
    "256-32-stripes+sinks-bf16",
]


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, int]]:
    """Return each case's figures."""
    return compile_with(figures_of, CASES)


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_it_was_tuned_for(table: dict[str, dict[str, int]], case: str) -> None:
    figures = table[case]
    # ptxas may hoist the wait for P·V above the exponents; matrix units then idle during every softmax.
    assert figures["overlapped_steps"] >= 4  # two consumers, with a masked and a plain loop each
    assert figures["fewest_exponents_beside"] >= exponents(case)
    # At head_dim 256, Triton 3.9 reads the number of steps back once per step, where its threads wait anyway.
    assert figures["spills_within_steps"] <= (1 if case.startswith("256-") else 0)
    # A buffer is released only after all warps are done: a copy would overwrite data that the last product reads.
    assert figures["hasty_arrivals"] == 0
    assert figures["barriers_in_data"] == 0
    assert figures["shared_bytes"] <= 227 << 10
    assert figures["registers"] == 168  # three warp groups share 65,536
    # Start-up compiles all variants: a single variant of the preparing kernel, and of the main kernel.
    assert figures["variants"] == 2


def test_a_step_keeps_its_exponents_where_its_scores_were(table: dict[str, dict[str, int]]) -> None:
    """Between the scores of two steps, separate registers for rounded exponents cost 32 moves or more."""
    assert table["128-128-blocks-bf16"]["most_moves"] <= 4
