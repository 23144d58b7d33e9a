# SPDX-License-Identifier: Apache-2.0
"""Prompts with questions and their answers, their source texts, and their scores."""

import math
import random
from pathlib import Path

import pytest

from tests.helpers.stub_server import FACT, QUESTION, Words, entry
from vllm_sparse_backend.evaluation import answers
from vllm_sparse_backend.evaluation.answers import Answer, Line, Prompt, TokenScores, build_prompt, standard_error
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.prompt_texts import prose, read_prompt_text
from vllm_sparse_backend.evaluation.report import BenchError


def build(encode: Words, num_tokens: int = 3000, num_facts: int = 9, seed: int = 0) -> Prompt:
    text = encode(prose(num_tokens, 5))
    return build_prompt(encode, [0], text, num_tokens, num_facts, answers.Templates(), random.Random(seed))


@pytest.mark.parametrize(
    "encode", [Words(), Words(3), Words(2, spaced=True), Words(7)], ids=["1", "3", "2 spaced", "7"]
)
def test_answers_are_where_they_are_said_to_be(encode: Words) -> None:
    prompt = build(encode)
    assert len(prompt.token_ids) == 3000
    assert prompt.token_ids[0] == 0
    text = encode.decode(prompt.token_ids)
    facts, questions = list(FACT.finditer(text)), list(QUESTION.finditer(text))
    places = {match[1]: (match.start(2), match[2]) for match in facts}
    assert len(places) == len(facts) == len(questions) == len(prompt.answers) == 9
    for match in questions:
        assert places[match[1]][1] == match[2]
        assert places[match[1]][0] < match.start()
    for answer in prompt.answers:
        before = encode.decode(prompt.token_ids[: answer.begin])
        value = encode.decode(prompt.token_ids[answer.begin : answer.end])
        assert value.strip() == answer.value == places[answer.name][1]
        assert before.endswith(f"of {answer.name}? Answer:{' ' if value == answer.value else ''}")
        fact = encode.decode(prompt.token_ids[: answer.fact_at])
        assert len(fact) + len(value) - len(answer.value) == places[answer.name][0]
        assert answer.distance > 0


class Tokenizer(Endpoint):
    """An endpoint that only tokenizes; ``added`` precedes a text if special tokens are requested."""

    def __init__(self, added: list[int], root: str | None = None) -> None:
        super().__init__("x", "http://x", "m", root)
        vars(self).update(added=added, encode=Words())

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        return [*(self.added if special else []), *self.encode(text)]


def test_prompts_start_as_the_tokenizer_or_the_models_files_say(tmp_path: Path) -> None:
    assert Tokenizer([7]).first_tokens() == [7]
    assert Tokenizer([]).first_tokens() == []
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    assert Tokenizer([], str(tmp_path)).first_tokens() == [0]


def test_lines_that_do_not_fit_and_short_texts_are_refused() -> None:
    encode = Words()
    with pytest.raises(
        BenchError, match=r"50 facts .* of a prompt's 3,000 tokens, expected at most half; ask for fewer"
    ):
        build(encode, num_facts=50)
    with pytest.raises(BenchError, match="text: given 100 tokens, expected at least"):
        build_prompt(encode, [0], [1] * 100, 3000, 9, answers.Templates(), random.Random(0))
    with pytest.raises(BenchError, match="the same tokens"):
        Line.of(lambda text: [1, 2, 3], "{name} {value}", "a", "1234567")


PROMPT = Prompt([5, 6, 7, 8, 9, 10], (Answer("a", "12", 1, 3, 5),))


def test_scores_are_ranks_of_answers_and_the_likelihood_of_the_rest() -> None:
    returned = [None, entry(6, -1.0, 4), entry(7, -2.0), entry(8, -0.01), entry(9, -3.0, 2), entry(10, -0.25)]
    scores = TokenScores.of(PROMPT.token_ids, returned)
    assert scores.of_answers(PROMPT) == [[1, 2]]
    assert (PROMPT.text_places, PROMPT.answer_places) == ([1, 2, 5], [3, 4])
    assert [scores.logprobs[place] for place in PROMPT.text_places] == [-1, -2, -0.25]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (3, entry(77), "no entry for token 8 at position 3"),
        (1, None, "no entry for token 6 at position 1"),
        (4, entry(9, math.nan), "log-probability nan at position 4"),
        (2, entry(7, 0.5), "log-probability 0.5 at position 2"),
        (4, entry(9, rank=0), "rank 0 at position 4"),
    ],
)
def test_what_is_missing_or_no_number_is_an_error_and_no_answer(place: int, value: object, said: str) -> None:
    returned = [None, *(entry(token) for token in PROMPT.token_ids[1:])]
    assert TokenScores.of(PROMPT.token_ids, returned).of_answers(PROMPT) == [[1, 1]]
    returned[place] = value
    with pytest.raises(RequestError, match=said):
        TokenScores.of(PROMPT.token_ids, returned)


def test_the_standard_error_knows_that_a_prompts_answers_fall_together() -> None:
    binomial = math.sqrt(0.75 * 0.25 / 24)
    assert standard_error([[True] * 18 + [False] * 6]) == pytest.approx(binomial)
    assert standard_error([[True] * 9 + [False] * 3] * 2) == pytest.approx(binomial)
    # Means of two prompts, 0.5 and 1: their deviation is 0.354, divided by the root of two.
    assert standard_error([[True, False] * 6, [True] * 12]) == pytest.approx(0.25)
    assert math.isnan(standard_error([]))


def test_texts_are_files_or_folders(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.md").write_text("# b\n")
    (tmp_path / "c.txt").write_text("left out")
    assert sorted(read_prompt_text(tmp_path, 1000).split()) == ["#", "1", "=", "b", "x"]
    assert read_prompt_text(tmp_path / "c.txt", 4) == "left"
    with pytest.raises(BenchError, match="--text"):
        read_prompt_text(tmp_path / "none", 10)
