# SPDX-License-Identifier: Apache-2.0
"""Constants of kernels at module level, which Triton compares at every launch."""

import copy
from types import ModuleType

import pytest
import triton.language as tl

from vllm_sparse_kernels import gluon_compat
from vllm_sparse_kernels.attention.hopper import consumer, item, prepare, producer
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.top_p import choice, hopper, portable, rounding
from vllm_sparse_kernels.selection import lists

DEFAULT_PATH = (gluon_compat, consumer, item, prepare, producer, choice, hopper, portable, rounding, lists)
"""Modules whose kernels a server's default method launches."""


def test_a_constant_differs_from_other_numbers_alone() -> None:
    constant = Constant(3)
    for other in (4, tl.constexpr(4), Constant(4)):
        assert isinstance(constant != other, tl.constexpr)
        assert bool(constant != other)
    for other in (3, tl.constexpr(3), Constant(3), constant):
        assert isinstance(constant != other, tl.constexpr)
        assert not bool(constant != other)
    assert repr(constant) == repr(tl.constexpr(3)), "compiled kernels on disk are found by the text of constants"


def test_a_constant_equals_its_copy_without_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton copies the constants of a kernel when it is compiled, and compares the copies at every launch."""
    monkeypatch.setattr(tl.constexpr, "__ne__", None)
    constant = Constant(3)
    assert not bool(copy.deepcopy(constant) != constant)


@pytest.mark.parametrize("module", DEFAULT_PATH, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_default_method_has_no_other_constants(module: ModuleType) -> None:
    constants = {name: value for name, value in vars(module).items() if isinstance(value, tl.constexpr)}
    assert [name for name, value in constants.items() if not isinstance(value, Constant)] == []
