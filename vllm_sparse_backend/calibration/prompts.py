# SPDX-License-Identifier: Apache-2.0
"""Prompts to calibrate on: the operator's own, or generated from a text with questions and answers inserted.

Retrieval heads are active at lookups, where sparse attention loses most. Generated prompts therefore contain *threads*
of three kinds, spread over a text: facts that are stated, and later asked for and answered (as in `eval answers`);
values that pass from name to name before one of the names is asked for (several hops); and passages of another text
that occur twice. Together, threads take about a third of a prompt, so that the 1% of queries with the largest
errors includes lookups. With any tokenizer, they take at most half.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from vllm_sparse_backend.calibration.capture import begin_ids, load_tokenizer
from vllm_sparse_backend.calibration.external import readable
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.input_files import MAX_DATA_BYTES, read_text
from vllm_sparse_backend.evaluation.answer_prompts import weave
from vllm_sparse_backend.evaluation.prompt_texts import read_prompt_text
from vllm_sparse_backend.evaluation.tasks import FACT, FACT_QUESTION, NAMES

Encode = Callable[[str], list[int]]
Thread = list[list[int]]
"""Lines as token ids, in the order in which they appear in a prompt."""

FIRST_HOP, HOP = "# The number of {name} is {value}.", "# {name} has the number of {other}."
HOPS = 3
QUESTION = "# Question: what is the number of {name}? Answer: {value}."
PASSAGE_TOKENS = (16, 256)

MOST_CHARS = 16
"""Upper estimate of a token's mean length in characters. It limits the part of a text that is tokenized."""

KINDS = ("retrieval", "hops", "repeats")
TOKENS_A_THREAD = {"retrieval": 512, "hops": 1024, "repeats": 2048}
"""Average number of prompt tokens per thread of each kind."""

LONGER_PROMPTS = "ask for longer prompts with --tokens, or give your own with --prompts and --held-out"
"""What to do about prompts that are too short for their threads."""


def sha256_of(prompts: Sequence[Sequence[int]]) -> str:
    """Hash all prompts in order."""
    numbers = [x for prompt in prompts for x in (len(prompt), *prompt)]
    return hashlib.sha256(" ".join(map(str, numbers)).encode()).hexdigest()


def make_prompts(model: Path, text: Path, num_tokens: int, count: int, seed: int, part: int = 0) -> list[list[int]]:
    """Make prompts from a text. Equal arguments give equal prompts."""
    tokenizer = load_tokenizer(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    text_ids = _text_ids(text, encode, (count + 1) * num_tokens, part)
    start = begin_ids(tokenizer)
    rng = random.Random(f"{seed}/{part}")
    # Passages that occur twice come from the text's last part, which fills no prompt.
    passages = text_ids[count * num_tokens :]
    stretches = [text_ids[i * num_tokens : (i + 1) * num_tokens] for i in range(count)]
    return [insert_threads(stretch, passages, start, encode, rng, tokenizer=str(model)) for stretch in stretches]


def insert_threads(
    stretch: Sequence[int],
    passages: Sequence[int],
    start: Sequence[int],
    encode: Encode,
    rng: random.Random,
    tokenizer: str,
    remedy: str = LONGER_PROMPTS,
) -> list[int]:
    """Make a prompt: insert threads of each kind into a text, whose end is dropped to make room for them."""
    num_tokens = len(stretch)
    threads = {kind: list(_threads(kind, num_tokens, encode, passages, rng)) for kind in KINDS}
    _drop_threads(threads, num_tokens // 2 - len(start))
    _require_room(threads, num_tokens, len(start), tokenizer, remedy)
    every = list(chain.from_iterable(threads.values()))
    room = num_tokens - len(start) - _tokens(every)
    cuts = [sorted(rng.randint(0, room) for _ in thread) for thread in every]
    return weave(start, stretch[:room], every, cuts)[0]


def _drop_threads(threads: dict[str, list[Thread]], most_tokens: int) -> None:
    """Drop threads, the longest kind first, until they fit into ``most_tokens``, or one of each kind is left.

    For the same line, numbers of tokens differ several-fold between tokenizers.
    """
    while sum(map(_tokens, threads.values())) > most_tokens:
        kinds = [kind for kind in KINDS if len(threads[kind]) > 1]
        if not kinds:
            return
        threads[max(kinds, key=lambda kind: _tokens(threads[kind]))].pop()


def _tokens(threads: Sequence[Thread]) -> int:
    return sum(len(line) for thread in threads for line in thread)


def _require_room(
    threads: Mapping[str, list[Thread]], num_tokens: int, num_start: int, tokenizer: str, remedy: str
) -> None:
    """Raise ConfigurationError if threads of all kinds, one of each, take more than half of a prompt."""
    needed = 2 * (num_start + sum(map(_tokens, threads.values())))
    if needed <= num_tokens:
        return
    lines = ", ".join(f"{max(len(line) for line in threads[kind][0])} for a line of {kind}" for kind in KINDS)
    raise ConfigurationError(
        f"--tokens: given {num_tokens:,}, expected at least {needed:,}: lines with facts and questions may fill half "
        f"of a prompt, and the tokenizer of {tokenizer} needs up to {lines}; {remedy}"
    )


def _text_ids(text: Path, encode: Encode, wanted: int, part: int) -> list[int]:
    """Return at least ``wanted`` tokens of one half of the text."""
    whole = read_prompt_text(text)
    half = whole[len(whole) // 2 :] if part else whole[: len(whole) // 2]
    ids = encode(half[: wanted * MOST_CHARS])
    if len(ids) < wanted:
        raise ConfigurationError(
            f"--text: given {text} with {len(ids):,} tokens in one half, expected at least {wanted:,}; name a larger "
            "text, or ask for fewer or shorter prompts"
        )
    return ids


def _threads(
    kind: str, num_tokens: int, encode: Encode, passages: Sequence[int], rng: random.Random
) -> Iterable[Thread]:
    count = max(1, num_tokens // TOKENS_A_THREAD[kind])
    if kind == "repeats":
        most = min(PASSAGE_TOKENS[1], num_tokens // 16)
        for _ in range(count):
            length = rng.randint(min(PASSAGE_TOKENS[0], most), most)
            at = rng.randrange(len(passages) - length)
            yield [list(passages[at : at + length])] * 2
        return
    num_names = HOPS + 1 if kind == "hops" else 1
    for i, value in enumerate(rng.sample(range(1_000_000, 10_000_000), count)):
        if i % (len(NAMES) // num_names) == 0:
            names = rng.sample(NAMES, len(NAMES))
        yield [encode(f"\n{line}\n") for line in _lines(names[-num_names:], value)]
        del names[-num_names:]


def _lines(names: Sequence[str], value: int) -> list[str]:
    """Return the lines that state a value, pass it from name to name, and ask for it with the answer."""
    if len(names) == 1:
        return [line.format(name=names[0], value=value) for line in (FACT, FACT_QUESTION)]
    hops = [HOP.format(name=name, other=other) for other, name in pairwise(names)]
    first, question = FIRST_HOP.format(name=names[0], value=value), QUESTION.format(name=names[-1], value=value)
    return [first, *hops, question]


def read_prompts(model: Path, files: Sequence[Path], num_tokens: int) -> list[list[int]]:
    """Read the operator's own prompts.

    Each line of a .jsonl file is a prompt: an object with ``messages``, which the model's chat template turns into
    text, or with ``text`` or ``prompt``. Any other file is one prompt.
    """
    tokenizer = load_tokenizer(model)
    start = begin_ids(tokenizer)
    prompts = []
    for where, text in _texts(files, tokenizer):
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        ids = ids if ids[: len(start)] == start else start + ids
        if len(ids) < 2:
            raise ConfigurationError(f"{where}: given a prompt of {len(ids)} tokens, expected at least 2")
        prompts.append(ids[:num_tokens])
    if not prompts:
        raise ConfigurationError(f"{', '.join(map(str, files))}: given no prompt, expected at least one")
    return prompts


def _texts(files: Sequence[Path], tokenizer: Any) -> Iterable[tuple[str, str]]:
    for file in files:
        text = read_text(file, MAX_DATA_BYTES)
        if file.suffix != ".jsonl":
            yield str(file), text
            continue
        for number, line in enumerate(text.split("\n"), 1):  # other line ends may occur within a string
            if line.strip():
                with readable(where := Path(f"{file}:{number}"), "prompt"):
                    yield str(where), _text_of(json.loads(line), tokenizer)


def _text_of(line: object, tokenizer: Any) -> str:
    match line:
        case {"messages": [*messages]} if all(
            isinstance(message, dict) and {"role", "content"} <= {*message} for message in messages
        ):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        case {"text": str(text)} | {"prompt": str(text)}:
            return text
    raise ValueError(unexpected(line, "an object with messages (each with role and content), text or prompt"))
