# SPDX-License-Identifier: Apache-2.0
"""``Resolved``: all settings of a process, resolved once at its start and passed on."""

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
    """The configuration with everything that follows from it.

    Attributes:
        config: The configuration.
        documents: Texts of the files that it names.
        plans: The plan of each level, the server's own first. If some head lets requests set p, requests with a p are
            a level too.
        table: The table of measured crossovers.
        device: Name of the device, as the table has it.
        pools: Whether requests are for embeddings, scores or classes.
    """

    config: SparsePrefillConfig
    documents: Documents
    plans: Mapping[str, Plan]
    table: Crossover
    device: str
    pools: bool = False

    @staticmethod
    def of(
        additional_config: Mapping[str, Any] | None, shape: ModelShape, device: str, tp_rank: int = 0, tp_size: int = 1,
        pools: bool = False,
    ) -> "Resolved":  # fmt: skip
        """Resolve the settings.

        Args:
            additional_config: vLLM's ``additional_config``. Files are read only if ``carry`` did not add their texts.
            shape: The whole model.
            device: Name of the device, as torch reports it.
            tp_rank: Tensor-parallel rank.
            tp_size: Number of tensor-parallel ranks.
            pools: Whether requests are for embeddings, scores or classes.

        Returns:
            The resolved settings.

        Raises:
            ConfigurationError: A setting is wrong, a file cannot be read, or a profile does not fit the model.
        """
        config = load_config(additional_config)
        read = Documents.carried(additional_config or {}, config) or Documents.read(config, shape)
        plans = Plan.by_level(config, shape, tp_rank, tp_size, read)
        if plans[DEFAULT].has_shares:
            plans[SHARE] = plans[DEFAULT]  # but for p, which each row has of its own
        return Resolved(config, read, plans, read.parse_crossover(), device, pools)

    def carry(self, additional_config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Add the texts of all files to vLLM's configuration, so that its recipients read no files.

        Args:
            additional_config: vLLM's ``additional_config``.

        Returns:
            A copy with the texts.
        """
        return {**(additional_config or {}), DOCUMENTS: self.documents.data()}

    @property
    def plan(self) -> Plan:
        """The plan of the server's own level."""
        return self.plans[DEFAULT]

    @property
    def is_dense(self) -> bool:
        """Whether every row runs dense: the default of servers of pooling models.

        Their results are compared with stored ones, and small errors of an embedding go unnoticed.
        """
        return self.pools and self.config.requests.default in (None, EXACT)

    def layer(self, number: int) -> tuple[LayerPlan, ...]:
        """Return one layer's groups of heads at each level.

        Args:
            number: Number of the layer.

        Returns:
            The groups at each level; empty if the layer is dense at all levels.
        """
        return layer_by_level(self.plans.values(), number)

    def thresholds(self, level: str, engines: Collection[str]) -> Thresholds:
        """Return the lengths from which rows of a level go sparse.

        Args:
            level: Name of the level.
            engines: Names of the attention engines that layers of the model use.

        Returns:
            The strictest thresholds of these engines.
        """
        return self.plans[level].thresholds(self.table, self.device, engines)

    def earliest_thresholds(self) -> Thresholds:
        """Return the lowest thresholds of any level with any engine.

        Returns:
            The thresholds.
        """
        each = [plan.earliest_thresholds(self.table, self.device) for plan in self.plans.values()]
        return min(each, key=lambda one: one.severity)

    def exact_tokens(self) -> int | None:
        """Return the number of leading positions of every row that are dense at all levels.

        Returns:
            The number of positions; None if no row ever goes sparse.
        """
        each = [plan.exact_tokens(self.table, self.device) for plan in self.plans.values()]
        return min((tokens for tokens in each if tokens is not None), default=None)
