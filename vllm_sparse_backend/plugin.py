"""What vLLM's plugin loader calls: makes ``--attention-backend sparse-prefill`` mean our backend.

The loader calls ``register`` in every process, more than once, before the command line is read. vLLM keeps backends in
an enum; its one open place is CUSTOM, and the flag's value is looked up among the enum's names in capitals. So CUSTOM
is pointed at our backend and gets two further names. A member of its own would not survive being pickled to a spawned
worker, which reads its configuration before it loads plugins.
"""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

BACKEND = "vllm_sparse_backend.backend.SparsePrefillBackend"
NAMES = ("SPARSE_PREFILL", "SPARSE-PREFILL")


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``. Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

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
    platform = type(current_platform)
    _wrap(platform, "check_and_update_config", _checked)
    if current_platform.is_cpu():
        _wrap(platform, "get_attn_backend_cls", _selectable)


def _wrap(platform: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrapper`` around a class method of vLLM's platform, once."""
    original = getattr(platform, name)
    if getattr(original.__func__, "sparse_prefill", False):
        return
    wrapped = wrapper(original)
    wrapped.sparse_prefill = True  # type: ignore[attr-defined]
    setattr(platform, name, classmethod(wrapped))


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM builds its configuration in the front process: a mistake in ours is told there, before any model loads."""

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(vllm_config)
        if _is_ours(vllm_config.attention_config.backend) and vllm_config.model_config is not None:
            from vllm_sparse_backend.startup import check

            check(vllm_config)

    return check_and_update_config


def _selectable(original: Callable[..., Any]) -> Callable[..., Any]:
    """The CPU platform knows one backend and would go on with it whatever was asked for."""

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *rest: Any, **more: Any
    ) -> str:
        if _is_ours(selected_backend) and not attn_selector_config.use_mla:
            return BACKEND
        return original(selected_backend, attn_selector_config, *rest, **more)

    return get_attn_backend_cls


def _is_ours(backend: Any) -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return backend is AttentionBackendEnum.CUSTOM
