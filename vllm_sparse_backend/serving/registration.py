# SPDX-License-Identifier: Apache-2.0
"""This package's entries in vLLM's enums of attention backends, and checks that no other plugin has taken them.

vLLM has two enums: of attention backends, and of prefill backends for multi-head latent attention (MLA). Each has a
single entry for external backends, ``CUSTOM``, which ``plugin.register`` points at our backend. This module imports
vLLM inside its functions only: plugins are loaded before vLLM knows its platform.
"""

from typing import Any

from vllm_sparse_backend.identity import BACKEND, FLAG, MLA_BACKEND, MLA_FLAG


def is_ours(backend: Any) -> bool:
    """Return whether a configured backend is this one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return backend is AttentionBackendEnum.CUSTOM and _holds(backend, BACKEND)


def is_our_mla_prefill(backend: Any) -> bool:
    """Return whether a configured prefill backend for MLA is this package's."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    return backend is MLAPrefillBackendEnum.CUSTOM and _holds(backend, MLA_BACKEND)


def is_selected(attention_config: Any) -> bool:
    """Return whether an engine runs this package: its attention backend, or its prefill backend for MLA."""
    return is_ours(attention_config.backend) or is_our_mla_prefill(attention_config.mla_prefill_backend)


def _holds(custom: Any, path: str) -> bool:
    """Return whether an enum's entry for external backends points at a class."""
    return bool(custom.is_overridden() and custom.get_path() == path)


def why_displaced() -> str | None:
    """Return why ``--attention-backend`` cannot select this backend.

    Plugins load in the order of their entry points, so another plugin may take ``CUSTOM`` before or after ours.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return _why_taken(AttentionBackendEnum.CUSTOM, BACKEND, "attention backend")


def why_mla_prefill_displaced() -> str | None:
    """Return why ``--attention-config.mla_prefill_backend`` cannot select our prefill backend."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    return _why_taken(MLAPrefillBackendEnum.CUSTOM, MLA_BACKEND, "MLA prefill backend")


def why_other_selected(attention_config: Any) -> str | None:
    """Return why a configured ``CUSTOM`` is another plugin's, which our flag selects too if that plugin loads later."""
    selected = (
        (FLAG, attention_config.backend, why_displaced()),
        (MLA_FLAG, attention_config.mla_prefill_backend, why_mla_prefill_displaced()),
    )
    for flag, backend, why in selected:
        if why is not None and backend is not None and backend.name == "CUSTOM":
            return f"{flag} is not available: {why}"
    return None


def _why_taken(custom: Any, path: str, kind: str) -> str | None:
    if not custom.is_overridden() or _holds(custom, path):
        return None
    return (
        f"another plugin has taken vLLM's only slot for a custom {kind} ({custom.get_path()}). Choose plugins with "
        "VLLM_PLUGINS, for example VLLM_PLUGINS=sparse_prefill."
    )
