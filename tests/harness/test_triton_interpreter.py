# SPDX-License-Identifier: Apache-2.0
"""Savings in Triton's interpreter: the language is prepared once per launch and restored afterwards."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

if torch.cuda.is_available():
    pytest.skip("needs Triton's interpreter, whose kernels need no device", allow_module_level=True)


@triton.jit
def _doubled(b):
    return b + b


@triton.jit
def _total_kernel(numbers, totals, LIMIT: tl.constexpr):
    b = _doubled(_doubled(tl.load(numbers + tl.arange(0, 4))))
    tl.static_assert(tl.program_id(0) < LIMIT)
    tl.store(totals + tl.program_id(0), tl.sum(b))


def language() -> dict[tuple[str, str], Any]:
    owners = (tl, tl.core, tl.math, tl.tensor)
    return {(owner.__name__, name): member for owner in owners for name, member in vars(owner).items()}


def test_the_language_is_prepared_once_a_launch_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, prepared = interpreter._patch_lang, []
    prepare = patch.prepare

    def counted(function):
        prepared.append(function)
        return prepare(function)

    monkeypatch.setattr(patch, "prepare", counted)
    before = language()
    numbers, totals = torch.tensor([1, 2, 3, 2**30], dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _total_kernel[(8,)](numbers, totals, 8)
    assert totals.tolist() == [24] * 8  # 2**32 wraps around, as on a GPU
    assert 1 <= len(prepared) <= 3  # for the language's names in the kernel, `_doubled` and `tl.sum`
    assert before.items() <= language().items()
    with pytest.raises(InterpreterError):
        _total_kernel[(8,)](numbers, totals, 5)
    assert before.items() <= language().items()


@triton.jit
def _product_kernel(left, right, out):
    o_m = tl.arange(0, 16)
    place = o_m[:, None] * 16 + o_m[None, :]
    tl.store(out + place, tl.dot(tl.load(left + place), tl.load(right + place), input_precision="ieee"))


def test_products_of_float32_are_rounded_once() -> None:
    """In float32, numpy would lose the small products, in an order that depends on its library."""
    left, right = torch.ones(16, 16), torch.full((16, 16), 2.0**-24)
    right[0] = 1.0
    out = torch.empty(16, 16)
    _product_kernel[(1,)](left, right, out)
    assert torch.equal(out.double(), (left.double() @ right.double()).float().double())
    assert float(out[0, 0]) == 1 + 2.0**-20
