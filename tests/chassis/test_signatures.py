# SPDX-License-Identifier: Apache-2.0
"""No function takes more than eight parameters: what belongs together is a type."""

import ast
from pathlib import Path

import pytest

from tests.tools import ROOT

MOST_PARAMETERS = 8
FOLDERS = [
    *(f"vllm_sparse_backend/{name}" for name in ("cli", "demo", "measure", "profiling")),
    "benchmarks",
    "tests/helpers",
]


def parameters(function: ast.FunctionDef) -> int:
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_takes_more_than_eight_parameters(folder: str) -> None:
    long = []
    for path in Path(ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and parameters(node) > MOST_PARAMETERS:
                long.append(f"{path.relative_to(ROOT)}: {node.name}: {parameters(node)}")
    assert not long
