# SPDX-License-Identifier: Apache-2.0
"""This backend's names, logger and supported releases of vLLM; versions of packages; hashes of texts."""

import hashlib
import logging
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "vllm-sparse-backend"

LOGGER = "vllm.sparse_prefill"
"""A child of vLLM's logger: from other loggers, vLLM's logging shows only WARNING and above."""
logger = logging.getLogger(LOGGER)

BACKEND = "vllm_sparse_backend.serving.worker.backend.SparsePrefillBackend"
MLA_BACKEND = "vllm_sparse_backend.serving.worker.mla_prefill.SparseMlaPrefillBackend"
NAMES = ("SPARSE_PREFILL", "SPARSE-PREFILL")

FLAG = "--attention-backend sparse-prefill"
"""Selects ``BACKEND``, for models with plain keys and values."""
MLA_FLAG = "--attention-config.mla_prefill_backend sparse-prefill"
"""Selects ``MLA_BACKEND``, for models with multi-head latent attention. Their decode stays stock vLLM's."""

OLDEST, TOO_NEW = (0, 30), (0, 34)
"""Supported vLLM releases: from ``OLDEST`` to below ``TOO_NEW``. pyproject.toml pins the same."""

RELEASES = f"{OLDEST[0]}.{OLDEST[1]} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}"


def digest(text: str, characters: int = 16) -> str:
    """Return the first hexadecimal characters of a text's SHA-256."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:characters]


def installed(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_version(name: str) -> str:
    return installed(name) or "not installed"


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect speed."""
    import torch

    versions_by_name = {name: package_version(name) for name in (PACKAGE, "vllm", "torch", "triton")}
    return versions_by_name | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
