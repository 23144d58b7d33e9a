# SPDX-License-Identifier: Apache-2.0
"""Prompts with questions and their answers, and their scores."""

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.stub_server import Words, entry
from vllm_sparse_backend.evaluation.answer_prompts import Prompt, Statement, build_prompt
from vllm_sparse_backend.evaluation.answer_scores import PromptScores
from vllm_sparse_backend.evaluation.answer_tables import error_of_share
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.tasks import HOPS, TASKS, VALUES, facts
from vllm_sparse_backend.prompts.texts import prose


def build(encode: Words, num_tokens: int = 3000, num_facts: int = 9, seed: int = 0) -> Prompt:
    text = encode(prose(num_tokens, 5))
    rng = random.Random(seed)
    return build_prompt(encode, [0], text, num_tokens, facts(rng, num_facts, num_tokens).threads, rng)


def variable_chains(text: str) -> list[list[str]]:
    """Return the variables of each value, in order of their assignment."""
    value_of: dict[str, str] = {}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w{5})\n", text):
        value_of[name] = value_of.get(source, source)
    asked = re.findall(r"which variables have the value (\d{5})", text)
    return [[name for name, value in value_of.items() if value == wanted] for wanted in asked]


def numbers_of_names(text: str) -> list[list[str]]:
    """Return the numbers that precede each question."""
    stated: dict[str, list[str]] = {}
    answers = []
    line = r"magic numbers? of ([a-z ]+) is (\d{7})\.|Question: what (?:is|are) the magic numbers? of ([a-z ]+)[?,]"
    for name, number, asked in re.findall(line, text):
        answers += [stated[asked]] if asked else []
        stated.setdefault(name, []).append(number)
    return answers


def frequent_in_list(text: str) -> list[list[str]]:
    words = text.partition("# Question")[0].removeprefix("<s>").split()
    num_asked = int(re.findall(r"which (\d+) words are the most frequent", text)[0])
    frequent = {word for word, _ in Counter(words).most_common(num_asked)}
    return [[word for word in dict.fromkeys(words) if word in frequent]]


@pytest.mark.parametrize(
    ("task", "expected", "num_questions"),
    [
        ("facts", numbers_of_names, 24),
        ("multi_key", numbers_of_names, 24),
        ("multi_value", numbers_of_names, 24 // VALUES),
        ("variables", variable_chains, 24 // (HOPS + 1)),
        ("common_words", frequent_in_list, 1),
        ("frequent_words", frequent_in_list, 1),
    ],
)
@pytest.mark.parametrize(
    "encode", [Words(), Words(3), Words(2, spaced=True), Words(7)], ids=["1", "3", "2 spaced", "7"]
)
def test_answers_of_tasks_follow_from_the_text_before(
    encode: Words, task: str, expected: Callable[[str], list[list[str]]], num_questions: int
) -> None:
    rng, num_tokens = random.Random(1), 6000
    questions = TASKS[task](rng, 24, num_tokens)
    text_ids = encode(questions.text or prose(num_tokens, 5))
    prompt = build_prompt(encode, [0], text_ids, num_tokens, questions.threads, rng)
    assert (len(prompt.token_ids), prompt.token_ids[0]) == (num_tokens, 0)
    assert [prompt.token_ids[i] for i in prompt.text_places] == text_ids[: len(prompt.text_places)]
    answers = expected(encode.decode(prompt.token_ids))
    assert len(answers) == num_questions
    found = [encode.decode(prompt.token_ids[begin:end]).strip() for begin, end in sorted(prompt.answers)]
    assert found == [answer for of_question in answers for answer in of_question]


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
        BenchError, match=r"questions .* of a prompt's 3,000 tokens, expected at most half; ask for fewer"
    ):
        build(encode, num_facts=50)
    with pytest.raises(BenchError, match="text: given 100 tokens, expected at least"):
        build_prompt(encode, [0], [1] * 100, 3000, [], random.Random(0))
    with pytest.raises(BenchError, match="the same tokens"):
        Statement("a {}", ("1234567",)).encode(lambda text: [1, 2, 3])


PROMPT = Prompt([5, 6, 7, 8, 9, 10], [(3, 5)], [(2, 5)])


def test_scores_are_ranks_of_answers_and_the_likelihood_of_the_rest() -> None:
    returned = [None, entry(6, -1.0, 4), entry(7, -2.0), entry(8, -0.01), entry(9, -3.0, 2), entry(10, -0.25)]
    scores = PromptScores.of(PROMPT, returned, seconds=1)
    assert (scores.ranks, scores.right) == ([[1, 2]], [False])
    assert (PROMPT.text_places, PROMPT.answer_places) == ([1, 5], [3, 4])
    assert (scores.nats, scores.text_tokens) == (1.25, 2)


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
    assert PromptScores.of(PROMPT, returned, seconds=1).ranks == [[1, 1]]
    returned[place] = value
    with pytest.raises(RequestError, match=said):
        PromptScores.of(PROMPT, returned, seconds=1)


def test_the_standard_error_knows_that_a_prompts_answers_fall_together() -> None:
    binomial = math.sqrt(0.75 * 0.25 / 24)
    assert error_of_share([[True] * 18 + [False] * 6]) == pytest.approx(binomial)
    assert error_of_share([[True] * 9 + [False] * 3] * 2) == pytest.approx(binomial)
    # Means of two prompts, 0.5 and 1: their deviation is 0.354, divided by the root of two.
    assert error_of_share([[True, False] * 6, [True] * 12]) == pytest.approx(0.25)
