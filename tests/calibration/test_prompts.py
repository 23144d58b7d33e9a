# SPDX-License-Identifier: Apache-2.0
"""Prompts that are made from a text, and prompts from the operator's files."""

import json
import re
from types import SimpleNamespace

import pytest

from vllm_sparse_backend.calibration import prompts
from vllm_sparse_backend.calibration.capture import load_tokenizer
from vllm_sparse_backend.calibration.prompts import make_prompts, read_prompts, sha256_of
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.demo.model import BUNDLED as NEEDLE

pytest.importorskip("transformers", reason="tokenizers are read with transformers, which comes with vLLM")


@pytest.fixture(scope="module")
def made(text) -> list[list[int]]:
    return make_prompts(NEEDLE, text, 2048, 2, seed=3)


def test_prompts_are_the_same_for_the_same_seed(text, made):
    assert [len(ids) for ids in made] == [2048, 2048]
    assert made[0] != made[1]
    assert make_prompts(NEEDLE, text, 2048, 2, seed=3) == made
    assert sha256_of(make_prompts(NEEDLE, text, 2048, 2, seed=4)) != sha256_of(made)


def test_questions_stand_inside_with_their_answers(made):
    tokenizer = load_tokenizer(NEEDLE)
    for ids in made:
        assert ids[0] == tokenizer.bos_token_id
        whole = tokenizer.decode(ids)
        facts = dict(re.findall(r"# The magic number of ([a-z ]+) is (\d{7})\.", whole))
        answered = re.findall(r"# Question: what is the magic number of ([a-z ]+)\? Answer: (\d{7})\.", whole)
        assert len(facts) == len(answered) == 4
        for name, value in answered:
            assert facts[name] == value
            assert whole.index(f"number of {name} is") < whole.index(f"number of {name}?")
        hops = dict(re.findall(r"# ([a-z ]+) has the number of ([a-z ]+)\.", whole))
        first = dict(re.findall(r"# The number of ([a-z ]+) is (\d{7})\.", whole))
        handed = re.findall(r"# Question: what is the number of ([a-z ]+)\? Answer: (\d{7})\.", whole)
        assert len(handed) == 2
        for name, value in handed:
            for _ in range(3):
                name = hops[name]
            assert first[name] == value


def test_passages_come_twice(text, made):
    """Each line of this text has a unique number."""
    for ids in made:
        pieces = [tuple(ids[start : start + 14]) for start in range(len(ids) - 14)]
        assert len(set(pieces)) < len(pieces) - 14


def test_the_two_parts_have_no_text_in_common(text):
    tokenizer = load_tokenizer(NEEDLE)
    parts = [tokenizer.decode(make_prompts(NEEDLE, text, 1024, 2, 0, part)[1]) for part in (0, 1)]
    files = [set(re.findall(r"def part_(\d)_", part)) for part in parts]
    assert files[0]
    assert files[1]
    assert not files[0] & files[1]
    with pytest.raises(ConfigurationError, match="expected at least 40,000,000; name a larger"):
        make_prompts(NEEDLE, text, 20_000_000, 1, 0)


def test_files_of_prompts_and_chats(tmp_path):
    tokenizer = load_tokenizer(NEEDLE)
    (tmp_path / "a.txt").write_text("one two three " * 50)
    lines = [{"text": "four"}, {"prompt": "fi\u2028ve"}, {"messages": [{"role": "user", "content": "six"}]}]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    read = read_prompts(NEEDLE, [tmp_path / "a.txt", tmp_path / "b.jsonl"], 64)
    assert [len(ids) for ids in read[:1]] == [64]
    assert all(ids[0] == tokenizer.bos_token_id for ids in read)
    assert [tokenizer.decode(ids[1:]) for ids in read[1:3]] == ["four", "fi\u2028ve"]
    assert "six" in tokenizer.decode(read[3])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fine\n{", r"b\.jsonl:2: its prompt cannot be read: Expecting"),
        ("fine\n[1]", r"b\.jsonl:2: .*given \[1\], expected an object with messages"),
        ('fine\n{"text": 3}', r"b\.jsonl:2: .*expected an object with messages"),
        ('fine\n{"messages": [3]}', r"b\.jsonl:2: .*expected an object with messages \(each with role"),
        ("\n \n", r"b\.jsonl: given no prompt, expected at least one"),
    ],
)
def test_malformed_lines_are_refused_with_their_place(tmp_path, text, problem):
    """Lines are checked before the run's folder stores them."""
    path = tmp_path / "b.jsonl"
    with pytest.raises(ConfigurationError, match=r"b\.jsonl: cannot be read"):
        read_prompts(NEEDLE, [path], 64)
    path.write_text(text.replace("fine", '{"text": "fine"}'))
    with pytest.raises(ConfigurationError, match=problem):
        read_prompts(NEEDLE, [path], 64)


class ByteTokenizer:
    """Tokens of single bytes, as in some models; more than one for each byte, as if merges were lost."""

    bos_token_id = None

    def __init__(self, tokens_a_byte: int = 1) -> None:
        self.tokens_a_byte = tokens_a_byte

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[byte for byte in text.encode() for _ in range(self.tokens_a_byte)])


@pytest.mark.parametrize(("num_tokens", "tokens_a_byte"), [(2048, 1), (8192, 1), (16384, 1), (16384, 6)])
def test_a_tokenizer_of_many_tokens_gets_fewer_lines(tmp_path, num_tokens, tokens_a_byte, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(4000)))
    monkeypatch.setattr(prompts, "load_tokenizer", lambda model: ByteTokenizer(tokens_a_byte))
    (ids,) = make_prompts(NEEDLE, text, num_tokens, 1, seed=0)
    assert len(ids) == num_tokens
    texts = [bytes(ids[start::tokens_a_byte]).decode(errors="replace") for start in range(tokens_a_byte)]
    for start in (
        "# The magic number of",
        "# The number of",
        "# Question: what is the magic",
        "# Question: what is the n",
    ):
        assert any(start in whole for whole in texts)


def test_prompts_too_short_for_their_lines_are_refused_with_what_to_do(text, monkeypatch):
    monkeypatch.setattr(prompts, "load_tokenizer", lambda model: ByteTokenizer())
    with pytest.raises(ConfigurationError) as caught:
        make_prompts(NEEDLE, text, 512, 1, seed=0)
    said = str(caught.value)
    assert re.search(r"generated prompt: given 512 tokens, expected at least [\d,]+ with this tokenizer", said), said
    needed = int(re.search(r"at least ([\d,]+)", said)[1].replace(",", ""))
    make_prompts(NEEDLE, text, 2 * needed, 1, seed=0)
