# SPDX-License-Identifier: Apache-2.0
"""All that a process knows of its settings: made once where it starts, and handed on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_sparse_backend.settings.config import DOCUMENTS, SparsePrefillConfig, load_config
from vllm_sparse_backend.settings.crossover import Crossover, Thresholds
from vllm_sparse_backend.settings.documents import Documents
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import DEFAULT, Plan, layer_by_level
from vllm_sparse_backend.settings.profile import EXACT, SHARE
from vllm_sparse_kernels.layer import LayerPlan


@dataclass(frozen=True)
class Resolved:
    """The configuration, the plan of each level, the server's own first, and from which lengths on sparse pays.

    Where heads choose by mass, requests that give a p are a level too.
    """

    config: SparsePrefillConfig
    documents: Documents
    plans: Mapping[str, Plan]
    table: Crossover
    device: str
    """As the table names devices."""
    pools: bool = False
    """Whether the server's requests are for embeddings, scores or classes."""

    @staticmethod
    def of(
        additional_config: Mapping[str, Any] | None, shape: ModelShape, device: str, tp_rank: int = 0, tp_size: int = 1,
        pools: bool = False,
    ) -> "Resolved":  # fmt: skip
        """Files are read where their texts did not come along (``carry``). Raises ``ConfigurationError``."""
        config = load_config(additional_config)
        read = Documents.carried(additional_config or {}, config) or Documents.read(config, shape)
        plans = Plan.by_level(config, shape, tp_rank, tp_size, read)
        if plans[DEFAULT].has_shares:
            plans[SHARE] = plans[DEFAULT]  # but for p, which each row has of its own
        return Resolved(config, read, plans, read.parse_crossover(), device, pools)

    def carry(self, additional_config: Mapping[str, Any] | None) -> dict[str, Any]:
        """``additional_config`` with the texts of all files: who gets it reads none."""
        return {**(additional_config or {}), DOCUMENTS: self.documents.data()}

    @property
    def plan(self) -> Plan:
        """The server's own."""
        return self.plans[DEFAULT]

    @property
    def is_dense(self) -> bool:
        """Whether every row is to be: of a server that pools, unless its settings say otherwise.

        What it answers is compared with what is stored, and nobody sees that a vector is a little off.
        """
        return self.pools and self.config.requests.default in (None, EXACT)

    def layer(self, number: int) -> tuple[LayerPlan, ...]:
        """One layer's groups at each level; empty where it is dense at all of them."""
        return layer_by_level(self.plans.values(), number)

    def thresholds(self, level: str, engines: Collection[str]) -> Thresholds:
        """From which lengths on rows of that level go sparse, with engines each of which some layer has."""
        return self.plans[level].thresholds(self.table, self.device, engines)

    def earliest_thresholds(self) -> Thresholds:
        """The least that any level may have, on whichever engine."""
        each = [plan.earliest_thresholds(self.table, self.device) for plan in self.plans.values()]
        return min(each, key=lambda one: one.severity)

    def exact_tokens(self) -> int | None:
        """So many positions of every row are dense at all levels; None if nothing ever goes sparse."""
        each = [plan.exact_tokens(self.table, self.device) for plan in self.plans.values()]
        return min((tokens for tokens in each if tokens is not None), default=None)
