# SPDX-License-Identifier: Apache-2.0
"""Which levels the requests of this server may ask for, and whose cached keys and values they may read.

Keys past the first ``exact_tokens`` positions depend on the level that wrote them, so each level's blocks have hashes
of their own from there on. Usually the server's own level has those of vLLM, which routers reckon with. With a KV
connector whose store goes by such hashes, and which other servers may share, exact requests have them: what is found
there under vLLM's own hashes is exact, whoever wrote it, and what a level wrote only servers find that have that level.
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
from vllm_sparse_backend.config.request_levels import FIELD, REPORT, Choices, Mark, RequestLevel, Ticket, fingerprint
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import KEY, OPTION
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import resolve

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


def choices(vllm_config: VllmConfig, resolved: Resolved | None = None) -> Choices:
    """What requests of this server may ask for. Raises ConfigurationError where its policy cannot be kept to."""
    resolved, connectors = resolved or resolve(vllm_config), kv_connectors(vllm_config)
    own, policy = resolved.plan, resolved.config.requests
    refusal = _refusal(vllm_config, connectors)
    known = Choices(own.level_names, own.level, resolved.exact_tokens(), {}, refusal, own.has_shares)
    if resolved.is_dense:
        policy = policy.model_copy(update={"default": EXACT})
    found = known.under(policy)
    if connectors & BY_BLOCK_HASH:
        numbers = resolved.numbers()
        salts = {level: f"{level}:{fingerprint(plan, numbers[level])}" for level, plan in resolved.plans.items()}
    else:
        salts = {level: level for level in (EXACT, *resolved.plans) if level != found.default}
    one_for_all = {EXACT, DEFAULT} if resolved.pools else {*found.levels, DEFAULT}
    _refuse_mixture(found, {DEFAULT} if vllm_config.parallel_config.use_ubatching else one_for_all)
    return replace(found, salts=salts)


def _refuse_mixture(found: Choices, one_for_all: set[str]) -> None:
    """Raise ConfigurationError where a policy gives requests what nothing keeps apart here, or nothing carries on."""
    given = {found.default, *found.models.values()}
    if found.refusal is not None and (len(given) > 1 or not given <= one_for_all):
        raise ConfigurationError(
            f"{OPTION} {KEY}.requests: given {', '.join(sorted(given))} for requests that ask for none, but "
            f"{found.refusal}"
        )


def choices_at(front: Any) -> Choices:
    """Those of vLLM's object that takes requests in, which keeps them."""
    known = vars(front)
    if CHOICES not in known:
        known[CHOICES] = choices(front.vllm_config)
    found: Choices = known[CHOICES]
    return found


def front_of(client: Any) -> Any:
    """That object, of a server's engine client."""
    return getattr(client, "input_processor", client)


def mark_of(front: Any, params: Any) -> Mark:
    """The mark of a request that vLLM turns into an engine request.

    Args:
        front: vLLM's object that takes requests in.
        params: the request's SamplingParams or PoolingParams.

    Raises:
        VLLMValidationError: the request may not have its level; vLLM answers with status 400.
    """
    known, extra_args = choices_at(front), getattr(params, "extra_args", None) or {}
    asked = extra_args.get(FIELD)
    if isinstance(asked, RequestLevel):  # of an HTTP request, checked as its body came in
        return known.mark(asked)
    try:
        return known.mark(known.level_of(extra_args))
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


@dataclass
class HttpRequest:
    """The HTTP request at hand, as the middleware knows it once the body has been read."""

    level: RequestLevel | None = None
    """None where the body asks for none, and the served model that it names has none of its own."""
    ticket: Ticket | None = None
    """Under which workers count for this request's report; None if its answer will bear none."""


HTTP_REQUEST: ContextVar[HttpRequest | None] = ContextVar("sparse_prefill_http_request", default=None)
"""A context variable, as vLLM has no argument for it: beam search and scores of labels make sampling parameters of
their own, which lose what stands in a body's ``vllm_xargs``, and so do some paths of some releases."""


def apply_http_request(params: Any) -> None:
    """Put the level and the ticket of the HTTP request at hand, if it has them, into sampling parameters made for it.

    Args:
        params: vLLM's SamplingParams, whose ``extra_args`` is replaced.
    """
    http_request = HTTP_REQUEST.get()
    if http_request is None:
        return
    values = {FIELD: http_request.level, REPORT: http_request.ticket}
    if values := {key: value for key, value in values.items() if value is not None}:
        params.extra_args = {**(params.extra_args or {}), **values}


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
    if compat.pools(vllm_config):
        return "this server pools, and has one level for all requests"
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
