# SPDX-License-Identifier: Apache-2.0
"""Check the English of documents, docstrings, comments and messages, and pick sentences at random to read aloud.

    python -m benchmarks.prose check
    python -m benchmarks.prose sample --seed 1 --count 60

`benchmarks/prose_rules.yaml` has the rules: phrases that are hard to read, with their replacements. proselint runs
these rules and a few groups of its own checks. All files must follow every rule, and Markdown files have lines of at
most 100 characters outside of tables and code.
"""

import io
import random
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
import yaml
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckFlags
from proselint.registry.checks.engine import Fancy, RegexOptions
from proselint.registry.checks.types import ExistenceSimple
from proselint.tools import LintFile
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RULES = Path(__file__).with_name("prose_rules.yaml")
MAX_COLUMNS = 100

PYTHON_FOLDERS = ("vllm_sparse_backend", "kernels", "benchmarks", "deploy")
"""Folders whose docstrings, comments and messages are checked."""

PROSELINT_GROUPS = ("archaism", "malapropisms", "nonwords", "redundancy.misc.garner")
"""proselint's own checks that apply to technical text."""

CODE = "X"
"""Stands for text that is set as code, so that rules see a word and not its letters."""

WHITE_SPACE = r"(?:[ \t]+|[ \t]*\n[ \t]*)"
"""White space that a space in a rule's pattern matches: also the end of a line, but not of a paragraph."""

MIN_MESSAGE_WORDS = 3
MIN_SENTENCE_WORDS = 5


class Rule(NamedTuple):
    """A phrase that is hard to read, as `prose_rules.yaml` describes it."""

    name: str
    pattern: str
    why: str
    write: str
    catches: str
    passes: str
    case_sensitive: bool = False


class Finding(NamedTuple):
    """A place in a file that breaks a rule."""

    path: str
    line: int
    rule: str
    phrase: str
    advice: str


class Prose(NamedTuple):
    """The sentences of a file, with every character at its position in the file.

    Attributes:
        path: the file, relative to the repository.
        text: the file with everything but prose blanked, and code within prose replaced by `CODE`.
        shown: the same text, with code within prose unchanged.
    """

    path: str
    text: str
    shown: str


@cache
def read_rules() -> tuple[Rule, ...]:
    """Return the rules of `prose_rules.yaml`, parsed once because every file is checked against them."""
    return tuple(Rule(**entry) for entry in yaml.safe_load(RULES.read_text()))


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _mask_code(text: str) -> str:
    """Return text with the content of backticks replaced by `CODE`."""
    return re.sub(r"(`+)(?:(?!\1).)+\1", lambda match: re.sub(r"\S", CODE, match[0]), text, flags=re.DOTALL)


MARKDOWN_NOT_PROSE = re.compile(
    r"<!-- settings:begin.*?settings:end -->"  # written by benchmarks.settings_tables from the code
    r"|<!--.*?-->"
    r"|^ *```.*?^ *```$"
    r"|(?:(?<=\n\n)|\A)(?: {4}.*\n|\n(?= {4}))+"  # an indented block of code
    r"|\[(?=[^\[\]]*\]\()|\]\([^)\s]*\)"  # a link, except its text
    r"|https?://\S+",
    re.DOTALL | re.MULTILINE,
)


def markdown_prose(path: str, source: str) -> Prose:
    """Return the sentences of a Markdown file.

    Args:
        path: the file, relative to the repository.
        source: its content.

    Returns:
        Its prose, without blocks of code, generated tables, comments and addresses.
    """
    # DOTALL is for comments and fences; a line of an indented block stops at the end of the line.
    pattern = re.compile(MARKDOWN_NOT_PROSE.pattern.replace("{4}.*\\n", "{4}[^\\n]*\\n"), MARKDOWN_NOT_PROSE.flags)
    shown = pattern.sub(lambda match: _blank(match[0]), source)
    shown = re.sub(r"^#+ |^ *[*-] |^> |\*\*|^\|[-| :]+\|$", lambda match: _blank(match[0]), shown, flags=re.MULTILINE)
    return Prose(path, _mask_code(shown), shown)


def python_prose(path: str, source: str) -> Prose:
    """Return the docstrings, comments and messages of a Python file.

    Args:
        path: the file, relative to the repository.
        source: its content.

    Returns:
        Its prose; a `|` marks other code between two texts.
    """
    lines = source.splitlines(keepends=True)
    shown = [list(_blank(line)) for line in lines]
    fstring_depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        fstring_depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if kind == "COMMENT":
            text = " " + token.string[1:]
        elif kind == "STRING" and _is_sentence(token.string):
            text = _string_content(token.string)
        elif kind == "FSTRING_MIDDLE":
            text = token.string
        elif kind in ("NAME", "NUMBER", "OP", "STRING"):
            text = "|" if fstring_depth == 0 else CODE
        else:
            continue
        _write(shown, token.start, text)
    joined = "".join("".join(line) for line in shown)
    return Prose(path, _mask_code(joined), joined)


def _is_sentence(literal: str) -> bool:
    return len(re.findall(r"(?<![\w-])[A-Za-z]{2,}\b", literal)) >= MIN_MESSAGE_WORDS and " " in literal.strip()


def _string_content(literal: str) -> str:
    """Return a string literal of the same length, with blanks for prefix and quotes and `CODE` for an f-string's
    values."""
    match = re.fullmatch(r"(\w*)(\"\"\"|'''|\"|')(.*)\2", literal, re.DOTALL)
    assert match is not None, literal
    prefix, quotes, content = match.groups()
    if "f" in prefix.lower():
        content = re.sub(r"\{[^{}]*\}", lambda value: re.sub(r"\S", CODE, value[0]), content)
    content = re.sub(r"\\[nt]", "  ", content)
    return " " * len(prefix + quotes) + content + " " * len(quotes)


def _write(lines: list[list[str]], start: tuple[int, int], text: str) -> None:
    """Put text into lines of characters at a token's (line, column)."""
    row, column = start[0] - 1, start[1]
    for part in text.splitlines(keepends=True):
        content = part.rstrip("\n")
        lines[row][column : column + len(content)] = content
        row, column = row + 1, 0


def yaml_prose(path: str, source: str) -> Prose:
    """Return the comments of a YAML file and the texts of its alerts.

    Args:
        path: the file, relative to the repository.
        source: its content.

    Returns:
        Its prose.
    """
    shown = re.sub(
        r"^(?!\s*#|\s*(?:summary|description):).*$|^\s*(?:#|summary:|description:)|\{\{.*?\}\}",
        lambda match: _blank(match[0]),
        source,
        flags=re.MULTILINE,
    )
    return Prose(path, _mask_code(shown), shown)


READERS = {".md": markdown_prose, ".py": python_prose, ".yml": yaml_prose, ".yaml": yaml_prose}


def markdown_files() -> list[Path]:
    """Return every Markdown file of the repository, without those of environments and caches."""
    folders = ("docs", "deploy", "profiles", "tests", "benchmarks", "vllm_sparse_backend", "kernels")
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))])


def python_files() -> list[Path]:
    """Return every Python file of `PYTHON_FOLDERS`, and the YAML files of deploy/."""
    sources = [path for folder in PYTHON_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return sources + sorted(path for path in (ROOT / "deploy").rglob("*.y*ml"))


def read_prose(path: Path) -> Prose:
    """Return the sentences of a Markdown, Python or YAML file.

    Args:
        path: the file.

    Returns:
        Its prose.
    """
    return READERS[path.suffix](str(path.relative_to(ROOT)), path.read_text())


def register_rules(rules: Sequence[Rule]) -> None:
    """Register our rules with proselint, once per process.

    Args:
        rules: rules of `prose_rules.yaml`.
    """
    registry = CheckRegistry()
    known = {check.path for check in registry.checks}
    for rule in rules:
        if f"ours.{rule.name}" not in known:
            registry.register(
                Check(
                    ExistenceSimple(rule.pattern.replace(" ", WHITE_SPACE)),
                    engine=Fancy(RegexOptions(case_insensitive=not rule.case_sensitive)),
                    path=f"ours.{rule.name}",
                    message=f"{rule.why}; write {rule.write}",
                    flags=CheckFlags(allow_quotes=True),
                )
            )
    if not any(path.startswith(PROSELINT_GROUPS) for path in known):
        from proselint.checks import __register__ as proselint_checks

        registry.register_many(proselint_checks)


def phrase_findings(prose: Prose) -> Iterator[Finding]:
    """Yield each phrase that breaks one of our rules or proselint's.

    Args:
        prose: the sentences of a file.

    Yields:
        Findings in the order of the file.
    """
    register_rules(read_rules())
    if not prose.text.strip():
        return
    enabled = dict.fromkeys(("ours", *PROSELINT_GROUPS), True)
    document = LintFile(prose.path, prose.text)
    for result in document.lint({"max_errors": 10_000, "checks": enabled}):
        start, end = result.check_result.span
        phrase = " ".join(document.content[start:end].split())
        rule = result.check_result.check_path.removeprefix("ours.")
        yield Finding(prose.path, result.pos[0], rule, phrase, result.check_result.message)


def long_lines(path: str, source: str) -> Iterator[Finding]:
    """Yield each line of a Markdown file that is too long, tables and code aside.

    Args:
        path: the file, relative to the repository.
        source: its content.

    Yields:
        A finding for each line of prose with more than `MAX_COLUMNS` characters.
    """
    prose = markdown_prose(path, source)
    for number, (line, shown) in enumerate(zip(source.splitlines(), prose.shown.splitlines(), strict=True), start=1):
        if len(line) > MAX_COLUMNS and shown.strip() and not line.lstrip().startswith("|"):
            advice = f"at most {MAX_COLUMNS} characters; break the line"
            yield Finding(path, number, "line-length", f"{len(line)} characters", advice)


def check_file(path: Path) -> list[Finding]:
    """Return the places in a file that break a rule.

    Args:
        path: a Markdown, Python or YAML file of the repository.

    Returns:
        Findings by line.
    """
    findings = list(phrase_findings(read_prose(path)))
    if path.suffix == ".md":
        findings += long_lines(str(path.relative_to(ROOT)), path.read_text())
    return sorted(findings, key=lambda finding: finding.line)


def sentences(prose: Prose) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of each sentence of a file.

    Args:
        prose: the sentences of a file.

    Yields:
        Sentences with their code and the line on which they begin, except the shortest sentences.
    """
    for passage in re.finditer(r"(?:[^|\n]|\n(?!\s*(?:\n|[*-] |\d+\. |\||\w+: |[A-Z]\w+:\n)))+", prose.text):
        start = passage.start()
        ends = [start + match.end() for match in re.finditer(r"[.!?](?=\s+[A-Z])", passage[0])]
        for end in [*ends, passage.end()]:
            sentence = " ".join(prose.shown[start:end].split())
            if len(re.findall(r"[A-Za-z]{2,}", _mask_code(sentence))) >= MIN_SENTENCE_WORDS:
                first = start + len(prose.shown[start:end]) - len(prose.shown[start:end].lstrip())
                yield prose.text.count("\n", 0, first) + 1, sentence
            start = end


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def check(
    paths: Annotated[list[Path] | None, typer.Argument(help="Files to check. Default: all.")] = None,
) -> None:
    """Print findings, and their number by file; exit code 1 if there are any."""
    files = [path.resolve() for path in paths] if paths else [*markdown_files(), *python_files()]
    counts: Counter[str] = Counter()
    for path in files:
        for finding in check_file(path):
            counts[finding.path] += 1
            print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.phrase!r}: {finding.advice}")
    if counts:
        table = Table("file", "findings")
        for name, count in counts.most_common():
            table.add_row(name, str(count))
        Console(width=120, highlight=False).print(table)
    print(f"{counts.total()} findings in {len(files)} files.")
    raise typer.Exit(1 if counts else 0)


@app.command()
def sample(
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 0,
    count: Annotated[int, typer.Option(help="Number of sentences.", min=1)] = 60,
    paths: Annotated[list[Path] | None, typer.Argument(help="Files to choose from. Default: all.")] = None,
) -> None:
    """Print sentences of documents, docstrings and messages at random: rewrite each that you would not say."""
    files = [path.resolve() for path in paths] if paths else [*markdown_files(), *python_files()]
    everything = [(prose.path, *place) for prose in map(read_prose, files) for place in sentences(prose)]
    for path, line, sentence in random.Random(seed).sample(everything, min(count, len(everything))):
        print(f"{path}:{line}: {sentence}")


if __name__ == "__main__":
    app()
