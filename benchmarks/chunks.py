# SPDX-License-Identifier: Apache-2.0
"""A chunk's prefill as a server has it, for what is measured beside it."""

from collections.abc import Sequence

from vllm_sparse_backend.measure.asked import Asked
from vllm_sparse_backend.measure.card import Card
from vllm_sparse_backend.measure.data import Prompt
from vllm_sparse_backend.measure.methods import Layer, layers_of
from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_kernels.attend import Engine


def plan_asked(method: str, shape: ModelShape) -> tuple[str, Plan]:
    """What a figure calls it, and the plan of NAME:FIELD=VALUE, or the server's own where ``method`` is empty."""
    if not method:
        return "default", Plan.build(SparsePrefillConfig(), shape)
    asked = Asked.parse(method)
    return str(asked), asked.plan(shape, None)


def layers_served(
    card: Card, prompts: Sequence[Prompt], plan: Plan, context_len: int, query_len: int
) -> tuple[Engine, list[Layer]]:
    """The chunk in each layer, for the engine that a server would take."""
    for engine in card.engines.values():
        layers = layers_of(prompts, plan, context_len, query_len, engine.name)
        if all(layer.refusal(engine) is None for layer in layers):
            return engine, layers
    raise BenchError("no engine can attend over this plan's index here")
