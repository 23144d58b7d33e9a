# SPDX-License-Identifier: Apache-2.0
"""The engine core's side of the exact switch: makes all new requests exact, or lets them run at their own levels.

The core applies the switch to each request on arrival. All API servers of an engine share its core, and every rank and
pipeline stage learns a request's level from the core. ``frontend/switch_endpoint.py`` is the HTTP side.
"""

import logging
from typing import Any

from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.config.request_levels import Mark, RequestLevel
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.level_policy import choices

logger = logging.getLogger(LOGGER)

SWITCHED_MARK = "sparse_prefill_switched"
"""Attribute of vLLM's ``EngineCore``: the mark of all new requests; absent or None if they keep their own."""


def set_switch(core: Any, position: str) -> str:
    """Switch an engine. The switch takes effect with the next request."""
    known = choices(core.vllm_config)
    if position == EXACT and known.refusal is not None:
        return known.refusal
    mark = known.mark(RequestLevel(EXACT)) if position == EXACT else None
    setattr(core, SWITCHED_MARK, mark)
    logger.warning("sparse-prefill: switched: all new requests run %s", "exact" if mark else "at their own levels")
    return ""


def mark_new_request(core: Any, request: Any) -> None:
    """Replace a new request's mark while the engine is switched to exact."""
    mark: Mark | None = getattr(core, SWITCHED_MARK, None)
    if mark is not None and request.sampling_params is not None:
        request.sampling_params.extra_args = mark.write(request.sampling_params.extra_args)


def is_exact(core: Any) -> bool:
    """Return whether the engine is switched to exact."""
    return getattr(core, SWITCHED_MARK, None) is not None
