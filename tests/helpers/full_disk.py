# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a full disk that needs no privileges: a limit on the size of files."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(most_bytes: int = 1024) -> Iterator[None]:
    """Prevent files from growing past this number of bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
