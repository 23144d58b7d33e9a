# SPDX-License-Identifier: Apache-2.0
"""Levels of requests that no front process of this package has marked, such as those of vLLM's front end in Rust.

Their ``extra_args`` are a client's ``vllm_xargs`` as it sent them. They are checked here as the front process would
check them, and a request that may not have its level ends with an error: in all supported releases, vLLM's core answers
an exception while it prepares a request with an error of that request alone.
"""

from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_sparse_backend.config.request_levels import REPORT, Mark, asks_report
from vllm_sparse_backend.serving import rust_frontend
from vllm_sparse_backend.serving.level_policy import cached_choices

WARNED = "sparse_prefill_warned_of_unmarked"
"""Attribute of vLLM's ``EngineCore``, set once it has logged what such requests miss."""


def mark_new_request(core: Any, request: Any) -> VLLMValidationError | None:
    """Mark a new request that has no mark.

    Args:
        core: vLLM's ``EngineCore``.
        request: vLLM's request, before its blocks are hashed. Its sampling parameters are changed in place. A request
            for pooling has none, and vLLM's own requests that are born aborted, to free blocks of another server,
            prefill nothing: both stay as they are.

    Returns:
        Why the request is refused, and stays unmarked; None if it has a mark, or needs none.
    """
    params = request.sampling_params
    if params is None or request.abort_immediately or Mark.read(params.extra_args) is not None:
        return None
    _warn_once(core)
    extra_args = params.extra_args or {}
    known = cached_choices(core)
    if known.models:
        return _refusal(f"{rust_frontend.BY_MODEL}, and none reaches the engine core with this request")
    try:
        level = known.level_of(extra_args)
    except ValueError as error:
        return _refusal(str(error))
    params.extra_args = known.mark(level).write(extra_args)
    if REPORT in extra_args:
        params.extra_args[REPORT] = asks_report(extra_args)
    return None


def _refusal(why: str) -> VLLMValidationError:
    return VLLMValidationError(f"sparse-prefill: {why}", parameter="vllm_xargs")


def _warn_once(core: Any) -> None:
    """Log what requests of another front process miss, unless the server's start has logged it."""
    if not getattr(core, WARNED, False) and not rust_frontend.is_configured():
        rust_frontend.warn_of_missing()
    setattr(core, WARNED, True)
