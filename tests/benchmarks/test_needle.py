# SPDX-License-Identifier: Apache-2.0
"""Texts and prompts of the needle model whose lines do not fit are refused, not cut."""

import re

import pytest
import torch

from vllm_sparse_backend.demo.model import BUNDLED

pytest.importorskip("tokenizers", reason="the needle model's tokenizer comes with vLLM")

from tokenizers import Tokenizer

from benchmarks.needle.data import Composer
from benchmarks.needle.judge import Judge


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def test_a_text_too_short_for_its_lines_is_refused(tokenizer):
    composer = Composer(tokenizer, "cpu", seed=0)
    with pytest.raises(ValueError, match=r"a text: given 32 tokens, expected at least (\d+), because its lines take"):
        composer.compose(2, 32, aliases=False)
    assert composer.compose(2, 128, aliases=True).ids.shape == (2, 128)


def test_a_prompt_too_short_for_its_lines_is_refused(tokenizer):
    judge = Judge(tokenizer, lambda ids: torch.zeros(len(ids), dtype=torch.long), seed=0)
    with pytest.raises(ValueError, match=r"a prompt: given 64 tokens, expected at least (\d+) for its lines") as caught:
        judge.at_end(64, 1)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert judge.at_end(least, 1)["tokens"] == least
