# SPDX-License-Identifier: Apache-2.0
"""Public functions describe every argument, the result and the errors; no identifier is a pronoun."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_sparse_kernels
from vllm_sparse_backend import settings

KERNELS = Path(vllm_sparse_kernels.__file__).parent
SETTINGS = Path(settings.__file__).parent
HOST_MODULES = (
    *("index.py", "rows.py", "paged.py", "workspace.py", "pairs.py", "attend/options.py"),
    *(f"methods/{name}.py" for name in ("__init__", "base", "references", "registry", "spec")),
)
MODULES = [*(KERNELS / name for name in HOST_MODULES), *sorted(SETTINGS.glob("*.py"))]
PRONOUNS = {"one", "found", "given", "own", "of", "each", "both", "rest", "asked", "told"}
UNFINISHED = {"resolved.py": {"of"}}
"""Modules of ``settings`` that do not meet all of this yet."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or (node.name.startswith("_") and node.name != "__init__"):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node.body, f"{node.name}.")


def section(docstring: str, *titles: str) -> str:
    """The indented text under a title; empty without such a title."""
    match = re.search(rf"^(?:{'|'.join(titles)}):\n((?: .*\n|\n)+)", f"{docstring}\n", re.MULTILINE)
    return match[1] if match else ""


def missing(definition: Function | ast.ClassDef) -> list[str]:
    """What the docstring of a function or class lacks."""
    docstring = ast.get_docstring(definition) or ""
    if not docstring:
        return ["docstring"]
    if isinstance(definition, ast.ClassDef):
        return []
    function = definition
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    described = re.findall(r"^ +\**(\w+): \S", section(docstring, "Args"), re.MULTILINE)
    lacking = [f"Args {name}" for name in names if name not in ("self", "cls", *described)]
    returns = function.returns is not None and ast.unparse(function.returns) != "None"
    if returns and not decorators & {"property", "cached_property"} and not section(docstring, "Returns", "Yields"):
        lacking.append("Returns")
    described_errors = section(docstring, "Raises")
    return lacking + [f"Raises {name}" for name in raised(function) if f"{name}:" not in described_errors]


def raised(function: Function) -> list[str]:
    """Exceptions that a function itself raises by class; those of other functions are not followed."""
    calls = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    names = {ast.unparse(call.func) for call in calls}
    return sorted(name for name in names if name[0].isupper())


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, Function):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_docstrings_are_complete(path: Path) -> None:
    if path.parent == SETTINGS and "docstrings" in UNFINISHED.get(path.name, ()):
        pytest.skip("not finished")
    lacking = {}
    for name, node in public_definitions(ast.parse(path.read_text()).body):
        if parts := missing(node):
            lacking[name] = parts
    assert lacking == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_identifier_is_a_pronoun(path: Path) -> None:
    allowed = UNFINISHED.get(path.name, set()) if path.parent == SETTINGS else set()
    names = [(line, name) for line, name in identifiers(ast.parse(path.read_text())) if name in PRONOUNS - allowed]
    assert names == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(): ...", ["docstring"]),
        ('def f(a, *, b): """Do.\n\n    Args:\n        a: A number.\n    """', ["Args b"]),
        ('def f(*a) -> None: """Do.\n\n    Args:\n        *a: Numbers.\n    """', []),
        ('def f() -> int: """Do."""', ["Returns"]),
        ('@property\ndef f(self) -> int: """A number."""', []),
        ('def f():\n    """Do."""\n    raise ValueError("x")', ["Raises ValueError"]),
        ('def f():\n    """Do.\n\n    Raises:\n        ValueError: Always.\n    """\n    raise ValueError("x")', []),
    ],
)
def test_what_is_missing_is_found(source: str, expected: list[str]) -> None:
    (function,) = ast.parse(source).body
    assert isinstance(function, Function)
    assert missing(function) == expected
