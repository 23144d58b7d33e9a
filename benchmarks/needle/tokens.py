# SPDX-License-Identifier: Apache-2.0
"""The needle model's tokenizer, and its training lines (facts, aliases, questions) as rows of tokens and slots.

A line is a row of token ids. Ids past the vocabulary are slots: the words of its name, the words of the other name (for
an alias), and the digits of its value. A single gather therefore fills the lines of thousands of names.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers.tiny_models import END, START
from vllm_sparse_backend.evaluation.answers import NAMES, Templates
from vllm_sparse_backend.evaluation.prompt_texts import project_text, prose

VOCAB_SIZE = 2048
NAME_WORDS, DIGITS = 3, 7
NAME, OTHER, VALUE = 0, NAME_WORDS, 2 * NAME_WORDS
"""First slots of a name, of the other name and of a value."""
SLOTS = VALUE + DIGITS

FACT, ALIAS, QUESTION = 0, 1, 2
RESTATED = 3
"""A repeated fact: the easiest answer, which a model learns before it understands questions."""
_TOOL = Templates()
STYLES = (
    # The style of `sparse-prefill eval answers` comes first: most lines have it.
    (_TOOL.fact, "# The magic number of {name} equals that of {other}.", _TOOL.question),
    (
        "The magic number of {name} is {value}.",
        "The magic number of {name} equals that of {other}.",
        "What is the magic number of {name}? It is {value}.",
    ),
    (
        "One of the special magic numbers for {name} is: {value}.",
        "The special magic number for {name} equals that for {other}.",
        "Question: What is the special magic number for {name}? Answer: {value}.",
    ),
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} Answer: {% endif %}"
)


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer, in which every word of the lines and of the prose is one token.

    Digits and line ends are separate tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex("\n"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = "\n".join(line for style in STYLES for line in style)
    lines = re.sub(r" ?\{\w+\}", "", lines)
    words = "\n".join([lines] * 300 + [f" {name}" for name in NAMES] + [prose(20_000, 0)])
    tokenizer.train_from_iterator([words] * 8 + [project_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True)
class Lines:
    """Lines as rows: row ``style * 3 + kind`` of ``tokens`` [rows, longest], with ``lengths`` [rows] tokens."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    digits: torch.Tensor  # [10]: token ids
    names: torch.Tensor  # [NAME_WORDS, 16]: token ids of the words that names are made of
    words: torch.Tensor  # [n]: all tokens that are words, for other names

    @property
    def longest(self) -> list[int]:
        """The most tokens of a line, by kind."""
        return [int(self.lengths[kind::3].max()) for kind in (FACT, ALIAS, QUESTION)]

    @staticmethod
    def of(tokenizer: Any, device: torch.device | str) -> "Lines":
        rows = [_line(tokenizer, text) for style in STYLES for text in style]
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        columns = [list(dict.fromkeys(name.split()[i] for name in NAMES)) for i in range(NAME_WORDS)]
        names = [[_one(tokenizer, f" {word}") for word in column] for column in columns]
        vocabulary = tokenizer.get_vocab()
        words = sorted(i for token, i in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,}", token))
        return Lines(
            padded,
            torch.tensor([len(row) for row in rows], device=device),
            torch.tensor([_one(tokenizer, str(digit)) for digit in range(10)], device=device),
            torch.tensor(names, device=device),
            torch.tensor(words, device=device),
        )


def _one(tokenizer: Any, text: str) -> int:
    ids = encode(tokenizer, text)
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens, expected one")
    return ids[0]


def _line(tokenizer: Any, template: str) -> list[int]:
    slots = {"name": (NAME, NAME_WORDS), "other": (OTHER, NAME_WORDS), "value": (VALUE, DIGITS)}
    row: list[int] = []
    for part in re.split(r"( \{name\}| \{other\}|\{value\})", f"\n{template}\n"):
        if match := re.fullmatch(r" ?\{(\w+)\}", part):
            first, count = slots[match[1]]
            row += range(VOCAB_SIZE + first, VOCAB_SIZE + first + count)
        else:
            row += encode(tokenizer, part)
    return row
