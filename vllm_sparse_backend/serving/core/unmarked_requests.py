# SPDX-License-Identifier: Apache-2.0
"""Levels of requests that no front process of this package has marked, such as requests from vLLM's Rust front end.

Their ``extra_args`` are the client's ``vllm_xargs``, unchecked. This module checks them as the front process would. A
request that may not have its level ends with an error: in all supported releases, an exception while vLLM's core
prepares a request ends only that request.
"""

from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_sparse_backend.config.request_levels import Mark
from vllm_sparse_backend.serving import rust_frontend
from vllm_sparse_backend.serving.level_policy import cached_choices

WARNED = "sparse_prefill_warned_of_unmarked"
"""Attribute of vLLM's ``EngineCore``: whether it has logged the missing features for such requests."""


def mark_new_request(core: Any, request: Any) -> VLLMValidationError | None:
    """Mark a new request that has no mark."""
    params = request.sampling_params
    if params is None or request.abort_immediately or Mark.read(params.extra_args) is not None:
        return None
    _warn_once(core)
    extra_args = params.extra_args or {}
    known = cached_choices(core)
    if known.models:
        return _refusal(f"{rust_frontend.BY_MODEL}, which do not reach the engine core; leave requests.models out")
    try:
        level = known.level_of(extra_args)
    except ValueError as error:
        return _refusal(str(error))
    params.extra_args = known.mark(level).write(extra_args)
    return None


def _refusal(why: str) -> VLLMValidationError:
    return VLLMValidationError(f"sparse-prefill: {why}", parameter="vllm_xargs")


def _warn_once(core: Any) -> None:
    """Log the missing features for requests of another front process, unless they were logged at start-up."""
    if not getattr(core, WARNED, False) and not rust_frontend.is_configured():
        rust_frontend.warn_of_missing()
    setattr(core, WARNED, True)
