# SPDX-License-Identifier: Apache-2.0
"""Which levels the requests of this server may ask for, and whose cached keys and values they may read.

Keys past the first ``exact_tokens`` positions depend on the level that wrote them, so each level's blocks have hashes
of their own from there on. Usually the server's own level has those of vLLM, which routers reckon with. With a KV
connector whose store goes by such hashes, and which other servers may share, exact requests have them: what is found
there under vLLM's own hashes is exact, whoever wrote it, and what a level wrote only servers find that have that level.
"""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError

from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.worker import resolve
from vllm_sparse_backend.settings.plan import DEFAULT
from vllm_sparse_backend.settings.profile import EXACT
from vllm_sparse_backend.settings.requests import FIELD, Choices, Mark, fingerprint

logger = logging.getLogger(LOGGER)

CHOICES = "sparse_prefill_choices"
"""Attribute of vLLM's object that takes requests in."""

BY_BLOCK_HASH = {"OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector"}
"""Connectors that keep blocks by vLLM's own hashes, which tell levels apart."""

BY_REQUEST = {
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
    "P2pNcclConnector", "DecodeBenchConnector", "HiSparseConnector", "ExampleHiddenStatesConnector",
}  # fmt: skip
"""Connectors that hand a request's blocks to that request alone."""


def choices(vllm_config: VllmConfig) -> Choices:
    """What requests of this server may ask for."""
    resolved, connectors = resolve(vllm_config), kv_connectors(vllm_config)
    own, plans = resolved.plan, resolved.plans
    if connectors & BY_BLOCK_HASH:
        salts = {level: f"{level}:{fingerprint(plan)}" for level, plan in plans.items()}
    else:
        salts = {level: level for level in (EXACT, *plans) if level != DEFAULT}
    refusal = _refusal(vllm_config, connectors)
    return Choices(own.level_names, own.level, resolved.exact_tokens(), salts, refusal)


def mark_of(front: Any, params: Any) -> Mark:
    """What a request gets; params: of sampling, or of pooling. Raises what vLLM answers with status 400.

    ``front``: vLLM's object that takes requests in, which keeps what they may ask for.
    """
    known = vars(front)
    if CHOICES not in known:
        known[CHOICES] = choices(front.vllm_config)
    try:
        return known[CHOICES].mark(getattr(params, "extra_args", None))
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def refuse_beams(vllm_xargs: Mapping[str, Any] | None) -> None:
    """Raise what vLLM answers with status 400 where a request that is searched by beams asks for a level."""
    if FIELD in (vllm_xargs or {}):
        message = f"vllm_xargs {FIELD}: given with use_beam_search, for which it is not to be had"
        raise VLLMValidationError(message, parameter="vllm_xargs")


def kv_connectors(vllm_config: VllmConfig) -> set[str]:
    """Names of the KV connectors that the server was given, or will be for its offloading, which vLLM adds late."""
    if getattr(vllm_config.cache_config, "kv_offloading_size", None) is not None:
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
    """Connectors that find keys and values by tokens alone, or nobody knows by what."""
    return sorted(kv_connectors(vllm_config) - BY_BLOCK_HASH - BY_REQUEST)


def _refusal(vllm_config: VllmConfig, connectors: set[str]) -> str | None:
    if stores := stores_by_token(vllm_config):
        return (
            f"this server keeps keys and values with {', '.join(stores)}, by their tokens alone, where a request may "
            "find what one of another level wrote"
        )
    if vllm_config.parallel_config.use_ubatching:
        return "this server splits steps into microbatches (--enable-dbo or --ubatch-size), whose rows it can't name"
    return None


def warn_of_stores(vllm_config: VllmConfig) -> None:
    """Say, where servers of other settings may share a store with this one, what becomes of its contents."""
    if stores := stores_by_token(vllm_config):
        logger.warning(
            "sparse-prefill: %s keeps keys and values by their tokens alone: past the first positions, which are "
            "exact, what this server writes is not what stock vLLM or other settings would write, and all that share "
            "the store will read it. Give it a store of its own, or share it with servers of these very settings "
            "only; use a connector that keeps blocks by vLLM's hashes (%s), which tell them apart. Requests that ask "
            "for another level than the server's own are refused", ", ".join(stores), ", ".join(sorted(BY_BLOCK_HASH)),
        )  # fmt: skip
