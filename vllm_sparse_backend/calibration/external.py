# SPDX-License-Identifier: Apache-2.0
"""What may be missing or damaged, and is not ours to mend: libraries, and files on the disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vllm_sparse_backend.config.errors import ConfigurationError


def require_module(module: str, why: str) -> Any:
    """The module of a library. Raises ConfigurationError, which begins with ``why``, where it cannot be imported."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{why}, and it could not be imported: {error}") from None


def safetensors() -> Any:
    """Its part for torch."""
    return require_module("safetensors.torch", "captures need safetensors, which comes with vLLM")


@contextmanager
def readable(path: Path, what: str, mend: str = "") -> Iterator[None]:
    """Whatever goes wrong with a file or folder is one error; ``mend`` says what to do.

    What a folder lacks, or a file holds in pieces, its readers tell in exceptions of many kinds.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or repr(error)
        raise ConfigurationError(f"{path}: its {what} cannot be read: {why}{mend and '; '}{mend}") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a library writes a file, as on a full disk, into ConfigurationError."""
    try:
        yield
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or repr(error)
        raise ConfigurationError(f"{path}: cannot be written: {why}") from error


def read_json(path: Path, form: Any, mend: str = "delete it") -> Any:
    """What a JSON file holds, as a value of the type ``form``. Raises ConfigurationError where it is none."""
    with readable(path, "contents", mend):
        return TypeAdapter(form).validate_json(path.read_bytes(), strict=True)
