# SPDX-License-Identifier: Apache-2.0
"""Prompts to calibrate on: the operator's own, or generated from a text with lookups inserted."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_sparse_backend.calibration.capture import load_tokenizer
from vllm_sparse_backend.calibration.external import readable
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.identity import digest
from vllm_sparse_backend.prompts.lookups import Encode, begin_ids, insert_threads
from vllm_sparse_backend.prompts.texts import read_prompt_text

MOST_CHARS = 16
"""Upper estimate of a token's mean length in characters. It limits the part of a text that is tokenized."""


def sha256_of(prompts: Sequence[Sequence[int]]) -> str:
    """Hash all prompts in order."""
    numbers = [x for prompt in prompts for x in (len(prompt), *prompt)]
    return digest(" ".join(map(str, numbers)), 64)


def encoder(tokenizer: Any) -> Encode:
    """Return the function that tokenizes texts of any length."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def make_prompts(model: Path, text: Path, num_tokens: int, count: int, seed: int, part: int = 0) -> list[list[int]]:
    """Make prompts from a text. Equal arguments give equal prompts."""
    tokenizer = load_tokenizer(model)
    encode = encoder(tokenizer)
    text_ids = _text_ids(text, encode, (count + 1) * num_tokens, part)
    start = begin_ids(tokenizer)
    rng = random.Random(f"{seed}/{part}")
    # Passages that occur twice come from the text's last part, which fills no prompt.
    passages = text_ids[count * num_tokens :]
    stretches = [text_ids[i * num_tokens : (i + 1) * num_tokens] for i in range(count)]
    return [insert_threads(stretch, passages, start, encode, rng) for stretch in stretches]


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


def read_prompts(model: Path, files: Sequence[Path], num_tokens: int) -> list[list[int]]:
    """Read the operator's own prompts.

    Each line of a .jsonl file is a prompt: an object with ``messages``, which the model's chat template turns into
    text, or with ``text`` or ``prompt``. Any other file is one prompt.
    """
    tokenizer = load_tokenizer(model)
    encode, start = encoder(tokenizer), begin_ids(tokenizer)
    prompts = []
    for where, text in _texts(files, tokenizer):
        ids = encode(text)
        ids = ids if ids[: len(start)] == start else start + ids
        if len(ids) < 2:
            raise ConfigurationError(f"{where}: given a prompt of {len(ids)} tokens, expected at least 2")
        prompts.append(ids[:num_tokens])
    if not prompts:
        raise ConfigurationError(f"{', '.join(map(str, files))}: given no prompt, expected at least one")
    return prompts


def _texts(files: Sequence[Path], tokenizer: Any) -> Iterable[tuple[str, str]]:
    for file in files:
        text = read_text(file)
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
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        case {"text": str(text)} | {"prompt": str(text)}:
            return text
    raise ValueError(unexpected(line, "an object with messages (each with role and content), text or prompt"))
