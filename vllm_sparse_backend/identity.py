# SPDX-License-Identifier: Apache-2.0
"""What this backend is called, its version, and the releases of vLLM that it is made for."""

from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGE = "vllm-sparse-backend"

LOGGER = "vllm.sparse_prefill"
"""Below vLLM's own logger, the only one that its logging shows: other names' lines are lost under WARNING."""

BACKEND = "vllm_sparse_backend.serving.worker.backend.SparsePrefillBackend"
NAMES = ("SPARSE_PREFILL", "SPARSE-PREFILL")

OLDEST, TOO_NEW = (0, 26), (0, 34)
"""Releases of vLLM that this backend is made for: from the one on, before the other. pyproject.toml pins the same."""

RELEASES = f"{OLDEST[0]}.{OLDEST[1]} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}"


def is_ours(backend: Any) -> bool:
    """Whether a backend that was chosen is this one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return backend is custom and custom.is_overridden() and custom.get_path() == BACKEND


def displaced() -> str | None:
    """Why the flag cannot mean this backend: another plugin has vLLM's one place for it; None where none has.

    Plugins load in the order of their entry points, so the other one may come before ours or after it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden() or custom.get_path() == BACKEND:
        return None
    return (
        f"another plugin has taken vLLM's one place for a custom attention backend ({custom.get_path()}). Choose "
        "plugins with VLLM_PLUGINS, for example VLLM_PLUGINS=sparse_prefill."
    )


@lru_cache
def package_version(name: str) -> str:
    """A package's version; of one that is on the path without having been installed, what it says itself."""
    try:
        return version(name)
    except PackageNotFoundError:
        pass
    try:
        own = import_module(f"{name}.version" if name == "vllm" else name.replace("-", "_"))
        return str(getattr(own, "__version__", "from its sources"))
    except Exception:  # whatever a package raises that is there in part
        return "not installed"
