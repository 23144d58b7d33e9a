# SPDX-License-Identifier: Apache-2.0
"""Savings in Triton's interpreter: the language is prepared once per launch and restored afterwards; equal types share
their parts, and types that differ share none; matrices are multiplied in a single thread."""

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy
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


@pytest.mark.parametrize(
    "element", [tl.int32, tl.float16, tl.pointer_type(tl.int32), tl.pointer_type(tl.int32, "shared")]
)
def test_a_block_type_has_its_element_and_sizes(element: Any) -> None:
    for sizes in ([4], [8], [4, 8], [8, 4], [1]):
        for shape in (sizes, [tl.constexpr(size) for size in sizes]):
            block = tl.block_type(element, shape)
            assert list(block.shape) == sizes
            assert block.numel == numpy.prod(sizes)
            assert block.element_ty == element == block.scalar
            assert str(element) in block.name
            tensor = tl.tensor(None, block)
            assert [size.value for size in tensor.shape] == sizes
            assert tensor.numel.value == block.numel
            assert (tensor.type, tensor.dtype) == (block, element)
    scalar = tl.tensor(None, element)
    assert (len(scalar.shape), scalar.numel.value, scalar.dtype) == (0, 1, element)


def test_sizes_that_triton_refuses_are_refused_after_equal_sizes_were_accepted() -> None:
    tl.block_type(tl.int32, [4])
    for shape, error in (([4.0], TypeError), ([3], ValueError), ([], TypeError)):
        for _ in range(2):
            with pytest.raises(error):
                tl.block_type(tl.int32, shape)


@triton.jit
def _mixed_kernel(halves, numbers, sums):
    """Operands are scalars and blocks, of several sizes and types."""
    b_half = tl.load(halves + tl.arange(0, 4))
    b_number = tl.load(numbers + tl.arange(0, 4))
    first = tl.load(numbers)
    b_product = b_half[:, None] * b_number[None, :] + first
    b_product += tl.where(b_number[:, None] > first, b_half[None, :], 0.25)
    at = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(sums + at, b_product + tl.load(halves + tl.arange(0, 1))[None, :])


def test_operands_of_several_types_and_sizes() -> None:
    halves = torch.tensor([0.5, 1.5, -2.0, 3.0], dtype=torch.float16)
    numbers = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    sums = torch.zeros(4, 4)
    _mixed_kernel[(1,)](halves, numbers, sums)
    added = torch.where(numbers[:, None] > 1, halves[None, :].float(), 0.25)
    assert torch.equal(sums, halves[:, None].float() * numbers[None, :] + 1 + added + 0.5)


def test_numpy_multiplies_matrices_in_a_single_thread() -> None:
    """The variable has no effect if something imports numpy before ``tests/conftest.py`` sets it."""
    libraries = list(Path(numpy.__file__).parents[1].glob("numpy.libs/libscipy_openblas*"))
    if not libraries:
        pytest.skip("numpy has no OpenBLAS of its own")
    library = ctypes.CDLL(str(libraries[0]))
    num_threads = next(
        getattr(library, name) for name in ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads")
        if hasattr(library, name)
    )  # fmt: skip
    assert num_threads() == int(os.environ["OPENBLAS_NUM_THREADS"])


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
