# SPDX-License-Identifier: Apache-2.0
"""Checks this backend's use of vLLM against a tree of vLLM's sources, without installing or importing them.

    python -m benchmarks.vllm_sources /path/to/vllm-0.33.0 [...]

This is for releases that no available machine can run. It checks that every name that this package imports exists; that
every override accepts the arguments of vLLM's method; and that the functions in the tables of ``serving.hooks`` have
the expected parameters. TREE holds the folder ``vllm``.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from vllm_sparse_backend.serving.hooks import HOOKS, READ_CLASSES, Hook, ReadClass

PACKAGE = Path(__file__).parents[1] / "vllm_sparse_backend"
BACKENDS = "vllm/v1/attention/backends"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Override(NamedTuple):
    """A class of ours, and its base classes in vLLM on a GPU and on a CPU, the nearest first."""

    file: str
    name: str
    bases: tuple[tuple[tuple[str, str], ...], ...]


def _bases(part: str, root: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    base = ("vllm/v1/attention/backend.py", root)
    return (
        ((f"{BACKENDS}/flash_attn.py", f"FlashAttention{part}"), base),
        ((f"{BACKENDS}/cpu_attn.py", f"CPUAttention{part if part != 'Impl' else 'BackendImpl'}"), base),
    )


OVERRIDES = (
    Override("serving/worker/backend.py", "SparsePrefillBackend", _bases("Backend", "AttentionBackend")),
    Override("serving/worker/impl.py", "SparsePrefillImpl", _bases("Impl", "AttentionImpl")),
    Override(
        "serving/worker/metadata_builder.py",
        "SparsePrefillMetadataBuilder",
        _bases("MetadataBuilder", "AttentionMetadataBuilder"),
    ),
)


@dataclass(frozen=True)
class Checked:
    """The number of checks of each kind, and the problems."""

    num_names: int
    num_methods: int
    num_hooks: int
    problems: tuple[str, ...]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def check(
    tree: Path,
    package: Path = PACKAGE,
    hooks: Sequence[Hook] = HOOKS,
    classes: Sequence[ReadClass] = READ_CLASSES,
) -> Checked:
    """Compare ``package`` with the sources in ``tree``."""
    names = sorted(set(imported(package)))
    missing = [f"{where}: {module} has no {name}" for where, module, name in names if not provides(tree, module, name)]
    methods = [method for override in OVERRIDES for method in overridden(tree, package, override)]
    refused = [problem for _, problem in methods if problem is not None]
    problems = (*missing, *refused, *unfit(tree, hooks, classes))
    return Checked(len(names), len(methods), len(hooks), problems)


def imported(package: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (file, module, name) of imports from vLLM, except those that may fail."""
    for path in sorted(package.rglob("*.py")):
        optional = {
            id(node)
            for attempt in ast.walk(parsed(path))
            if isinstance(attempt, ast.Try) and any("ImportError" in ast.dump(h) for h in attempt.handlers)
            for part in attempt.body
            for node in ast.walk(part)
        }
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ImportFrom) or node.module is None or id(node) in optional:
                continue
            if node.module.split(".")[0] == "vllm":
                yield from ((str(path.relative_to(package)), node.module, alias.name) for alias in node.names)


def provides(tree: Path, module: str, name: str) -> bool:
    """Return whether ``from module import name`` would succeed."""
    folder = tree.joinpath(*module.split("."))
    if (folder / f"{name}.py").is_file() or (folder / name).is_dir():
        return True
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return path.is_file() and name in set(defined(parsed(path).body))


def defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements of a module bind, including conditional statements."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from defined(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from defined(handler.body)


def class_of(path: Path, name: str) -> ast.ClassDef | None:
    if not path.is_file():
        return None
    classes = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef) and node.name == name)
    return next(classes, None)


def methods_of(definition: ast.ClassDef | None) -> dict[str, Function]:
    body = [] if definition is None else definition.body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def overridden(tree: Path, package: Path, override: Override) -> Iterator[tuple[str, str | None]]:
    """Yield each method that a class of ours overrides, with its problem, if any."""
    ours = methods_of(class_of(package / override.file, override.name))
    for bases in override.bases:
        if class_of(tree / bases[0][0], bases[0][1]) is None:
            yield override.name, f"{override.file}: {bases[0][0]} has no class {bases[0][1]}"
            continue
        theirs: dict[str, Function] = {}
        for path, name in reversed(bases):
            theirs |= methods_of(class_of(tree / path, name))
        for name in sorted(ours.keys() & theirs.keys()):
            extra = not_taken(ours[name], theirs[name])
            what = f"{override.file}: {override.name}.{name} does not take {', '.join(extra)} of {bases[0][1]}'s"
            yield name, what if extra else None


def not_taken(ours: Function, theirs: Function) -> list[str]:
    """Return parameters of vLLM's method that ours lacks or has in another place."""
    mine, other = ours.args, theirs.args
    names, theirs_in_order = _without_receiver(ours), _without_receiver(theirs)
    if mine.vararg is not None and mine.kwarg is not None:
        return []
    wrong = [name for i, name in enumerate(theirs_in_order) if mine.kwarg is None and names[i : i + 1] != [name]]
    keywords = {*names, *(arg.arg for arg in mine.kwonlyargs)}
    return wrong + [arg.arg for arg in other.kwonlyargs if mine.kwarg is None and arg.arg not in keywords]


def _without_receiver(function: Function) -> list[str]:
    """Return the positional parameters in order, without self or cls, because the method may be static in one class."""
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


STANDS_FOR = {("vllm.platforms", "current_platform"): ("vllm.platforms.interface", "Platform")}
"""Objects that hooks name, and their classes in the sources."""


def members(tree: Path, module: str, owner: str) -> dict[str, Function | None] | None:
    """Return functions and annotated fields (None) of a class by name; of the module if ``owner`` is empty."""
    module, owner = STANDS_FOR.get((module, owner), (module, owner))
    path = tree.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return None
    body = parsed(path).body
    if owner:
        definition = class_of(path, owner)
        if definition is None:
            return None
        body = definition.body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    annotated = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    if "__init__" in functions:  # attributes that the constructor sets
        attributes = (part for part in ast.walk(functions["__init__"]) if isinstance(part, ast.Attribute))
        annotated += [ast.Name(part.attr) for part in attributes if isinstance(part.ctx, ast.Store)]
    return dict.fromkeys(target.id for target in annotated if isinstance(target, ast.Name)) | functions


def unfit(tree: Path, hooks: Sequence[Hook], classes: Sequence[ReadClass]) -> Iterator[str]:
    """Yield everything that hooks expect but the sources lack."""
    for hook in hooks:
        name = ".".join(part for part in (hook.module, hook.owner, hook.function) if part)
        function = (members(tree, hook.module, hook.owner) or {}).get(hook.function)
        if function is None:
            yield f"there is no {name}"
            continue
        args = function.args
        known = {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
        if lacking := [parameter for parameter in hook.expects if parameter not in known]:
            yield f"{name} has no {', '.join(lacking)}"
    for read in classes:
        there = members(tree, read.module, read.owner) or {}
        if lacking := [name for name in read.names if name not in there]:
            yield f"{read.module}.{read.owner} has no {', '.join(lacking)}"


def main(
    trees: Annotated[list[Path] | None, typer.Argument(help="Folders that hold vLLM's package.", exists=True)] = None,
) -> None:
    """Check each tree; exit code 1 if there is a problem."""
    bad = False
    for tree in trees or ():
        result = check(tree)
        counts = f"{result.num_names} names, {result.num_methods} methods, {result.num_hooks} hooks"
        print(f"{tree}: {counts}: ", end="")
        print("all there" if not result.problems else "".join(f"\n  {problem}" for problem in result.problems))
        bad = bad or bool(result.problems)
    raise typer.Exit(1 if bad else 0)


if __name__ == "__main__":
    typer.run(main)
