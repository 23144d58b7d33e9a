# SPDX-License-Identifier: Apache-2.0
"""What vLLM's plugin loader calls: makes ``--attention-backend sparse-prefill`` mean our backend.

The loader calls ``register`` in every process, more than once, before the command line is read. vLLM keeps backends in
an enum; its one open place is CUSTOM, and the flag's value is looked up among the enum's names in capitals. So CUSTOM
is pointed at our backend and gets two further names. A member of its own would not survive being pickled to a spawned
worker, which reads its configuration before it loads plugins.
"""

import functools
import logging
import re
from collections.abc import Callable

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.identity import BACKEND, LOGGER, NAMES, OLDEST, RELEASES, TOO_NEW, displaced

logger = logging.getLogger(LOGGER)


def unsupported(version: str) -> str | None:
    """Why this release of vLLM is not one to run in; None where it is, or is a build whose release cannot be told."""
    numbers = re.match(r"(\d+)\.(\d+)\.", version)
    release = (0, 1) if numbers is None else (int(numbers[1]), int(numbers[2]))
    if release == (0, 1) or OLDEST <= release < TOO_NEW:  # builds from a checkout without tags call themselves 0.1
        return None
    oldest, too_new = (".".join(map(str, release)) for release in (OLDEST, TOO_NEW))
    return (
        f"vLLM {version} is here, and it is made for {RELEASES}: vLLM's parts that it builds on are not open ones, "
        f"and change between releases. Install one of these (pip install 'vllm>={oldest},<{too_new}'), or a newer "
        "vllm-sparse-backend"
    )


def _said_where_it_cannot_be(register: Callable[[], None]) -> Callable[[], None]:
    """Log why the backend is not available in this vLLM: its own error knows only that the flag's value is unknown."""

    @functools.wraps(register)
    def checked() -> None:
        from vllm import __version__ as version

        if (why := unsupported(version)) is not None:
            logger.warning("sparse-prefill is not available: %s", why)
            return
        try:
            register()
        except (
            AttributeError,
            ImportError,
            ConfigurationError,
        ) as error:  # a build between releases, or one that was changed
            logger.warning(
                "sparse-prefill is not available: vLLM %s lacks what it builds on (%s: %s); it is made for the "
                "releases %s", version, type(error).__name__, error, RELEASES,
            )  # fmt: skip

    return checked


@_said_where_it_cannot_be
def register() -> None:
    """Entry point of the group ``vllm.general_plugins``. Idempotent.

    Most processes that it runs in serve with another backend, or do not know yet with which. So it alters only what
    ``hooks.install`` names: where a backend is looked up, and where a process gets its configuration.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_sparse_backend.serving import hooks

    if (why := displaced()) is not None:
        logger.warning("sparse-prefill is not available: %s", why)
        return
    hooks.install()
    custom = AttentionBackendEnum.CUSTOM
    register_backend(custom, BACKEND)
    for name in NAMES:
        AttentionBackendEnum._member_map_[name] = custom
