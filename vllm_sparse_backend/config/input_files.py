# SPDX-License-Identifier: Apache-2.0
"""Reads files that users name: regular files only, up to a size. A fifo or a device could block or never end."""

import os
import stat
from pathlib import Path

from vllm_sparse_backend.config.errors import ConfigurationError

MAX_BYTES = 4 << 20
"""About ten times the largest useful profile: separate parameters for each head of 80 layers."""

MAX_DATA_BYTES = 256 << 20
"""For prompts, and for results that a command continues."""


def existing_path(path: str) -> Path | None:
    """Return a path that a user gave, if something exists there."""
    try:
        target = Path(path).expanduser()
        return target if os.path.lexists(target) else None
    except (OSError, RuntimeError, ValueError):
        return None


def kind_of_file(path: Path) -> str:
    """Name the kind of an existing path."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"not readable ({error.strerror})"
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_text(path: Path, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """Read a regular file of at most ``max_bytes`` in UTF-8. Every line of it ends in a newline only."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"{path}: given {kind_of_file(path)}, expected a file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > max_bytes:
        raise ConfigurationError(f"{path}: given more than {max_bytes} bytes, expected at most {max_bytes}")
    try:
        return content.decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 at byte {error.start}") from None
