# SPDX-License-Identifier: Apache-2.0
"""Checks the readability of the code base: names, signatures, docstrings, imports, the command line and README.md.

    python -m benchmarks.readability [--list] [--json docs/results/readable.json]

Nothing here counts lines: a file or function may be as long as its subject needs. Each check yields the places that
break a rule of CONTRIBUTING.md; `tests/project/test_readability.py` runs them on every change.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PRODUCT = ("vllm_sparse_backend", "kernels")
EVERYTHING = (*PRODUCT, "benchmarks", "tests", "deploy")
DOCUMENTED = (
    "kernels/vllm_sparse_kernels",
    "vllm_sparse_backend/config",
    "vllm_sparse_backend/serving",
    "vllm_sparse_backend/calibration",
)
"""Packages whose public functions have complete docstrings."""

PRONOUNS = frozenset({"one", "found", "given", "own", "of", "each", "both", "rest", "asked", "told"})
"""Names that describe a grammatical role instead of a value."""

VAGUE = frozenset({"alike", "beside", "news", "off", "ours", "theirs", "there"})
"""More such names, which the product does not have."""

MAX_PARAMETERS, MAX_KERNEL_PARAMETERS = 8, 15
MAX_COMMANDS, MAX_OPTIONS = 12, 80
MAX_README_WORDS, MAX_README_NUMBERS = 800, 40

FIGURE_TABLES = ("Speed", "Accuracy")
"""Sections of README.md whose tables hold measurements; every other number in the file counts."""
NUMBER = re.compile(r"(?<![\w.,])(?<!\w-)\d+(?:[.,]\d+)*")
"""A number, with its separators. A digit in a name, as in H200, fp8 or FlashAttention-3, does not count."""

JARGON = re.compile(
    r"\b(?:sooner|company|alone|worst\w*|delegat\w*)\b"
    r"|\| asked \||(?:most|least|percent) was asked|\basked of (?:it|them|us|ourselves)\b|\(asked:",
    re.IGNORECASE,
)
"""Words that are not terms of the field. Its terms are speed-up, tile union, per head, p99, maximum, target."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Violation(NamedTuple):
    """A place that breaks a rule."""

    where: str
    what: str


@cache
def _syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def source_trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path, relative to the repository, and the syntax tree of every Python file in these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), _syntax_tree(path)


def is_jitted(function: Function) -> bool:
    """Return whether Triton or Gluon compiles the function."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Yield all functions and methods of a syntax tree."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameter_names(function: Function) -> list[str]:
    """Return the names of a function's parameters, without ``self``, ``cls`` and ``*args``."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def numeric_indices(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of each numeric index into a tuple in jitted code; ``x.shape[0]`` is a size, not an index."""
    for function in filter(is_jitted, functions_in(tree)):
        for node in ast.walk(function):
            if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
                continue
            is_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
            if isinstance(node.slice.value, int) and not is_shape:
                yield node.lineno, ast.unparse(node)


def long_signatures(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, function) of each signature with too many parameters; typer's commands have one per option."""
    for function in functions_in(tree):
        if any(_is_command(decorator) for decorator in function.decorator_list):
            continue
        limit = MAX_KERNEL_PARAMETERS if is_jitted(function) else MAX_PARAMETERS
        count = len(parameter_names(function))
        if count > limit:
            yield function.lineno, f"{function.name} has {count} parameters, at most {limit}"


def _is_command(decorator: ast.expr) -> bool:
    return re.search(r"\.command(\(|$)", ast.unparse(decorator)) is not None


def pronoun_names(tree: ast.AST, words: frozenset[str] = PRONOUNS) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each parameter, local and field that is named by a pronoun or participle."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.Lambda):
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if argument.arg in words:
                    yield argument.lineno, argument.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in words:
            yield node.lineno, node.id


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the same for names in ``VAGUE``."""
    return pronoun_names(tree, VAGUE)


def vllm_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, statement) of each import of vLLM."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module or "")
        if any(module == "vllm" or module.startswith("vllm.") for module in modules):
            yield node.lineno, ast.unparse(node)


def imported_tests(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import of a test module; shared code belongs in ``tests.helpers``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module or ''}.{alias.name}" for alias in node.names)]
        for module in modules:
            package, _, name = module.rpartition(".")
            is_in_tests = package.split(".")[0] == "tests" or (isinstance(node, ast.ImportFrom) and node.level > 0)
            if is_in_tests and name.startswith("test_"):
                yield node.lineno, module


def incomplete_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, missing part) of each public class and function without a complete Google-style docstring.

    ``Args:`` describes every parameter, ``Returns:`` or ``Yields:`` the result, ``Raises:`` each exception that the
    function itself raises by class. Properties need no ``Args:`` and ``Returns:``.
    """
    for name, node in _public_definitions(tree.body):
        docstring = ast.get_docstring(node)
        if docstring is None:
            yield node.lineno, f"{name}: no docstring"
        elif isinstance(node, Function) and (missing := _missing_parts(node, docstring)):
            yield node.lineno, f"{name}: no {', no '.join(missing)}"


def _public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for node in body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node.body, f"{node.name}.")


def _missing_parts(function: Function, docstring: str) -> list[str]:
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    if decorators & {"property", "cached_property", "setter", "overload"}:
        return []
    arguments = function.args
    starred = [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    described = re.findall(r"^ +\**(\w+): \S", _section(docstring, "Args"), re.MULTILINE)
    missing = [f"Args {name}" for name in (*parameter_names(function), *starred) if name not in described]
    returns = None if function.returns is None else ast.unparse(function.returns)
    if returns not in (None, "None") and not _section(docstring, "Returns", "Yields"):
        missing.append("Returns")
    raises = _section(docstring, "Raises")
    return missing + [f"Raises {name}" for name in _raised_classes(function) if f"{name}:" not in raises]


def _section(docstring: str, *titles: str) -> str:
    """Return the indented text below a title; empty without such a title."""
    match = re.search(rf"^(?:{'|'.join(titles)}):\n((?: .*\n|\n)+)", f"{docstring}\n", re.MULTILINE)
    return match[1] if match else ""


def _raised_classes(function: Function) -> list[str]:
    calls = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return sorted({name for name in (ast.unparse(call.func) for call in calls) if name[0].isupper()})


def _violations(
    check: Callable[[Any], Iterator[tuple[int, str]]], folders: tuple[str, ...], is_exempt: Callable[[str], bool]
) -> list[Violation]:
    return [
        Violation(f"{path}:{line}", what)
        for path, tree in source_trees(*folders)
        if not is_exempt(path)
        for line, what in check(tree)
    ]


def _nothing_exempt(path: str) -> bool:
    return False


def _may_import_vllm(path: str) -> bool:
    return path.startswith("vllm_sparse_backend/serving/") or path == "vllm_sparse_backend/plugin.py"


CODE_CHECKS: Mapping[str, Callable[[], list[Violation]]] = {
    "numeric tuple indices in jitted code": lambda: _violations(numeric_indices, EVERYTHING, _nothing_exempt),
    "functions with too many parameters": lambda: _violations(long_signatures, EVERYTHING, _nothing_exempt),
    "names that are pronouns or participles": lambda: [
        *_violations(pronoun_names, EVERYTHING, _nothing_exempt),
        *_violations(vague_names, PRODUCT, _nothing_exempt),
    ],
    "modules outside serving/ that import vLLM": lambda: _violations(vllm_imports, PRODUCT, _may_import_vllm),
    "test modules imported by other test modules": lambda: _violations(imported_tests, ("tests",), _nothing_exempt),
    "public functions and classes without a complete docstring": lambda: _violations(
        incomplete_docstrings, DOCUMENTED, _nothing_exempt
    ),
}
"""Checks by name, which return the places in the code that break a rule. The target of each check is 0."""


def count_options(command: Any) -> Iterator[int]:
    """Yield the number of options and arguments of each command that can be run."""
    if hasattr(command, "commands"):
        for subcommand in command.commands.values():
            yield from count_options(subcommand)
    else:
        yield len(command.params)


def help_texts(command: Any) -> Iterator[str]:
    """Yield the texts that ``--help`` shows for a command and its subcommands."""
    yield command.help or ""
    for parameter in command.params:
        yield f"{parameter.metavar or ''} {getattr(parameter, 'help', '') or ''}"
    for subcommand in getattr(command, "commands", {}).values():
        yield from help_texts(subcommand)


def user_texts(command: Any) -> dict[str, str]:
    """Return all texts for users by place: documents, help, metrics and settings."""
    from vllm_sparse_backend.config.metrics import METRICS
    from vllm_sparse_backend.config.profile_schema import profile_schema
    from vllm_sparse_backend.config.settings import SparsePrefillConfig

    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in documents} | {
        "help": "\n".join(help_texts(command)),
        "metrics": "\n".join(f"{metric.sample} {metric.help}" for metric in METRICS.values()),
        "settings": json.dumps([SparsePrefillConfig.model_json_schema(), profile_schema()]),
    }


def jargon(texts: Mapping[str, str]) -> list[Violation]:
    """Return each word that is not a term of the field, with its place."""
    return [Violation(where, match[0]) for where, text in texts.items() for match in JARGON.finditer(text)]


def count_words(text: str) -> int:
    """Return the number of words in a document, counted as ``wc -w`` does: table rules and links included."""
    return len(text.split())


def numbers_outside_figure_tables(text: str) -> list[str]:
    """Return the numbers in a README that a reader sees outside the tables of ``FIGURE_TABLES``.

    Args:
        text: The document. Targets of links and comments do not count, because readers do not see them.

    Returns:
        The numbers, in order.
    """
    visible = re.sub(r"<!--.*?-->|\]\([^)]*\)", "", text, flags=re.DOTALL)
    numbers, section = [], ""
    for line in visible.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not (section in FIGURE_TABLES and line.startswith("|")):
            numbers += NUMBER.findall(line)
    return numbers


def cells_with_several_numbers(text: str) -> list[str]:
    """Return the cells of a document's tables that contain more than one number, outside code and links."""
    cells = [
        cell.strip()
        for line in text.splitlines()
        if line.startswith("|")
        for cell in re.sub(r"`[^`]*`|\]\([^)]*\)", "", line).strip("|").split("|")
    ]
    return [cell for cell in cells if len(NUMBER.findall(cell)) > 1]


def figure(name: str, value: float, unit: str, bar: float) -> dict[str, Any]:
    """Return a row for docs/results. Lower is better."""
    return {
        "name": name, "value": value, "unit": unit, "bar": bar, "better": "lower", "device": "none: counted",
        "command": "python -m benchmarks.readability",
    }  # fmt: skip


def measure() -> tuple[list[dict[str, Any]], list[Violation]]:
    """Return all figures, and every place that breaks a rule."""
    from vllm_sparse_backend.cli import app

    figures, violations = [], []
    for name, check in CODE_CHECKS.items():
        places = check()
        violations += places
        figures.append(figure(name, len(places), "places", 0))
    command = typer.main.get_command(app)
    option_counts, odd_words = list(count_options(command)), jargon(user_texts(command))
    violations += odd_words
    figures.append(figure("words that are not the field's", len(odd_words), "words", 0))
    readme = (ROOT / "README.md").read_text()
    numbers = numbers_outside_figure_tables(readme)
    figures.append(figure("words in README.md", count_words(readme), "words", MAX_README_WORDS))
    figures.append(figure("numbers in README.md outside its figures", len(numbers), "numbers", MAX_README_NUMBERS))
    figures.append(figure("commands", len(option_counts), "commands", MAX_COMMANDS))
    figures.append(figure("options and arguments of all commands", sum(option_counts), "options", MAX_OPTIONS))
    return figures, violations


def main(
    show_places: Annotated[bool, typer.Option("--list", help="Print every place that breaks a rule.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="File in which to update these figures.")] = None,
) -> None:
    """Print each figure with its bar; exit code 1 if any figure misses its bar."""
    figures, violations = measure()
    if show_places:
        for where, what in violations:
            print(f"{where}: {what}")
    table = Table("what", "value", "bar")
    for row in figures:
        style = "red" if row["value"] > row["bar"] else None
        table.add_row(row["name"], f"{row['value']:,} {row['unit']}", f"{row['bar']:,}", style=style)
    Console(width=120, highlight=False).print(table)
    if json_path is not None:
        known = json.loads(json_path.read_text()) if json_path.is_file() else []
        names = {row["name"] for row in figures}
        others = [row for row in known if row["name"] not in names]
        json_path.write_text(json.dumps([*figures, *others], indent=1, ensure_ascii=False) + "\n")
    raise typer.Exit(1 if any(row["value"] > row["bar"] for row in figures) else 0)


if __name__ == "__main__":
    typer.run(main)
