# SPDX-License-Identifier: Apache-2.0
"""The repository follows the rules of ``benchmarks.readability``, and each check reports what it should."""

import ast
from collections.abc import Callable, Iterator

import pytest
import typer

from benchmarks import readability
from vllm_sparse_backend.cli import app

SOURCE = '''
import vllm.config
from vllm import LLM
from vllm_sparse_backend import plugin
import tests.cli.test_doctor
from tests.cli.test_commands import COMMANDS
from tests.server import scenario, test_soak
from .test_documents import ROOT
from vllm_sparse_backend.evaluation import test_server


@triton.jit
def kernel(x, sizes, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16):
    return x.shape[0] + sizes[1] + x[0]


def nine(a, b, c, d, e, f, g, h, i):
    """No Args here."""
    sizes[0]
    for one in a:
        given = one


def documented(a: int) -> int:
    """Return a.

    Args:
        a: a number.

    Returns:
        The number.
    """


def returns_nothing() -> None:
    """Do it."""


class Thing:
    @property
    def size(self) -> int:
        """The size."""

    def method(self, own, ours):
        return lambda told: told


def raises(a) -> int:
    """Return a number.

    Args:
        b: a parameter that is gone.

    Raises:
        TypeError: never.
    """
    raise ValueError("x")


def _private(rest): ...


@app.command()
def serve(a, b, c, d, e, f, g, h, i, j): ...
'''

CASES = [
    (readability.numeric_indices, ["sizes[1]", "x[0]"]),
    (readability.long_signatures, ["kernel has 16 parameters, at most 15", "nine has 9 parameters, at most 8"]),
    (readability.pronoun_names, ["given", "one", "own", "rest", "told"]),
    (readability.vague_names, ["ours"]),
    (readability.vllm_imports, ["from vllm import LLM", "import vllm.config"]),
    (
        readability.imported_tests,
        ["test_documents", "tests.cli.test_commands", "tests.cli.test_doctor", "tests.server.test_soak"],
    ),
    (
        readability.incomplete_docstrings,
        [
            "Thing.method: no docstring",
            "Thing: no docstring",
            "kernel: no docstring",
            "nine: no Args a, no Args b, no Args c, no Args d, no Args e, no Args f, no Args g, no Args h, no Args i",
            "raises: no Args a, no Returns, no Raises ValueError",
            "serve: no docstring",
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("check", "expected"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_each_check_sees_what_breaks_its_rule(
    check: Callable[[ast.Module], Iterator[tuple[int, str]]], expected: list[str]
) -> None:
    assert sorted(what for _, what in check(ast.parse(SOURCE))) == expected


@pytest.mark.parametrize("name", readability.CODE_CHECKS)
def test_the_code_keeps_the_rule(name: str) -> None:
    assert readability.CODE_CHECKS[name]() == []


def test_texts_for_users_have_the_fields_words() -> None:
    command = typer.main.get_command(app)
    assert readability.jargon(readability.user_texts(command)) == []
    assert readability.jargon({"a": "It ends sooner."}) == [readability.Violation("a", "sooner")]


def test_the_command_line_stays_small() -> None:
    counts = list(readability.count_options(typer.main.get_command(app)))
    assert len(counts) <= readability.MAX_COMMANDS
    assert sum(counts) <= readability.MAX_OPTIONS


README = """\
# Title, 1

Text with 2,048 tokens and 1.5 times, on an H200 with fp8 and FlashAttention-3.
[A link](docs/page_7.md#8) <!-- 9 -->

## Speed

| tokens | s |
| --- | --- |
| 10 | 11 |

One H200, vLLM 0.33.

## Configuration

| setting | default |
| --- | --- |
| `x` | 12 |
"""


def test_numbers_of_a_readme_are_counted_outside_its_tables_of_figures() -> None:
    assert readability.numbers_outside_figure_tables(README) == ["1", "2,048", "1.5", "0.33", "12"]
    assert readability.count_words("| a | b |\n\nTwo words.") == 7


def test_the_readme_stays_short() -> None:
    text = (readability.ROOT / "README.md").read_text()
    assert readability.count_words(text) <= readability.MAX_README_WORDS
    assert len(readability.numbers_outside_figure_tables(text)) <= readability.MAX_README_NUMBERS
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert set(readability.FIGURE_TABLES) <= set(titles)


PAGES_OF_FIGURES = ["README.md", "docs/quality.md", "docs/performance.md", "docs/choosing_a_setting.md"]


@pytest.mark.parametrize("page", PAGES_OF_FIGURES)
def test_a_cell_has_one_number(page: str) -> None:
    text = (readability.ROOT / page).read_text()
    assert text.count("\n| --- ") >= 1
    assert readability.cells_with_several_numbers(text) == []


def test_cells_with_several_numbers_are_seen() -> None:
    table = "1 and 2\n| a | 1.00, 1.001 |\n| `p 1 2` | 0.99 ± 0.01 |\n| [3](4.md) | Llama-3.1-8B, 32,768 |"
    assert readability.cells_with_several_numbers(table) == ["1.00, 1.001", "0.99 ± 0.01"]
