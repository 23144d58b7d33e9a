# SPDX-License-Identifier: Apache-2.0
"""The levels that this server's requests may choose, and the cached keys and values that they may read.

A request's level is a value in its ``extra_args`` and a ``cache_salt``, both set where vLLM turns the request into an
engine request. vLLM puts the salt into the hash of a request's first block, and thereby into the hashes of all its
blocks. Usually requests of the default level keep their own salt, because routers compute the same hashes. A KV
connector may share blocks with other servers. In that case exact requests keep their own salt. Blocks without a salt of
ours are then exact, whichever server wrote them, and only servers with the same level read the blocks of a level.
"""

import multiprocessing
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError

from vllm_sparse_backend.config.errors import ConfigurationError, format_value
from vllm_sparse_backend.config.keys import SETTINGS
from vllm_sparse_backend.config.profile import EXACT, ON
from vllm_sparse_backend.config.request_levels import (
    FIELD,
    SALT_PREFIX,
    LevelPolicy,
    RequestLevel,
    fingerprint,
    level_in,
    with_level,
)
from vllm_sparse_backend.identity import logger
from vllm_sparse_backend.serving.resolution import resolve

RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
"""Variable that makes vLLM start its front end in Rust, where no part of this package runs."""

SALTED_STORES = {
    "OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector",
    "LMCacheMPConnector",
}  # fmt: skip
"""Connectors whose stores keep requests with different cache salts apart."""

BY_REQUEST = {
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
    "P2pNcclConnector", "DecodeBenchConnector", "HiSparseConnector", "ExampleHiddenStatesConnector",
}  # fmt: skip
"""Connectors that pass the blocks of a request only to the same request."""


def level_policy(vllm_config: VllmConfig) -> LevelPolicy:
    """Return the levels that requests of this server may choose."""
    resolved, connectors = resolve(vllm_config), kv_connectors(vllm_config)
    plan = resolved.plan
    policy = LevelPolicy(plan.level_names, plan.level, has_shares=plan.has_shares).under(resolved.config.requests)
    if connectors & SALTED_STORES:
        fingerprints = {
            level: fingerprint(plan, resolved.lengths_by_engine(level), bool(resolved.carried.finds_streaming_heads))
            for level, plan in resolved.plans.items()
        }
    else:
        fingerprints = {level: "" for level in (EXACT, *resolved.plans) if level != policy.default}
    refusal = _refusal(vllm_config)
    if vllm_config.parallel_config.use_ubatching and policy.default != ON:
        raise ConfigurationError(f"{SETTINGS}.requests.default: given {policy.default!r}, but {refusal}")
    return replace(policy, fingerprints=fingerprints, refusal=refusal)


def level_of(policy: LevelPolicy, params: Any, resumable: bool) -> RequestLevel:
    """Return the level of a request that vLLM turns into an engine request."""
    try:
        level = policy.level_of(params.extra_args)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
    # Later parts of a streamed input replace the parameters, but the blocks keep the salt of the first part.
    if resumable and level.name != policy.default:
        raise VLLMValidationError(
            f"vllm_xargs {FIELD}: given {format_value(params.extra_args[FIELD])}, but this request streams its input, "
            "and runs at this server's default level; remove it",
            parameter="vllm_xargs",
        )
    return level


def set_level(policy: LevelPolicy, request: Any, level: RequestLevel) -> None:
    """Write a checked level and its cache salt into an engine request."""
    try:
        request.cache_salt = policy.cache_salt(level, request.cache_salt)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="cache_salt") from None
    request.sampling_params.extra_args = with_level(request.sampling_params.extra_args, level)


def refuse_unchecked(request: Any, levels: Collection[str]) -> None:
    """Refuse a new request in the engine core, unless a front process of this package has checked its level.

    Also refuse a level that this engine does not have, which its workers could not run. The front process may be on
    a node that was started with other settings.
    """
    params = request.sampling_params
    if params is None or request.abort_immediately:
        return
    level = level_in(params.extra_args)
    if level is None:
        raise VLLMValidationError(
            f"sparse-prefill: given a request whose level ({FIELD} in vllm_xargs) no front process of this package has "
            "checked, expected vLLM's front end in Python with this package (`vllm serve` without "
            f"{RUST_FRONTEND})",
            parameter="vllm_xargs",
        )
    if level.name not in (EXACT, *levels):
        raise VLLMValidationError(
            f"sparse-prefill: given level {level.name!r}, which this engine does not have, expected one of "
            f"{', '.join((EXACT, *levels))}; start all nodes of the server with the same settings",
            parameter="vllm_xargs",
        )


def add_heads_to_salt(request: Any, heads: str) -> None:
    """Add a fingerprint of streaming heads to a salt of ours, before the core hashes the blocks of a new request."""
    if heads and request.cache_salt and request.cache_salt.startswith(SALT_PREFIX):
        request.cache_salt = f"{request.cache_salt}:{heads}"


def kv_connectors(vllm_config: VllmConfig) -> set[str]:
    """Return the names of a server's KV connectors."""
    if vllm_config.cache_config.kv_offloading_size is not None:
        native = vllm_config.cache_config.kv_offloading_backend == "native"
        return {"OffloadingConnector" if native else "LMCacheMPConnector"}
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return set()
    if transfer.kv_connector != "MultiConnector":
        return {transfer.kv_connector}
    parts = transfer.kv_connector_extra_config.get("connectors", [])
    return {str(part.get("kv_connector")) for part in parts} or {"MultiConnector"}


def stores_by_token(vllm_config: VllmConfig) -> list[str]:
    """Return the KV connectors that cannot tell levels apart."""
    return sorted(kv_connectors(vllm_config) - SALTED_STORES - BY_REQUEST)


def _refusal(vllm_config: VllmConfig) -> str | None:
    if stores := stores_by_token(vllm_config):
        return (
            f"this server stores keys and values with {', '.join(stores)} by their tokens only, so a request could "
            "read those of another level"
        )
    if vllm_config.parallel_config.use_ubatching:
        return "this server splits steps into microbatches (--enable-dbo or --ubatch-size), which have no request ids"
    return None


def warn_of_stores(vllm_config: VllmConfig) -> None:
    """Warn if servers with other settings may share a store with this server, and read sparse keys from it."""
    # Engine cores check the configuration again, and would repeat the warning.
    if multiprocessing.parent_process() is None and (stores := stores_by_token(vllm_config)):
        logger.warning(
            "sparse-prefill: %s stores keys and values by their tokens only. This server writes other keys and values "
            "than stock vLLM or a server with other settings, and every server that shares the store reads them. Use a "
            "separate store, share it only with servers that have exactly these settings, or use a connector that "
            "includes cache salts (%s). Requests for another level than the server's default are refused",
            ", ".join(stores), ", ".join(sorted(SALTED_STORES)),
        )  # fmt: skip
