# SPDX-License-Identifier: Apache-2.0
"""The rules of ``benchmarks/prose_rules.yaml`` report exactly what they should, and all files follow them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import prose

RULES = prose.read_rules()
FILES = [*prose.markdown_files(), *prose.python_files()]


def rules_broken(source: str, name: str = "page.md") -> list[str]:
    text = prose.READERS[Path(name).suffix](name, source)
    return [finding.rule for finding in prose.phrase_findings(text)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_reports_its_bad_sentence_and_leaves_its_good_one(rule: prose.Rule) -> None:
    assert rule.name in rules_broken(f"{rule.catches}\n")
    assert rule.name not in rules_broken(f"{rule.passes}\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(prose.ROOT)))
def test_files_keep_the_rules(path: Path) -> None:
    assert prose.check_file(path) == []


def test_a_phrase_is_reported_at_its_line_also_across_lines_and_not_across_paragraphs() -> None:
    source = "# Title\n\nRows go\nsparse here.\n\nRows go\n\nsparse here.\n"
    (finding,) = prose.phrase_findings(prose.markdown_prose("page.md", source))
    assert (finding.path, finding.line, finding.rule, finding.phrase) == ("page.md", 3, "go-sparse", "go sparse")
    assert finding.advice == "one term for one thing; write run sparse, or run dense"


def test_code_tables_from_code_and_addresses_are_no_prose() -> None:
    hidden = (
        "Use `beside` and [this](beside.md).\n\n    beside\n\n```\nbeside\n```\n\n"
        "<!-- settings:begin x -->\nbeside\n<!-- settings:end -->\n"
    )
    assert rules_broken(hidden) == []
    assert rules_broken(hidden + "\n| beside |\n\n* beside\n") == ["beside", "beside"]


def test_docstrings_comments_and_messages_are_prose_and_other_strings_are_not() -> None:
    source = '''"""A module beside others."""
x = "beside"  # a comment beside it
raise ValueError(f"{x} is put beside "
                 "other things beside it")
y = f("rows go", "sparse at once")
'''
    assert rules_broken(source, "module.py") == ["beside"] * 4


def test_comments_and_texts_of_alerts_are_prose() -> None:
    source = "# A comment beside it.\nexpr: beside\ndescription: It is beside {{ $labels.beside }}.\n"
    assert rules_broken(source, "alerts.yml") == ["beside", "beside"]


def test_only_prose_outside_of_tables_and_code_is_limited_to_100_columns() -> None:
    words = "word " * 25
    source = f"{words}\n\n| {words} |\n| --- |\n\n    {words}\n\n```\n{words}\n```\n\n* {words}\n{'x' * 99} y\n"
    assert [finding.line for finding in prose.long_lines("page.md", source)] == [1, 12, 13]


def test_sentences_are_whole_have_their_line_and_depend_on_the_seed_only() -> None:
    text = prose.markdown_prose(
        "page.md", "# A title\n\nThe `first` sentence is\nhere. The second sentence is here too.\n"
    )
    assert list(prose.sentences(text)) == [
        (3, "The `first` sentence is here."),
        (4, "The second sentence is here too."),
    ]
    page = str(prose.ROOT / "CONTRIBUTING.md")
    outputs = [CliRunner().invoke(prose.app, ["sample", "--seed", seed, "--count", "5", page]).output for seed in "112"]
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[0].count("CONTRIBUTING.md:") == 5


def test_a_finding_fails_the_check_in_documents_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Rows go sparse.\n")
    (tmp_path / "module.py").write_text('"""A module beside others."""\n')
    failing = CliRunner().invoke(prose.app, ["check", str(tmp_path / "page.md")])
    assert failing.exit_code == 1
    assert "page.md:1: go-sparse: 'go sparse'" in failing.output
    source = CliRunner().invoke(prose.app, ["check", str(tmp_path / "module.py")])
    assert source.exit_code == 1
    assert "module.py:1: beside: 'beside'" in source.output
    assert "1 findings in 1 files." in source.output
    (tmp_path / "module.py").write_text('"""A module next to others."""\n')
    assert CliRunner().invoke(prose.app, ["check", str(tmp_path / "module.py")]).exit_code == 0
