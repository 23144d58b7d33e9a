# SPDX-License-Identifier: Apache-2.0
"""vLLM's front end in Rust: what a server of it has not of this package, and what it cannot honour.

It runs in a process without Python, so nothing of ``serving/frontend`` runs. It passes ``vllm_xargs`` on to the engine
core, which reads the level there (``core/unmarked_requests.py``).
"""

import logging

from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import KEY, OPTION
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat

logger = logging.getLogger(LOGGER)

VARIABLE = "VLLM_USE_RUST_FRONTEND"

BY_MODEL = f"{OPTION} {KEY}.requests.models gives levels by served model name"

MISSING = (
    "this server's front process is not vLLM's in Python, so the engine core reads the levels of requests. Missing "
    "here: sparse_prefill_* on /metrics; reports in answers (workers log them); the route of the switch; status 400 "
    "for a misplaced key, a level on a path that prefills nothing, or one that a request may not have (such a level "
    "ends the request with an error, a misplaced key is ignored); and the check that nodes started with --headless "
    f"have the same settings. To have them, unset {VARIABLE} and do not serve with vllm-rs"
)


def is_configured() -> bool:
    """Return whether this process's environment selects the Rust front end.

    A server that ``vllm-rs serve`` starts has it without the variable.

    Returns:
        True if the variable is set.
    """
    return compat.is_set(VARIABLE)


def refusal(resolved: Resolved) -> str | None:
    """Return why this backend cannot serve its settings behind the Rust front end.

    Args:
        resolved: The settings.

    Returns:
        The reason and what to do; None if it can.
    """
    if not resolved.config.requests.models:
        return None
    return (
        f"{BY_MODEL}, and with {VARIABLE} the engine core, which reads levels then, does not learn under which name a "
        f"request came; unset {VARIABLE}, or leave requests.models out"
    )


def warn_of_missing() -> None:
    """Warn of what a server behind the Rust front end has not."""
    logger.warning("sparse-prefill: %s", MISSING)
