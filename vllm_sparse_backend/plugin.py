# SPDX-License-Identifier: Apache-2.0
"""The entry point for vLLM's plugin loader: makes two flags select this package's backends.

``--attention-backend sparse-prefill`` selects the attention backend, for models with plain keys and values.
``--attention-config.mla_prefill_backend sparse-prefill`` selects the prefill backend for multi-head latent attention.
The loader calls ``register`` in every process, more than once, before the command line is read.
"""

import re

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.identity import (
    BACKEND,
    MLA_BACKEND,
    MLA_FLAG,
    NAMES,
    OLDEST,
    RELEASES,
    TOO_NEW,
    logger,
)


def unsupported(version: str) -> str | None:
    """Return why a release of vLLM is not supported."""
    numbers = re.match(r"(\d+)\.(\d+)\.", version)
    release = (0, 1) if numbers is None else (int(numbers[1]), int(numbers[2]))
    if release == (0, 1) or OLDEST <= release < TOO_NEW:  # builds from a checkout without tags call themselves 0.1
        return None
    oldest, too_new = (".".join(map(str, release)) for release in (OLDEST, TOO_NEW))
    return (
        f"vLLM {version} is installed, expected {RELEASES}: the backend uses vLLM internals that change with releases. "
        f"Install a supported release (pip install 'vllm>={oldest},<{too_new}'), or a newer vllm-sparse-backend"
    )


def register() -> None:
    """Register the backends with vLLM: the entry point of the group ``vllm.general_plugins``. Idempotent.

    If the backend is not available, the log says why. vLLM's own error says only that the flag's value is unknown.
    """
    from vllm import __version__ as version

    if (why := unsupported(version)) is not None:
        logger.warning("sparse-prefill is not available: %s", why)
        return
    try:
        register_backends()
    except (AttributeError, ImportError, ConfigurationError) as error:  # an unreleased or modified build
        logger.warning(
            "sparse-prefill is not available: vLLM %s lacks internals that it relies on (%s: %s); expected one of "
            "the releases %s", version, type(error).__name__, error, RELEASES,
        )  # fmt: skip


def register_backends() -> None:
    """Register the backends that no other plugin has displaced. Raises an error if vLLM lacks internals.

    Most processes that call this run another backend, or do not know their backend yet. It therefore installs only the
    hooks of ``hooks.install``, where a process gets its configuration.
    """
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_sparse_backend.serving import hooks
    from vllm_sparse_backend.serving.registration import why_displaced

    custom, mla_custom = AttentionBackendEnum.CUSTOM, MLAPrefillBackendEnum.CUSTOM
    if (why := why_displaced(custom)) is not None:
        logger.warning("sparse-prefill is not available: %s", why)
        return
    hooks.install()
    register_backend(custom, BACKEND)
    # A separate enum member could not be unpickled in a spawned worker, which reads its configuration before it loads
    # plugins. vLLM looks the flag's value up among the enum's names in capitals.
    for name in NAMES:
        AttentionBackendEnum._member_map_[name] = custom
    if (why := why_displaced(mla_custom)) is not None:
        logger.warning("%s is not available: %s", MLA_FLAG, why)
        return
    register_mla_prefill_backend(mla_custom, MLA_BACKEND)
    for name in NAMES:
        MLAPrefillBackendEnum._member_map_[name] = mla_custom
