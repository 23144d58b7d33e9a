# SPDX-License-Identifier: Apache-2.0
"""Texts of prompts: the operator's own, sources of this project, or generated prose with a small vocabulary."""

import gzip
import hashlib
import random
from importlib import resources
from itertools import chain
from pathlib import Path

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.input_files import read_text

_SUBJECTS = "farmer sailor teacher painter doctor baker soldier child neighbor traveler judge miller nurse clerk king"
_VERBS = "watched followed carried found painted opened remembered sold mended lost visited measured closed"
_ADJECTIVES = "old small wooden heavy green narrow bright empty distant warm strange plain round cold wide"
_OBJECTS = "door boat letter garden horse table window road basket lamp field wall coat bridge kettle mill"
_TIMES = "in the morning,before the rain,after a while,at noon,in winter,without a word,once more,that day"


def read_prompt_text(path: Path, most_chars: int | None = None) -> str:
    """Read a text file, or all *.py and *.md of a folder in a fixed, mixed order; at most ``most_chars`` characters.

    Raises ConfigurationError.
    """
    parts: list[str] = []
    try:
        for file in _files(path):
            parts.append(read_text(file, errors="replace"))
            if most_chars is not None and sum(map(len, parts)) >= most_chars:
                break
    except ConfigurationError as error:
        raise ConfigurationError(f"--text: given {str(path)!r}, expected a text file or a folder: {error}") from None
    if not parts:
        raise ConfigurationError(f"--text: given {str(path)!r}, expected *.py or *.md in that folder")
    return "".join(parts)[:most_chars]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [file for file in path.rglob("*") if file.suffix in (".py", ".md") and file.is_file()]
    return sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(path)).encode()).digest())


def project_text() -> str:
    """Return the sources of this project's two packages."""
    folders = [Path(str(resources.files(package))) for package in ("vllm_sparse_backend", "vllm_sparse_kernels")]
    paths = chain.from_iterable(sorted(folder.rglob("*.py")) for folder in folders)
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def measuring_text() -> str:
    """Return sources of this project at one revision. No release changes them, so a model keeps its streaming heads."""
    return gzip.decompress(Path(__file__).with_name("measuring_text.gz").read_bytes()).decode()


def prose(num_words: int, seed: int) -> str:
    """Return English sentences with a vocabulary of about a hundred words. Equal seeds give equal texts."""
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
