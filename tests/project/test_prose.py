# SPDX-License-Identifier: Apache-2.0
"""Documents and sources avoid phrases that readers had to read twice."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PHRASES = {
    r"beside": "next to, in, with",
    r"reckon(s|ed|ing)?": "compute, estimate",
    r"whoever|whosoever": "name the caller, user or part",
    r"such (that|as) (are|is|have)": "those that",
    r"none of whose": "without any",
    r"of nobody": "of no request",
    r"(rows?|layers?|heads?) go(es)? (sparse|dense)": "run sparse, run dense",
    r"is told|are told": "receives, knows",
    r"at once and": "immediately, and",
    r"by turns": "alternately",
    r"in turns": "alternately",
    r"times sooner": "times faster",
    r"in company": "in a batch",
    r"a mistake of ours": "a bug",
    r"for lack of": "without",
    r"lest": "so that not",
    r"thereof|therein|whereof": "of it, in it",
    r"as yet": "so far",
}


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split() if (ROOT / name).is_file()]


@pytest.mark.parametrize("phrase", PHRASES)
def test_files_avoid_the_phrase(phrase: str) -> None:
    pattern = re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE)
    files = tracked("*.md", "vllm_sparse_backend/*.py", "kernels/*.py")
    places = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert places == [], f"write {PHRASES[phrase]} instead"
