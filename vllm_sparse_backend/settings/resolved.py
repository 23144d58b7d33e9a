# SPDX-License-Identifier: Apache-2.0
"""All that a process knows of its settings: made once where it starts, and handed on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_sparse_backend.settings.config import SparsePrefillConfig, load_config
from vllm_sparse_backend.settings.crossover import AUTO, Crossover, Thresholds
from vllm_sparse_backend.settings.documents import Documents
from vllm_sparse_backend.settings.keys import DEVICE, DOCUMENTS
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import DEFAULT, Plan, layer_by_level
from vllm_sparse_backend.settings.profile import EXACT, SHARE
from vllm_sparse_kernels.layer import LayerPlan

Numbers = dict[str, dict[str, list[int | None]]]
"""By level and engine, [min_tokens, min_query_tokens]: plain values, which travel between processes."""


def carried_device(additional_config: Mapping[str, Any] | None) -> str | None:
    """The device that ``auto`` was looked up for where the server started; None where nothing has been carried yet."""
    device = (additional_config or {}).get(DEVICE)
    return device if isinstance(device, str) else None


def with_carried(additional_config: Mapping[str, Any] | None, documents: Documents, device: str) -> dict[str, Any]:
    """``additional_config`` with the texts of all files and the device to look ``auto`` up for.

    A process that gets it reads no file and asks for no device.
    """
    return {**(additional_config or {}), DOCUMENTS: documents.data(), DEVICE: device}


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
    """What ``auto`` is looked up for, as the table names devices: the one on which the server started."""
    pools: bool = False
    """Whether the server's requests are for embeddings, scores or classes."""

    @staticmethod
    def of(
        additional_config: Mapping[str, Any] | None, shape: ModelShape, device: str, tp_rank: int = 0, tp_size: int = 1,
        pools: bool = False,
    ) -> "Resolved":  # fmt: skip
        """Settings for a rank of a model, from vLLM's ``additional_config``.

        Args:
            additional_config: Settings, with what was carried along (``with_carried``): then no file is read.
            shape: The model's.
            device: Of this process; what was carried goes before it.
            tp_rank: The rank whose heads the plans are for.
            tp_size: How many ranks share a layer's heads.
            pools: Whether the server's requests are for embeddings, scores or classes.

        Raises:
            ConfigurationError: The settings are wrong, a file cannot be read, or they do not fit the model.
        """
        config = load_config(additional_config)
        device = carried_device(additional_config) or device
        read = Documents.carried(additional_config or {}, config) or Documents.read(config, shape)
        plans = Plan.by_level(config, shape, tp_rank, tp_size, read)
        if plans[DEFAULT].has_shares:
            plans[SHARE] = plans[DEFAULT]  # but for p, which each row has of its own
        return Resolved(config, read, plans, read.parse_crossover(), device, pools)

    def carry(self, additional_config: Mapping[str, Any] | None) -> dict[str, Any]:
        """``additional_config`` with all that other processes need to resolve it to the same."""
        return with_carried(additional_config, self.documents, self.device)

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

    @property
    def uses_auto(self) -> bool:
        """Whether some plan's numbers depend on the device that they are looked up for."""
        return any(AUTO in (plan.min_tokens, plan.min_query_tokens) for plan in self.plans.values())

    def numbers(self) -> Numbers:
        """From which lengths on rows go sparse, at each level and with each engine: the same in all processes."""
        return {level: plan.numbers(self.table, self.device) for level, plan in self.plans.items()}

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
