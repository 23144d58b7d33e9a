# SPDX-License-Identifier: Apache-2.0
"""Reads files that users name: regular files only, up to a size. A fifo or a device could block or never end."""

import errno
import os
import stat
from pathlib import Path

from vllm_sparse_backend.config.errors import ConfigurationError

MAX_BYTES = 4 << 20
"""About ten times the largest useful profile: separate parameters for each head of 80 layers."""

MAX_DATA_BYTES = 256 << 20
"""For prompts, and for results that a command continues."""


def file_at(path: str) -> Path | None:
    """Find the file at a path."""
    try:
        file = Path(path).expanduser()
        return file if file.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def why_no_file(path: str) -> str:
    """Explain why ``file_at`` finds no file at a path."""
    try:
        file = Path(path).expanduser()
        exists = os.path.lexists(file)
    except (OSError, RuntimeError, ValueError):
        exists = False
    return f"{path} is {kind_of_file(file)}, expected a file" if exists else "no such file"


def kind_of_file(path: Path) -> str:
    """Name the kind of an existing path."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        broken = {errno.ELOOP: "a loop of links", errno.ENOENT: "a link to nothing"}
        return broken.get(error.errno or 0, f"not readable ({error.strerror})")
    return _kind(mode)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most ``max_bytes``."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigurationError(f"{path}: given {_kind(mode)}, expected a file")
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > max_bytes:
        raise ConfigurationError(f"{path}: given more than {max_bytes} bytes, expected at most {max_bytes}")
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Read a regular file of at most ``max_bytes`` in UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 at byte {error.start}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a fifo would wait for a writer
