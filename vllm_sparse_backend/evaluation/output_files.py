# SPDX-License-Identifier: Apache-2.0
"""Output files of all commands: checked before the work begins, and written atomically."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.input_files import kind_of_file

PROBE_BYTES = 4096
"""Bytes that a check writes and deletes. An empty file proves nothing: a full disk often still has room for it."""


def require_output_file(option: str, path: Path) -> None:
    """Check that a file can be written at ``path``, by writing and deleting a few bytes next to it."""
    expected = "a file in an existing, writable folder"
    try:
        target = _target(path)
        _write_probe(_beside(target))
    except OSError as error:
        problem = f"there is no folder {path.parent}" if not path.parent.exists() else error.strerror
        raise ConfigurationError(f"{option}: given {str(path)!r}: {problem}; expected {expected}") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces ``path`` when the block ends, and is deleted if the block fails."""
    partial_path = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = _target(path)
        partial_path = _beside(target)
        yield partial_path
        partial_path.replace(target)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if partial_path is not None:
            _delete(partial_path)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to ``path`` atomically."""
    with whole_file(path) as partial_path, partial_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # some file systems report a full disk only here


def _target(path: Path) -> Path:
    """Return the file that a write replaces, through symbolic links. Raises OSError if it is not a regular file."""
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise OSError(None, f"it is {kind_of_file(target)}")
    return target


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.new")


def _write_probe(path: Path) -> None:
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        _delete(path)


def _delete(path: Path) -> None:
    with suppress(OSError):  # if creating it also failed, the first error says why
        path.unlink(missing_ok=True)
