# SPDX-License-Identifier: Apache-2.0
"""vLLM's Rust front end: the parts of this package that are missing behind it, and the settings it does not support.

It is a process without Python, so no part of ``serving/frontend`` runs. It passes ``vllm_xargs`` on to the engine core,
which reads the level there (``core/unmarked_requests.py``).
"""

import logging

from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import KEY, OPTION
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat

logger = logging.getLogger(LOGGER)

VARIABLE = "VLLM_USE_RUST_FRONTEND"

BY_MODEL = f"{OPTION} {KEY}.requests.models gives levels by served model names"

MISSING = (
    "requests come through vLLM's front end in Rust, so the engine core reads their levels. Missing: sparse_prefill_* "
    "on /metrics; status 400 for misplaced keys "
    "(ignored) and for levels that a request may not have (the request ends with an error); the comparison of settings "
    f"with nodes that start with --headless. To have these, unset {VARIABLE} and do not serve with vllm-rs"
)


def is_configured() -> bool:
    """Return whether this process's environment selects the Rust front end.

    Servers that ``vllm-rs serve`` starts have that front end without the variable.
    """
    return compat.is_set(VARIABLE)


def refusal(resolved: Resolved) -> str | None:
    """Return why this backend cannot honour its settings behind the Rust front end."""
    if not resolved.config.requests.models:
        return None
    return (
        f"{BY_MODEL}, but {VARIABLE} is set: the engine core then reads levels, and it does not receive the model name "
        f"of a request; unset {VARIABLE}, or leave requests.models out"
    )


def warn_of_missing() -> None:
    """Log which parts of this package are missing behind the Rust front end."""
    logger.warning("sparse-prefill: %s", MISSING)
