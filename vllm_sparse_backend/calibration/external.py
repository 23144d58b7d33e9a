# SPDX-License-Identifier: Apache-2.0
"""Libraries and files that may be missing or damaged: every failure becomes a ConfigurationError."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vllm_sparse_backend.config.errors import ConfigurationError


def require_module(module: str, why: str) -> Any:
    """Import a module of a library.

    Args:
        module: The module's full name.
        why: Beginning of the error message: what needs the module, and how to get it.

    Returns:
        The module.

    Raises:
        ConfigurationError: It cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{why}, but importing it failed: {error}") from None


def safetensors() -> Any:
    """Import ``safetensors.torch``.

    Returns:
        The module. Without it, ConfigurationError is raised.
    """
    return require_module("safetensors.torch", "captures need safetensors, which comes with vLLM")


@contextmanager
def readable(path: Path, what: str, remedy: str = "") -> Iterator[None]:
    """Turn any failure to read a file or folder into one ConfigurationError.

    Readers raise many kinds of exceptions for missing and damaged files.

    Args:
        path: The file or folder, which the message names.
        what: Name of its content, for the message.
        remedy: Remedy for the operator; empty if there is none.

    Yields:
        Nothing; the reading happens in the block.

    Raises:
        ConfigurationError: The block raised any exception.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or repr(error)
        raise ConfigurationError(f"{path}: its {what} cannot be read: {why}{remedy and '; '}{remedy}") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn any failure of a library to write a file (such as a full disk) into a ConfigurationError.

    Args:
        path: The file or folder, which the message names.

    Yields:
        Nothing; the writing happens in the block.

    Raises:
        ConfigurationError: The block raised any exception.
    """
    try:
        yield
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or repr(error)
        raise ConfigurationError(f"{path}: cannot be written: {why}") from error


def read_json(path: Path, form: Any, remedy: str = "delete it") -> Any:
    """Read a JSON file as a value of a type.

    Args:
        path: The file.
        form: The type, as pydantic validates it.
        remedy: Remedy for a damaged file.

    Returns:
        The value. A file that cannot be read as ``form`` raises ConfigurationError.
    """
    with readable(path, "contents", remedy):
        return TypeAdapter(form).validate_json(path.read_bytes(), strict=True)
