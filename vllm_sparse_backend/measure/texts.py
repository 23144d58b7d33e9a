# SPDX-License-Identifier: Apache-2.0
"""What prompts are made of: a text of the operator's, or prose of few words that is made here."""

import random
from collections.abc import Sequence
from pathlib import Path

from vllm_sparse_backend.measure.report import BenchError

_SUBJECTS = "farmer sailor teacher painter doctor baker soldier child neighbor traveler judge miller nurse clerk king"
_VERBS = "watched followed carried found painted opened remembered sold mended lost visited measured closed"
_ADJECTIVES = "old small wooden heavy green narrow bright empty distant warm strange plain round cold wide"
_OBJECTS = "door boat letter garden horse table window road basket lamp field wall coat bridge kettle mill"
_TIMES = "in the morning,before the rain,after a while,at noon,in winter,without a word,once more,that day"


def asked_text(path: Path | None, lengths: Sequence[int], prompts: int) -> str | None:
    """Of the operator's text, if there is one, enough for so many prompts of these lengths in tokens."""
    if not lengths or min(lengths) < 1:
        raise BenchError(f"--lengths: given {list(lengths)}, expected numbers of tokens, with commas between")
    # Eight characters are more than a token has on average, and what is read is tokenised by the server.
    return None if path is None else read_text(path, 8 * max(lengths) * max(4, prompts))


def read_text(path: Path, most_chars: int) -> str:
    """A text file, or all *.py and *.md of a folder in a mixed order that is the same everywhere; at most so much."""
    # Not for prose, which is also made where pydantic is not installed.
    from vllm_sparse_backend.profiling.capture import text_files
    from vllm_sparse_backend.settings.errors import ConfigurationError

    files: list[Path] = []
    try:
        files = text_files(path, "*.[pm][yd]")
    except ConfigurationError as error:
        raise BenchError(f"--text: {error}") from None
    parts: list[str] = []
    for file in files:
        if file.suffix in (".py", ".md") or file == path:
            parts.append(file.read_text(encoding="utf-8", errors="replace"))
            most_chars -= len(parts[-1])
        if most_chars <= 0:
            parts[-1] = parts[-1][: most_chars or None]
            break
    return "".join(parts)


def prose(num_words: int, seed: int) -> str:
    """English sentences of about a hundred words' vocabulary; the same for the same seed."""
    rng = random.Random(seed)
    kinds = [kind.split() for kind in (_SUBJECTS, _VERBS, _ADJECTIVES, _OBJECTS)]
    times = _TIMES.split(",")
    parts: list[str] = []
    words = 0
    while words < num_words:
        subject, verb, adjective, thing = map(rng.choice, kinds)
        parts.append(f"The {subject} {verb} the {adjective} {thing} {rng.choice(times)}.")
        words += len(parts[-1].split())
        parts.append("\n" if rng.random() < 0.2 else " ")
    return "".join(parts)
