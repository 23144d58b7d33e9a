# SPDX-License-Identifier: Apache-2.0
"""Reads files that users name."""

import os
from pathlib import Path

from vllm_sparse_backend.config.errors import ConfigurationError


def existing_path(path: str) -> Path | None:
    """Return a path that a user gave, if something exists there."""
    target = os.path.expanduser(path)
    return Path(target) if os.path.exists(target) else None  # False also for names that no file can have


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a file in UTF-8. Every line of it ends in a newline only."""
    try:
        if path.exists() and not path.is_file():  # a fifo could block, and a device never end
            raise ConfigurationError(f"{path}: given a folder, a fifo or a device, expected a file")
        return path.read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 at byte {error.start}") from None
