# SPDX-License-Identifier: Apache-2.0
"""Programs for traffic: ratios with errors, conversations and slopes."""

from pathlib import Path

import pytest

from benchmarks.traffic import ratio_with_error
from benchmarks.turns import Turns, slope
from vllm_sparse_backend.demo.model import BUNDLED


def test_errors_of_ratios() -> None:
    """Servers that differ by the same factor in each session have no error, however much sessions differ."""
    stock = [[1.0, 2.0], [30.0], [5.0]]
    ours = [[second / 2 for second in session] for session in stock]
    assert ratio_with_error(stock, ours, sum) == (2, 0)


def test_conversations(tmp_path: Path) -> None:
    """Fresh questions ask for facts of their turn, old questions for facts before it."""
    text = tmp_path / "text.txt"
    text.write_text("The old ship left the harbor in the morning. " * 400)
    turns = Turns(
        model=BUNDLED, text=text, settings=[], conversations=2, turns=3, start=600, growth=400, questions=6
    )  # fmt: skip
    for conversation in turns.draw():
        begin = conversation.turns[0].end
        for turn in conversation.turns[1:]:
            before, part = (" ".join(map(str, conversation.token_ids[a:b])) for a, b in ((0, begin), (begin, turn.end)))
            answers = [" ".join(map(str, question.answer_ids)) for question in turn.questions]
            assert [answer in part for answer in answers] == [True] * 3 + [False] * 3
            assert [answer in before for answer in answers] == [False] * 3 + [True] * 3
            assert all(begin < place < turn.end for place in turn.places)
            begin = turn.end
        assert begin == len(conversation.token_ids) == 600 + 3 * 400


def test_slope() -> None:
    change, error = slope([[0.0, 1.0, 2.0], [5.0, 8.0, 11.0]])
    assert (change, error) == (pytest.approx(2), pytest.approx(1))
