# SPDX-License-Identifier: Apache-2.0
"""This backend's entry in vLLM's enum of attention backends, and checks that no other plugin has taken it.

vLLM has a single entry for external backends, ``CUSTOM``, which ``plugin.register`` points at our backend. This module
imports vLLM inside its functions only: plugins are loaded before vLLM knows its platform.
"""

from typing import Any

from vllm_sparse_backend.identity import BACKEND


def is_ours(backend: Any) -> bool:
    """Return whether a configured backend is this one.

    Args:
        backend: vLLM's enum member for the backend; None if vLLM chooses.

    Returns:
        True if it is ``CUSTOM`` and ``CUSTOM`` points at this backend.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return backend is custom and custom.is_overridden() and custom.get_path() == BACKEND


def why_displaced() -> str | None:
    """Return why the flag cannot select this backend.

    Plugins load in the order of their entry points, so another plugin may take ``CUSTOM`` before or after ours.

    Returns:
        The plugin that holds ``CUSTOM``, and what to do; None if no other plugin does.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden() or custom.get_path() == BACKEND:
        return None
    return (
        f"another plugin has taken vLLM's only slot for a custom attention backend ({custom.get_path()}). Choose "
        "plugins with VLLM_PLUGINS, for example VLLM_PLUGINS=sparse_prefill."
    )


def load_plugins() -> None:
    """Load all general plugins as vLLM does, in its order."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def look_up_backend(name: str) -> type:
    """Look up the flag's value as vLLM's command line does.

    Args:
        name: The value of ``--attention-backend`` in capitals.

    Returns:
        The backend's class.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend: type = AttentionBackendEnum[name].get_class()
    return backend
