# SPDX-License-Identifier: Apache-2.0
"""Names in documents exist: commands with their options, programs of the lab, targets of make, files, links."""

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import settings_tables
from tests.helpers.external_tools import ROOT
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.config.metrics import METRICS, PREFIX, WORKER_METHOD
from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_kernels.methods import METHODS

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs/research").glob("*.md"),
    *(ROOT / "deploy").rglob("*.md"),
    *(ROOT / name / "README.md" for name in ("tests", "profiles", "docs/results", "docs/reports")),
]
AS_IT_WAS_THEN = ("CHANGELOG.md", "docs/results/README.md")
"""Documents about earlier versions, or about figures from their commands."""
NAMES = [name for name in (str(path.relative_to(ROOT)) for path in DOCUMENTS) if name not in AS_IT_WAS_THEN]


def code_matches(name: str, pattern: str) -> list[tuple[str, ...]]:
    """Return text set as code, on a line or in a block; a command on several lines counts as a single match."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    code = re.findall(r"`+([^`\n]+)`+", text)
    code += re.findall(r"^(?: {4}|\$ |(?=sparse-prefill|python|make))(.*)$", text, re.MULTILINE)
    return [match for line in code for match in re.findall(pattern, line)]


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Return the options of each command and of each group of commands, by path."""
    yield path, {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))
LEAVES = {path for path in COMMANDS if not any(other[:-1] == path for other in COMMANDS if other)}


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_options(name: str) -> None:
    for words, arguments in code_matches(name, r"(?:^|[\s/(])sparse-prefill((?: [a-z]+)+)([^|;&]*)"):
        path = tuple(words.split())
        if path[:1] not in COMMANDS:
            continue  # a line of a log
        while path not in COMMANDS:
            path = path[:-1]
        assert path in LEAVES or path == tuple(words.split()), (name, words)
        unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", arguments)  # quoted text may belong to another program
        assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", unquoted)) <= COMMANDS[path], (name, words, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_programs_and_targets(name: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for module in code_matches(name, r"python -m (benchmarks[\w.]+)"):
        assert importlib.util.find_spec(str(module)) is not None, (name, module)
    for target in code_matches(name, r"^make ([a-z-]+)"):
        assert target in targets, (name, target)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("tests/README.md", "tests"),
        ("CONTRIBUTING.md", "."),
        ("docs/how_it_works.md", "vllm_sparse_backend"),
        ("docs/compatibility.md", "vllm_sparse_backend"),
    ],
)
def test_files(name: str, folder: str) -> None:
    """Paths are relative to the document's folder or to the repository."""
    files = [Path(str(match)) for match in code_matches(name, r"^((?:\w+/)+\w+\.\w+)$")]
    assert files
    roots = (ROOT / folder, ROOT)
    assert [str(path) for path in files if not any((root / path).is_file() for root in roots)] == []


def modules_in_the_map(text: str) -> list[str]:
    """Return the path of each module that a line of CONTRIBUTING.md's map describes, repeated where lines repeat it."""
    modules, folder = [], ""
    for line in text.partition("\n## Code map\n")[2].splitlines():
        if heading := re.match(r"### `(\S+)/`: \S", line):
            folder = heading[1]
        elif entry := re.match(r"- `(\w+\.py)`: \S", line):
            modules.append(f"{folder}/{entry[1]}")
    return modules


def test_servers_import_neither_calibration_nor_evaluation() -> None:
    """The map says so."""
    imports = re.compile(r"vllm_sparse_backend\.(calibration|evaluation)|vllm_sparse_backend import .*(calibra|evalua)")
    files = [*(ROOT / "vllm_sparse_backend/serving").rglob("*.py")]
    assert len(files) > 20
    assert not [path.name for path in files if imports.search(path.read_text(encoding="utf-8"))]


def test_the_map_names_every_module_once() -> None:
    """Modules are listed by folder; the heading describes ``__init__.py``."""
    packages = ("vllm_sparse_backend", "kernels/vllm_sparse_kernels")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert sorted(modules_in_the_map(text)) == sorted(str(path.relative_to(ROOT)) for path in paths)
    folders = {str(path.parent.relative_to(ROOT)) for path in paths}
    assert sorted(re.findall(r"^### `(\S+)/`: \S", text, re.MULTILINE)) == sorted(folders)


FOR_REQUESTS = {FIELD}
"""Names with the same prefix that are not metrics: keys of requests."""
METHODS_OF_WORKERS = {WORKER_METHOD}
OF_TARGETS = {"job", "instance", "le"}
"""Labels that Prometheus adds, and the labels of histograms' buckets."""
MONITORING = [*(ROOT / "deploy/monitoring").rglob("*.json"), *(ROOT / "deploy/monitoring").glob("*.yml")]
METRIC_TEXTS = [ROOT / name for name in NAMES] + MONITORING
SELECTOR = re.compile(r"\b(sparse_prefill_\w+)\{([^}]*)\}")
MENTION = re.compile(r"(?<![\w./])sparse_prefill_\w+")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([\w, ]+)\)")
SAMPLES = {metric.sample: metric for metric in METRICS.values()}


def unescaped(path: Path) -> str:
    """Return a file's text with quotes as in queries."""
    return path.read_text().replace('\\"', '"')


def unknown_metrics(text: str) -> set[str]:
    """Return names that look like our metrics but do not exist."""
    return set(MENTION.findall(text)) - {*SAMPLES, *FOR_REQUESTS, *METHODS_OF_WORKERS, PREFIX}


def unknown_labels(text: str) -> set[tuple[str, str]]:
    """Return (metric, label) of selectors that no sample of ours has, and ("", label) of groupings that no metric
    has."""
    unknown = set()
    for name, selector in SELECTOR.findall(text):
        known = {*SAMPLES[name].all_labels, *OF_TARGETS} if name in SAMPLES else set()
        unknown |= {(name, label) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector) if label not in known}
    known = {label for metric in METRICS.values() for label in metric.all_labels} | OF_TARGETS
    for labels in GROUPING.findall(text):
        if PREFIX in text:
            unknown |= {("", label) for label in re.split(r"[,\s]+", labels.strip()) if label not in known}
    return unknown


@pytest.mark.parametrize("path", METRIC_TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_metrics_and_their_labels(path: Path) -> None:
    """In prose and queries of documents, alerts and the dashboard."""
    text = unescaped(path)
    assert unknown_metrics(text) == set()
    if path in MONITORING:
        assert unknown_labels(text) == set()
    else:
        code = "\n".join(str(line) for line in code_matches(str(path.relative_to(ROOT)), r"(.+)"))
        assert unknown_labels(code) == set()


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    for target, anchor in LINK.findall(re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)):
        if "://" in target:
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), (path.name, target)
        assert not anchor or anchor in anchors(linked), (path.name, target, anchor)


@pytest.mark.parametrize("document", settings_tables.DOCUMENTS)
def test_tables_of_settings_are_current(document: str) -> None:
    text = (ROOT / document).read_text()
    assert settings_tables.REGION.search(text), document
    assert settings_tables.fill(text, document) == text, "run python -m benchmarks.settings_tables"


def test_the_table_of_methods_is_complete() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs/settings.md").read_text().split("Keys that a query attends to")[1], re.M
    )
    assert set(rows) >= {spec.name for spec in METHODS.builtin_specs}
