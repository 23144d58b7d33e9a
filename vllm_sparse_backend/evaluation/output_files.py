# SPDX-License-Identifier: Apache-2.0
"""Output files of all commands: checked before the work begins, and written atomically."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_sparse_backend.config.errors import ConfigurationError

PROBE_BYTES = 4096
"""Bytes that a check writes and deletes. An empty file proves nothing: a full disk often still has room for it."""


def require_output_file(option: str, path: Path) -> None:
    """Check that a file can be written at ``path``, by writing and deleting a few bytes next to it."""
    try:
        with _written_beside(_target(path), bytes(PROBE_BYTES)):
            pass
    except OSError as error:
        problem = f"there is no folder {path.parent}" if not path.parent.exists() else error.strerror
        expected = "a file in an existing, writable folder"
        raise ConfigurationError(f"{option}: given {str(path)!r}: {problem}; expected {expected}") from None


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to ``path`` atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = _target(path)
        with _written_beside(target, text.encode()) as partial:
            partial.replace(target)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror or error}") from error


def _target(path: Path) -> Path:
    """Return the file that a write replaces, through symbolic links. Raises OSError if it is not a regular file."""
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise OSError(None, "it is no regular file")
    return target


@contextmanager
def _written_beside(target: Path, content: bytes) -> Iterator[Path]:
    """Write a file next to ``target``, and delete it afterwards unless it was moved."""
    path = target.with_name(f".{target.name}.new")
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        yield path
    finally:
        with suppress(OSError):  # if creating it also failed, the first error says why
            path.unlink(missing_ok=True)
