# SPDX-License-Identifier: Apache-2.0
"""This package's entries in vLLM's enums of attention backends, and checks that no other plugin has taken them.

vLLM has two enums: of attention backends, and of prefill backends for multi-head latent attention (MLA). Each has a
single entry for external backends, ``CUSTOM``, which ``plugin.register`` points at our backend. This module
imports vLLM only inside functions: plugins are loaded before vLLM knows its platform.
"""

import multiprocessing
from collections.abc import Mapping
from typing import Any

from vllm_sparse_backend.config.keys import KEY, OPTION
from vllm_sparse_backend.identity import BACKEND, FLAG, LOGGER, MLA_BACKEND, MLA_FLAG

KINDS = {"AttentionBackendEnum": "attention backend", "MLAPrefillBackendEnum": "MLA prefill backend"}
"""The backends in each of vLLM's enums."""


def is_ours(backend: Any) -> bool:
    """Return whether a configured attention backend, or prefill backend for MLA, is this package's."""
    is_custom = getattr(backend, "name", None) == "CUSTOM"  # no other entry can be ours
    return is_custom and backend.is_overridden() and backend.get_path() in (BACKEND, MLA_BACKEND)


def is_selected(attention_config: Any) -> bool:
    """Return whether an engine runs this package: its attention backend, or its prefill backend for MLA."""
    return is_ours(attention_config.backend) or is_ours(attention_config.mla_prefill_backend)


def why_displaced(custom: Any) -> str | None:
    """Return why our flag cannot select our backend through an enum's entry ``CUSTOM``.

    Plugins load in the order of their entry points, so another plugin may take ``CUSTOM`` before or after ours.
    """
    if not custom.is_overridden() or is_ours(custom):
        return None
    return (
        f"another plugin has taken vLLM's only slot for a custom {KINDS[type(custom).__name__]} ({custom.get_path()}). "
        "Choose plugins with VLLM_PLUGINS, for example VLLM_PLUGINS=sparse_prefill."
    )


def why_other_selected(attention_config: Any) -> str | None:
    """Return why a configured ``CUSTOM`` is another plugin's, which our flag selects too if that plugin loads later."""
    for flag, backend in ((FLAG, attention_config.backend), (MLA_FLAG, attention_config.mla_prefill_backend)):
        why = why_displaced(backend) if backend is not None and backend.name == "CUSTOM" else None
        if why is not None:
            return f"{flag} is not available: {why}"
    return None


def load_plugins() -> None:
    """Load all general plugins as vLLM does, in its order."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def look_up_backend(name: str) -> Any:
    """Return the entry of vLLM's attention backends that its command line finds by the flag's value."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def log_unread_settings(vllm_config: Any) -> None:
    """Log once that the server ignores this backend's settings."""
    from vllm.logger import init_logger

    # Engine cores and workers get the same configuration.
    if multiprocessing.parent_process() is not None:
        return
    if isinstance(vllm_config.additional_config, Mapping) and KEY in vllm_config.additional_config:
        init_logger(LOGGER).info_once(
            "sparse-prefill: %s in %s is ignored: this server runs another attention backend; add %s to use these "
            "settings, or remove them", KEY, OPTION, MLA_FLAG if vllm_config.model_config.use_mla else FLAG,
        )  # fmt: skip
    elif (why := why_other_selected(vllm_config.attention_config)) is not None:
        init_logger(LOGGER).warning_once(why)
