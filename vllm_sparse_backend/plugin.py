"""What vLLM's plugin loader calls: makes ``--attention-backend sparse-prefill`` mean our backend.

The loader calls ``register`` in every process, more than once, before the command line is read. vLLM keeps backends in
an enum; its one open place is CUSTOM, and the flag's value is looked up among the enum's names in capitals. So CUSTOM
is pointed at our backend and gets two further names. A member of its own would not survive being pickled to a spawned
worker, which reads its configuration before it loads plugins.
"""

import logging
from typing import Any

LOGGER = "vllm.sparse_prefill"
"""Below vLLM's own logger, the only one that its logging shows: other names' lines are lost under WARNING."""

logger = logging.getLogger(LOGGER)

BACKEND = "vllm_sparse_backend.serving.backend.SparsePrefillBackend"
NAMES = ("SPARSE_PREFILL", "SPARSE-PREFILL")


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_sparse_backend.serving import hooks, metrics_hooks

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning(
            "sparse-prefill is not available: another plugin has taken vLLM's one place for a custom attention backend "
            "(%s). Choose plugins with VLLM_PLUGINS, for example VLLM_PLUGINS=sparse_prefill.",
            custom.get_path(),
        )
        return
    register_backend(custom, BACKEND)
    for name in NAMES:
        AttentionBackendEnum._member_map_[name] = custom
    hooks.install()
    if (problem := metrics_hooks.install()) is not None:
        logger.warning("sparse-prefill: %s", problem)


def is_ours(backend: Any) -> bool:
    """Whether a backend that was chosen is this one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return backend is custom and custom.is_overridden() and custom.get_path() == BACKEND
