# SPDX-License-Identifier: Apache-2.0
"""Chooses the engines of each layer's selection and attention: the fastest that supports the layer and passes a trial.

A trial is one call on the warm-up batch. Attention is compared with float64 over the same index, and selection with the
method's portable engine. If a new compiler or driver breaks an engine, the server is therefore slower, but it starts
and its answers are correct. Each rank chooses once, at start-up. An exception that an engine raises in a later step is
not caught.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_sparse_backend.config.errors import ConfigurationError, refusal
from vllm_sparse_backend.config.keys import SETTINGS
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.config.settings import AUTO
from vllm_sparse_backend.identity import logger
from vllm_sparse_backend.serving import compat
from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, engines, widest_block
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.call import HeadGroup
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.engine_choice import EngineChoice, EngineT, choose_engine
from vllm_sparse_kernels.engine_trial import Batch, failure, selection_failure
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import USUAL_PAGE_SIZE
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec, choose_select_engine

FIELD = f"{SETTINGS}.engine"


class EnginePicker:
    """Chooses engines for attention and for selection, once for each distinct layer of a server, at start-up."""

    def __init__(self, wanted: str, table: Mapping[str, AttendEngine]) -> None:
        self.wanted = wanted
        self.candidates = list(table.values()) if wanted == AUTO else [table[wanted]]
        self._choices: dict[AttendSpec | SelectSpec, EngineChoice[Any]] = {}

    def pick_all(self, layer: Layer, batch: Batch) -> Layer:
        """Return the layer with its engines. The first layer of a kind runs the trials."""
        layer = replace(layer, select_engines=self.pick_selection(layer, batch))
        call = layer.new_call(batch.q, batch.cache, batch.rows, batch.scale)
        layer.select(call)
        return replace(layer, engine=self.pick(batch, call.index, layer.options))

    def pick(self, batch: Batch, index: SparseIndex, options: AttendOptions | None) -> AttendEngine:
        """Return the attention engine for a batch."""
        spec = AttendSpec.of(batch.cache, index, options, batch.sinks)
        work = f"attention ({FIELD} is {self.wanted!r})"
        return self._pick(spec, self.candidates, lambda engine: failure(engine, batch, index, options), work)

    def pick_selection(self, layer: Layer, batch: Batch) -> tuple[SelectEngine, ...]:
        """Return the selection engine of each group of a layer."""
        return tuple(self._pick_selection_of(group, layer, batch) for group in layer.plan.groups)

    def _pick_selection_of(self, group: HeadGroup[Method], layer: Layer, batch: Batch) -> SelectEngine:
        candidates = group.method.select_engines
        if len(candidates) == 1:
            return candidates[0]  # nothing to choose, and warm-up runs it
        # Methods with the same key run the same kernels, so a single trial is enough.
        spec = SelectSpec(group.method.group_key, batch.q.device, batch.cache.head_dim)
        work = f"selection by {name_of(group.method)} with heads of {spec.head_dim}"
        return self._pick(
            spec, candidates,
            lambda engine: selection_failure(engine, batch, layer, group.derived("in_short_contexts")), work,
        )  # fmt: skip

    def _pick(
        self,
        spec: AttendSpec | SelectSpec,
        candidates: Iterable[EngineT],
        trial: Callable[[EngineT], str | None],
        work: str,
    ) -> EngineT:
        if spec not in self._choices:
            try:
                self._choices[spec] = choose_engine(candidates, spec, trial, work)
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
        return self._choices[spec].engine

    def report(self, layers: Mapping[int, Layer]) -> None:
        """Log which layers attend and select on which engine, and why faster engines were not chosen.

        Methods with a single selection engine are left out.
        """
        not_used = {
            ("engine" if isinstance(spec, AttendSpec) else "selection engine", name, why)
            for spec, choice in self._choices.items()
            for name, why in choice.passed_over.items()
        }
        for reason in sorted(not_used):
            logger.info("sparse-prefill: %s %s not used: %s", *reason)
        used: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, layer in layers.items():
            used["attention", layer.engine.name].append(number)
            for group, engine in zip(layer.plan.groups, layer.select_engines, strict=True):
                if len(group.method.select_engines) > 1:
                    used[f"selection by {name_of(group.method)}", engine.name].append(number)
        for (work, name), numbers in sorted(used.items()):
            logger.info("sparse-prefill: %s: layers %s on %s", work, format_ranges(numbers), name)


def refuse_on_cpu(wanted: str) -> None:
    """Check that the settings name no attention engine on a CPU, where attention runs in plain torch."""
    if compat.IS_CPU and wanted != AUTO:
        raise refusal(FIELD, wanted, f"{AUTO!r}: on a CPU, attention runs in torch, without an engine")


def forecast(shape: ModelShape, method: Method) -> tuple[EngineChoice[AttendEngine], EngineChoice[SelectEngine]]:
    """Return the engines that a server would choose for attention and selection, if their trials pass.

    This is for bfloat16, stripes, and vLLM's usual cache. Raises ValueError if no engine can run here.
    """
    device = torch.device(compat.DEVICE_TYPE)
    block_tokens = widest_block(shape.head_dim, shared_bytes(device))
    if block_tokens is None:
        raise ConfigurationError(f"no block of keys with head_dim {shape.head_dim} fits into the GPU's shared memory")
    stride_token = 2 * shape.head_dim * shape.num_kv_heads
    spec = AttendSpec(
        device, torch.bfloat16, shape.head_dim, USUAL_PAGE_SIZE,
        (USUAL_PAGE_SIZE * stride_token, stride_token, 2 * shape.head_dim), block_tokens, has_stripes=True,
    )  # fmt: skip
    attention = choose_engine(engines(compat.flash_attention()).values(), spec)
    return attention, choose_select_engine(SelectSpec(method, device, shape.head_dim))
