# SPDX-License-Identifier: Apache-2.0
"""How large the house is: lines of code, the longest file and function, commands, options, documents, and their words.

    python -m benchmarks.house [--test-seconds 290] [--test-all-seconds 2000] [--json docs/results/house.json]

What a reader meets, of these, goes to plain.json beside them.

Lines of code are those that hold a token of the program: no docstrings, comments or blank lines. A line of a function
within another counts for both. How long the tests took comes from who ran them; what is not given stays as it was told.
Exit code 1 where a bar is missed.
"""

import ast
import io
import json
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PARTS = {"wheel": ("vllm_sparse_backend", "kernels"), "lab": ("benchmarks",), "tests": ("tests",)}
LINE_BARS = {"wheel": 15_500, "lab": 5_000, "tests": 12_000}
FILE_BAR, FUNCTION_BAR = 450, 60
COMMAND_BAR, OPTION_BAR, README_BAR, DOCUMENT_BAR = 12, 80, 150, 1_500
PICTURE_BAR, OPENING_BAR = 2, 3
PLAIN = (
    "README", "pictures in README", "documents", "commands", "options and arguments", "words",
    "files opened until where blocks are chosen",
)  # fmt: skip
TEST_BAR_S, TEST_ALL_BAR_S = 300, 2_100
JARGON = re.compile(
    r"\b(?:sooner|company|alone|worst\w*|delegat\w*)\b"
    r"|\| asked \||(?:most|least|percent) was asked|\basked of (?:it|them|us|ourselves)\b|\(asked:",
    re.IGNORECASE,
)
"""Words that are not the field's, which has speed-up, tile union, per head, p99 or maximum, dense backend, target. To
ask a server a question is no such word."""
LINKED = re.compile(r"\]\(([\w./-]+)\)|`([\w./-]+\.\w+)`")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


class Size(NamedTuple):
    lines: int
    where: str


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for t in tokens if t.type not in _NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        # A text that stands alone is a docstring, also below a field.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return code


def functions(source: str, where: str) -> Iterator[Size]:
    """Each function's lines of code, its head and decorators among them."""
    code = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _FUNCTIONS):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            inside = code & set(range(first, (node.end_lineno or 0) + 1))
            yield Size(len(inside), f"{where}:{node.lineno} {node.name}")


def options(command: Any) -> Iterator[int]:
    """How many options and arguments each command has that can be run, of click's or of typer's own click."""
    if hasattr(command, "commands"):
        for one in command.commands.values():
            yield from options(one)
    else:
        yield len(command.params)


def helps(command: Any) -> Iterator[str]:
    """What ``--help`` of a command, and of those below it, is made of."""
    yield from (
        command.help or "",
        *(f"{one.metavar or ''} {getattr(one, 'help', '') or ''}" for one in command.params),
    )
    for one in getattr(command, "commands", {}).values():
        yield from helps(one)


def jargon(texts: Mapping[str, str]) -> list[str]:
    """Where each word stands that has a better one."""
    return [f"{where}: {found[0]}" for where, text in texts.items() for found in JARGON.finditer(text)]


def read_texts(app: Any) -> dict[str, str]:
    """All that people read and type, by place."""
    from vllm_sparse_backend.settings.config import SparsePrefillConfig
    from vllm_sparse_backend.settings.metrics import METRICS
    from vllm_sparse_backend.settings.schema import profile_schema

    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in documents} | {
        "help": "\n".join(helps(app)),
        "metrics": "\n".join(f"{metric.sample} {metric.help}" for metric in METRICS.values()),
        "settings": json.dumps([SparsePrefillConfig.model_json_schema(), profile_schema()]),
    }


def text_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def figure(
    name: str,
    value: float,
    unit: str,
    bar: float | None = None,
    device: str = "none: counted",
    better: str = "lower",
) -> dict[str, Any]:
    command = "python -m benchmarks.house"
    return {
        "name": name, "value": value, "unit": unit, "bar": bar, "better": better, "device": device, "command": command,
    }  # fmt: skip


def openings(goal: Path) -> int:
    """Files opened from README until ``goal``, both counted, when each document's links and `paths` are followed."""
    opened, steps = {ROOT / "README.md"}, 1
    while goal not in opened:
        documents = [path for path in opened if path.suffix == ".md"]
        named = {(path.parent, "".join(name)) for path in documents for name in LINKED.findall(path.read_text())}
        paths = {(folder / name).resolve() for parent, name in named for folder in (parent, ROOT)}
        if not (new := {path for path in paths if path.is_file()} - opened):
            raise ValueError(f"{goal}: no document that README leads to names it")
        opened, steps = opened | new, steps + 1
    return steps


def choosing_file() -> Path:
    """Where a tile's blocks are chosen, by CONTRIBUTING.md; tests hold that it is so."""
    rows = re.findall(
        r"a tile's blocks are chosen\W.*`(\S+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    return ROOT / rows[0]


def longest(name: str, sizes: list[Size], bar: int) -> tuple[dict[str, Any], str]:
    most, too_long = max(sizes), sum(size.lines > bar for size in sizes)
    return figure(name, most.lines, "lines", bar), most.where + (f", {too_long} too long" if too_long else "")


def of_code() -> Iterator[tuple[dict[str, Any], str]]:
    files: list[Size] = []
    found: list[Size] = []
    for part, folders in PARTS.items():
        paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
        sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
        own = [Size(len(code_lines(source)), where) for where, source in sources.items()]
        found += (size for where, source in sources.items() for size in functions(source, where))
        files += own
        yield figure(f"code, {part}", sum(size.lines for size in own), "lines", LINE_BARS[part]), f"{len(own)} files"
    yield longest("longest file", files, FILE_BAR)
    yield longest("longest function", found, FUNCTION_BAR)


def counted() -> Iterator[tuple[dict[str, Any], str]]:
    """Figures, and where what they tell of is found."""
    from vllm_sparse_backend.cli import app

    yield from of_code()
    command = typer.main.get_command(app)
    slots, found = list(options(command)), jargon(read_texts(command))
    yield figure("commands", len(slots), "commands", COMMAND_BAR), "sparse-prefill"
    yield figure("options and arguments", sum(slots), "options", OPTION_BAR), "of all commands"
    yield figure("README", text_lines([ROOT / "README.md"]), "lines", README_BAR), "README.md"
    pictures = (ROOT / "README.md").read_text().count("![")
    yield figure("pictures in README", pictures, "pictures", PICTURE_BAR, better="higher"), "README.md"
    goal = choosing_file()
    yield figure(PLAIN[-1], openings(goal), "files", OPENING_BAR), str(goal.relative_to(ROOT))
    yield figure("documents", text_lines((ROOT / "docs").glob("*.md")), "lines", DOCUMENT_BAR), "docs"
    yield figure("words", len(found), "words", 0), "; ".join(found[:3]) or "README, docs, help, metrics, settings"


def show(figures: list[dict[str, Any]], where: dict[str, str]) -> None:
    table = Table("what", "value", "bar", "where")
    for one in figures:
        style = "red" if missed(one) else None
        table.add_row(
            one["name"], f"{one['value']:,} {one['unit']}", f"{one['bar']:,}" if one["bar"] is not None else "",
            where.get(one["name"], one["device"]), style=style,
        )  # fmt: skip
    Console(width=120, highlight=False).print(table)


def missed(one: dict[str, Any]) -> bool:
    if one["bar"] is None:
        return False
    return one["value"] < one["bar"] if one["better"] == "higher" else one["value"] > one["bar"]


def main(
    test_seconds: Annotated[float | None, typer.Option(min=0, help="How long `make test` took.")] = None,
    test_all_seconds: Annotated[float | None, typer.Option(min=0, help="How long `make test-all` took.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where figures go.")] = ROOT / "docs/results/house.json",
) -> None:
    """Count, print a table, write the figures; exit code 1 if one misses its bar."""
    found = list(counted())
    figures, where = [one for one, _ in found], {one["name"]: place for one, place in found}
    known = {one["name"]: one for one in json.loads(json_path.read_text())} if json_path.is_file() else {}
    device = f"CPU, {os.cpu_count()} cores"
    for name, seconds, bar in (
        ("make test", test_seconds, TEST_BAR_S),
        ("make test-all", test_all_seconds, TEST_ALL_BAR_S),
    ):
        if seconds is not None:
            known[name] = figure(name, seconds, "s", bar, device)
        if name in known:
            figures.append(known[name])
    # What was measured on a GPU before and after a change of the house stays as it is.
    others = [one for one in known.values() if "benchmarks.house" not in one["command"]]
    json_path.write_text(json.dumps([*figures, *others], indent=1, ensure_ascii=False) + "\n")
    plain = [one for name in PLAIN for one in figures if one["name"] == name]
    json_path.with_name("plain.json").write_text(json.dumps(plain, indent=1) + "\n")
    show(figures, where)
    raise typer.Exit(1 if any(map(missed, figures)) else 0)


if __name__ == "__main__":
    typer.run(main)
