# SPDX-License-Identifier: Apache-2.0
"""The levels that this server's requests may choose, and the cached keys and values that they may read.

Keys past the first ``exact_tokens`` positions depend on the level that wrote them, so from there on the blocks of each
level have different hashes. Usually the server's own level has vLLM's hashes, because routers compute these too. A
KV connector may store blocks by hash and share them with other servers. In that case exact requests have vLLM's hashes.
Blocks under vLLM's hashes are then exact, whichever server wrote them, and only servers with the same level read the
blocks of a level.
"""

import logging
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.config.request_levels import FIELD, Choices, Mark, RequestLevel, fingerprint
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import KEY, OPTION
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import resolve

logger = logging.getLogger(LOGGER)

CHOICES = "sparse_prefill_choices"
"""Attribute of vLLM's ``InputProcessor`` that stores the choices."""

BY_BLOCK_HASH = {"OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector"}
"""Connectors that store blocks by vLLM's hashes, which differ from level to level."""

BY_REQUEST = {
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
    "P2pNcclConnector", "DecodeBenchConnector", "HiSparseConnector", "ExampleHiddenStatesConnector",
}  # fmt: skip
"""Connectors that pass the blocks of a request only to the same request."""


def choices(vllm_config: VllmConfig, resolved: Resolved | None = None) -> Choices:
    """Return the levels that requests of this server may choose."""
    resolved, connectors = resolved or resolve(vllm_config), kv_connectors(vllm_config)
    plan, policy = resolved.plan, resolved.config.requests
    refusal = _refusal(vllm_config, connectors)
    all_choices = Choices(plan.level_names, plan.level, resolved.exact_tokens(), {}, refusal, plan.has_shares)
    if resolved.is_dense:
        policy = policy.model_copy(update={"default": EXACT})
    permitted = all_choices.under(policy)
    if connectors & BY_BLOCK_HASH:
        numbers = resolved.numbers()
        streaming = resolved.streaming_heads
        salts = {
            level: f"{level}:{fingerprint(plan, numbers[level], streaming)}" for level, plan in resolved.plans.items()
        }
    else:
        salts = {level: level for level in (EXACT, *resolved.plans) if level != permitted.default}
    uniform_levels = {EXACT, DEFAULT} if resolved.pools else {*permitted.levels, DEFAULT}
    _refuse_mixture(permitted, {DEFAULT} if vllm_config.parallel_config.use_ubatching else uniform_levels)
    return replace(permitted, salts=salts)


def _refuse_mixture(permitted: Choices, uniform_levels: set[str]) -> None:
    """Refuse several default levels, or a default that not all requests can have, on a server with a single level."""
    defaults = {permitted.default, *permitted.models.values()}
    if permitted.refusal is not None and (len(defaults) > 1 or not defaults <= uniform_levels):
        raise ConfigurationError(
            f"{OPTION} {KEY}.requests: given {', '.join(sorted(defaults))} as default, but {permitted.refusal}"
        )


def cached_choices(input_processor: Any) -> Choices:
    """Return the levels that requests of a server may choose, computed once for each ``InputProcessor``."""
    attributes = vars(input_processor)
    if CHOICES not in attributes:
        attributes[CHOICES] = choices(input_processor.vllm_config)
    known: Choices = attributes[CHOICES]
    return known


def input_processor_of(engine_client: Any) -> Any:
    """Return the ``InputProcessor`` of a server."""
    return getattr(engine_client, "input_processor", engine_client)


def mark_of(input_processor: Any, params: Any) -> Mark:
    """Return the mark of a request that vLLM turns into an engine request."""
    known, extra_args = cached_choices(input_processor), getattr(params, "extra_args", None) or {}
    level = extra_args.get(FIELD)
    if isinstance(level, RequestLevel):  # of an HTTP request; the middleware has checked it
        return known.mark(level)
    try:
        return known.mark(known.level_of(extra_args))
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


@dataclass
class HttpRequest:
    """Level of the current HTTP request, once the middleware has read its body."""

    level: RequestLevel | None = None
    """None if neither the body nor the served model that it names chooses a level."""


HTTP_REQUEST: ContextVar[HttpRequest | None] = ContextVar("sparse_prefill_http_request", default=None)
"""A context variable, because vLLM has no argument for it: beam search, label scoring and some releases' paths create
sampling parameters without the body's ``vllm_xargs``."""


def apply_http_request(params: Any) -> None:
    """Put the level of the current HTTP request, if it has one, into its sampling parameters."""
    http_request = HTTP_REQUEST.get()
    if http_request is not None and http_request.level is not None:
        params.extra_args = {**(params.extra_args or {}), FIELD: http_request.level}


def kv_connectors(vllm_config: VllmConfig) -> set[str]:
    """Return the names of a server's KV connectors."""
    if vllm_config.cache_config.kv_offloading_size is not None:
        native = vllm_config.cache_config.kv_offloading_backend == "native"
        return {"OffloadingConnector" if native else "LMCacheMPConnector"}
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return set()
    if transfer.kv_connector != "MultiConnector":
        return {str(transfer.kv_connector)}
    parts = transfer.kv_connector_extra_config.get("connectors", [])
    return {str(part.get("kv_connector")) for part in parts} or {"MultiConnector"}


def stores_by_token(vllm_config: VllmConfig) -> list[str]:
    """Return the KV connectors that cannot tell levels apart."""
    return sorted(kv_connectors(vllm_config) - BY_BLOCK_HASH - BY_REQUEST)


def _refusal(vllm_config: VllmConfig, connectors: set[str]) -> str | None:
    if compat.pools(vllm_config):
        return "this server runs a pooling model, which has one level for all requests"
    if stores := stores_by_token(vllm_config):
        return (
            f"this server stores keys and values with {', '.join(stores)} by their tokens only, so a request could "
            "read those of another level"
        )
    if vllm_config.parallel_config.use_ubatching:
        return "this server splits steps into microbatches (--enable-dbo or --ubatch-size), which have no request ids"
    return None


def warn_of_stores(vllm_config: VllmConfig) -> None:
    """Warn if servers with other settings may share a store with this server and read its sparse keys and values."""
    if stores := stores_by_token(vllm_config):
        logger.warning(
            "sparse-prefill: %s stores keys and values by their tokens only. Past the first positions, which are "
            "exact, this server writes other keys and values than stock vLLM or a server with other settings, and "
            "every server that shares the store reads them. Use a separate store, share it only with servers that "
            "have exactly these settings, or use a connector that stores blocks by vLLM's hashes (%s). Requests for "
            "another level than the server's own are refused", ", ".join(stores), ", ".join(sorted(BY_BLOCK_HASH)),
        )  # fmt: skip
