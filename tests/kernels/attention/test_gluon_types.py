# SPDX-License-Identifier: Apache-2.0
"""Rules of the Gluon kernels: parts have names, and types of jitted code work in every supported Triton."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_sparse_kernels

KERNELS = Path(vllm_sparse_kernels.__file__).parent
GLUON_FILES = [path for path in sorted(KERNELS.rglob("*.py")) if "@gluon.jit" in path.read_text()]
MOST_PARAMETERS = 15


def jitted(path: Path) -> Iterator[ast.FunctionDef]:
    """Return the functions of a file that Triton or Gluon compiles."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(line) for line in node.decorator_list):
            yield node


def is_numeric_index(node: ast.AST) -> bool:
    """Return whether a node reads a part of a tuple by its number. Dimensions of a shape have no names and do not
    count."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
        return False
    is_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node.slice.value, int) and not is_shape


def test_there_are_gluon_kernels() -> None:
    assert {"gluon_compat.py", "kernel.py", "consumer.py", "hopper.py"} <= {p.name for p in GLUON_FILES}


@pytest.mark.parametrize("path", GLUON_FILES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_parts_are_read_by_name(path: Path) -> None:
    indices = [
        f"{function.name}, line {node.lineno}: {ast.unparse(node)}"
        for function in jitted(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript) and is_numeric_index(node)
    ]
    assert indices == []


@pytest.mark.parametrize("path", GLUON_FILES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_no_kernel_takes_a_crowd_of_parameters(path: Path) -> None:
    counts = {function.name: len(function.args.args) for function in jitted(path)}
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_aggregates_are_built_where_triton_writes_no_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 and 3.7 have no public decorator, and their private decorator leaves the constructor to the class."""
    names = pytest.importorskip("vllm_sparse_kernels.gluon_compat")
    monkeypatch.delattr(names.gluon, "aggregate", raising=False)

    class Sizes:
        NUM: names.gl.constexpr
        STEP: names.gl.constexpr

    made = names.aggregate(Sizes)
    sizes = made(3, names.gl.constexpr(128))
    assert (sizes.NUM.value, sizes.STEP.value) == (3, 128)
    with pytest.raises(TypeError, match=r"Sizes takes 2 values \(NUM, STEP\), not 1"):
        made(3)
