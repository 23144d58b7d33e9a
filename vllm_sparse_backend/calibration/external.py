# SPDX-License-Identifier: Apache-2.0
"""Libraries and files that may be missing or damaged: every failure becomes a ConfigurationError."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError


def require_module(module: str, why: str) -> Any:
    """Import a module of a library."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{why}, but importing it failed: {error}") from None


@contextmanager
def readable(path: Path, what: str) -> Iterator[None]:
    """Turn any failure to read a file or folder into one ConfigurationError.

    Readers raise many kinds of exceptions for missing and damaged files.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or repr(error)
        raise ConfigurationError(f"{path}: its {what} cannot be read: {why}") from error
