# SPDX-License-Identifier: Apache-2.0
"""``Resolved``: all settings of a process, resolved once at its start and then passed on as a value."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_sparse_backend.config.carried import Carried
from vllm_sparse_backend.config.crossover_table import CrossoverTable, LayerSize, Lengths, Place, resolve_lengths
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON, SHARE
from vllm_sparse_backend.config.settings import SparsePrefillConfig, load_config
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods.dense.method import Dense

ANY_OTHER = "any other"
"""Placeholder for an engine without measurements."""


@dataclass(frozen=True)
class Resolved:
    """The configuration with all values that follow from it."""

    config: SparsePrefillConfig
    carried: Carried
    plans: Mapping[str, Plan]
    table: CrossoverTable
    layer_size: LayerSize

    @staticmethod
    def from_additional_config(
        additional_config: Mapping[str, Any] | None, shape: ModelShape, layer_weights: int | None, device: str,
        tp_rank: int = 0, tp_size: int = 1,
    ) -> "Resolved":  # fmt: skip
        """Resolve the settings for a rank of a model, whose linear layers have ``layer_weights`` on average."""
        config = load_config(additional_config)
        carried = Carried.of(additional_config) or Carried.read(config, device)
        plans = Plan.by_level(config, shape, tp_rank, tp_size, carried)
        if plans[ON].has_shares:
            plans[SHARE] = plans[ON]  # except for p, which each row sets
        size = LayerSize(shape.num_heads * shape.head_dim, layer_weights)
        return Resolved(config, carried, plans, carried.table_for(config), size)

    @property
    def plan(self) -> Plan:
        """The plan of the server's own level."""
        return self.plans[ON]

    def layer(self, number: int) -> tuple[LayerPlan, ...]:
        """Return one layer's plan at each level; none if it is dense at all of them.

        Rows of several levels may share a step. A level at which the layer is dense therefore gets dense heads if the
        layer is sparse at another level.
        """
        plans = [plan.layer(number) for plan in self.plans.values()]
        num_heads = max((len(plan.methods) for plan in plans if plan is not None), default=0)
        if not num_heads:
            return ()
        return tuple(LayerPlan((Dense(),) * num_heads) if plan is None else plan for plan in plans)

    def lengths(self, level: str, engines: Collection[str]) -> Lengths:
        """Return the lengths from which rows of a level run sparse: the strictest of several engines."""
        plan, lengths = self.plans[level], []
        for engine in sorted(engines):
            place = Place(self.carried.device, engine, self.layer_size)
            lengths.append(
                resolve_lengths(plan.min_tokens, plan.min_query_tokens, plan.measured_methods, self.table, place)
            )
        return Lengths.strictest(lengths)

    def lengths_by_engine(self, level: str) -> dict[str, Lengths]:
        """Return the lengths of a level with each engine, which must be the same in all processes."""
        return {
            engine: self.lengths(level, [engine]) for engine in [*self.table.engines(self.carried.device), ANY_OTHER]
        }

    def earliest_lengths(self) -> Lengths:
        """Return lengths with which all rows run sparse that do at any level with any engine, without limits on pairs.

        A server prepares for them before its engine is chosen.
        """
        lengths = [item for level in self.plans for item in self.lengths_by_engine(level).values()]
        return Lengths(min(item.min_tokens for item in lengths), min(item.min_query_tokens for item in lengths))
