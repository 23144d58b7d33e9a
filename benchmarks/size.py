# SPDX-License-Identifier: Apache-2.0
"""Count the project's syntax nodes and docstring lines: `python -m benchmarks.size`.

Annotations, docstrings and Load, Store and Del contexts do not count.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = {
    "product": ("vllm_sparse_backend", "kernels"),
    "product, benchmarks and deploy": ("vllm_sparse_backend", "kernels", "benchmarks", "deploy"),
    "tests": ("tests",),
    "benchmarks": ("benchmarks",),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstring(node: ast.AST) -> ast.stmt | None:
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    return None if ast.get_docstring(node) is None else node.body[0]


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and child is not docstring(node) and not isinstance(child, ast.expr_context):
                yield from nodes(child)


def summary(folders: tuple[str, ...]) -> str:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    every = [node for tree in trees.values() for node in nodes(tree)]
    functions = [node for node in every if isinstance(node, FUNCTIONS)]
    long = [f for f in functions if (f.end_lineno or 0) - f.lineno + 1 > 60]
    docs = (
        docstring(node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if not (isinstance(node, ast.Module) and "methods" in path.parts)
    )
    lines = sum((doc.end_lineno or 0) - doc.lineno + 1 for doc in docs if doc is not None)
    large = sum(len(path.read_text().splitlines()) > 600 for path in paths)
    return (
        f"{len(every):,} nodes, {lines:,} docstring lines, {len(paths)} modules ({large} over 600 lines), "
        f"{len(functions)} functions ({len(long)} over 60 lines), "
        f"{sum(isinstance(node, ast.ClassDef) for node in every)} classes"
    )


if __name__ == "__main__":
    for part, folders in PARTS.items():
        print(f"{part}: {summary(folders)}")
