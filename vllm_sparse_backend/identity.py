# SPDX-License-Identifier: Apache-2.0
"""What this backend is called within vLLM, and the releases of vLLM that it is made for."""

from typing import Any

LOGGER = "vllm.sparse_prefill"
"""Below vLLM's own logger, the only one that its logging shows: other names' lines are lost under WARNING."""

BACKEND = "vllm_sparse_backend.serving.backend.SparsePrefillBackend"
NAMES = ("SPARSE_PREFILL", "SPARSE-PREFILL")

OLDEST, TOO_NEW = (0, 26), (0, 34)
"""Releases of vLLM that this backend is made for: from the one on, before the other. pyproject.toml pins the same."""

RELEASES = f"{OLDEST[0]}.{OLDEST[1]} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}"


def is_ours(backend: Any) -> bool:
    """Whether a backend that was chosen is this one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return backend is custom and custom.is_overridden() and custom.get_path() == BACKEND
