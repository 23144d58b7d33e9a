# SPDX-License-Identifier: Apache-2.0
"""One attention layer: dense rows run on vLLM's own implementation, the rest through select and attend.

The cache has been written when ``forward`` is called. Nothing in ``forward`` waits for the device.
"""

import contextlib
import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback, LayerTraits, layer_fallback
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.counters import is_counting, not_counting
from vllm_sparse_backend.serving.worker.request_tallies import Spans, add_pairs
from vllm_sparse_backend.serving.worker.shared_worker import Worker
from vllm_sparse_backend.serving.worker.step import DenseRun, Slab, SparseStep
from vllm_sparse_kernels import shared_bytes, widest_block
from vllm_sparse_kernels.layer import Layer, LayerPlan, run, with_kept_mass
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.paged import PagedCache


class SparsePrefillImpl(compat.DenseImpl):
    """Attention of one layer. Until ``adopt`` gives it a plan, and where it can't go sparse, it runs dense."""

    out_dtype: torch.dtype | None = None
    """Of results, which is not the query's where that is in fp8."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        given = inspect.signature(super().__init__).bind(*args, **more).arguments  # whatever this release has
        self.config = config = get_current_vllm_config()
        self.out_dtype = config.model_config.dtype
        attn_type = given.get("attn_type", "decoder")
        traits = LayerTraits(
            head_dim=self.head_size,
            attn_type=str(getattr(attn_type, "value", attn_type)),
            sliding_window=given["sliding_window"],
            alibi=given["alibi_slopes"] is not None,
            softcap=given.get("logits_soft_cap"),
            **compat.layer_limits(config, given["kv_cache_dtype"], self.supports_quant_query_input),
        )
        self.fallback: Fallback | None = layer_fallback(traits)
        self.worker: Worker | None = None
        self.is_adopted = False
        self.levels: dict[str, SparsePrefillImpl] = {}
        self.stays_dense = False  # at this level, though not at another

    def reason(self, levels: Sequence[LayerPlan]) -> Fallback | None:
        """Why this layer prefills dense, where this is its part of each level's plan; None if it can go sparse."""
        if self.fallback is not None:
            return self.fallback
        if not levels:
            return Fallback.DENSE_LAYER
        if sum(len(group.heads) for group in levels[0]) != self.num_heads:
            return Fallback.OTHER_HEADS
        if widest_block(self.head_size, shared_bytes(torch.device(compat.DEVICE_TYPE))) is None:
            return Fallback.SHARED_MEMORY
        return None

    @property
    def attention_name(self) -> str:
        """What computes the attention of this layer's prefills."""
        return self.layer.attention_name if self.is_adopted else "dense"

    def adopt(self, number: int, layer: Layer, worker: Worker) -> None:
        """Go sparse from now on: the model's layer of that number prefills as ``layer`` says."""
        self.number, self.layer, self.worker, self.is_adopted = number, layer, worker, True

    def at(self, level: str) -> "SparsePrefillImpl":
        """This layer as rows of that level have it: itself, unless another was adopted for it."""
        return self.levels.get(level, self)

    def adopt_levels(self, number: int, levels: Sequence[LayerPlan], worker: Worker) -> list["SparsePrefillImpl"]:
        """``adopt`` this layer's part of each level's plan, the server's own first: one of this class for each."""
        plans = worker.resolved.plans
        self.levels = {level: copy.copy(self) for level in plans if level != DEFAULT}
        each = [self, *self.levels.values()]
        for one, plan, groups in zip(each, plans.values(), levels, strict=True):
            one.adopt(number, worker.layer(groups, self.head_size), worker)
            one.stays_dense = plan.layer(number) is None
        return each

    def join(self, vllm_config: VllmConfig, device: torch.device, planned: bool = False) -> Worker:
        """What the worker's layers share, which the first of them to ask for it makes.

        ``planned``: with the plans of the model that this configuration is of. A profile run may have made it from the
        configuration of a part, whose arena is kept then.
        """
        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), SparsePrefillImpl)]
        known = [impl.worker for impl in impls if impl.worker is not None]
        fitting = [one for one in known if not planned or one.is_of(vllm_config)]
        self.worker = fitting[0] if fitting else Worker(vllm_config, device, known[0].memory if known else None)
        return self.worker

    def _reserve_in_profile_run(self, device: torch.device) -> None:
        """Now vLLM counts what is allocated. A part of a model may know its own configuration alone: then not now."""
        if self.fallback is None and self.worker is None:
            with contextlib.suppress(ConfigurationError):
                self.join(get_current_vllm_config_or_none() or self.config, device).reserve()

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
        **more: torch.Tensor | None,
    ) -> torch.Tensor:
        """query and output [num_tokens, num_heads, head_dim]; kv_cache as vLLM's backend has it, already written.

        Where the cache is in fp8, the query comes in fp8 too, rounded by vLLM's layer; the output never does. key
        and value [num_tokens, num_kv_heads, head_dim], or None where the layer reads another one's cache. What follows
        the output is the dense backend's own business.
        """
        if attn_metadata is None:
            self._reserve_in_profile_run(query.device)
        forward = super().forward
        step: SparseStep | None = getattr(attn_metadata, "sparse", None)
        if step is None or not self.is_adopted or all(self.at(slab.level).stays_dense for slab in step.slabs):
            return forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more)

        def run_dense(run: DenseRun, out: torch.Tensor) -> None:
            compat.take_prefix_ranges(run.metadata, attn_metadata, run.rows, run.tokens)
            part = (x if x is None else x[run.tokens] for x in (query, key, value))
            forward(layer, *part, kv_cache, run.metadata, out, *scales, **more)

        cache = compat.with_scales(compat.paged_cache(kv_cache, self.head_size), layer)
        levels = {slab.level for slab in step.slabs}
        held = {level for level in levels if (self.number, level) in step.held}
        probes = [probe for probe in step.probes if self.number in probe.layers]

        def go_sparse(levels: set[str]) -> None:
            for slab in step.slabs:
                if slab.level in levels:
                    self.at(slab.level).run(slab, query, cache, output, step.spans)

        with not_counting():  # of rows that run dense, for checks alone: it is overwritten
            go_sparse(held & {probe.level for probe in probes})
        of_held = {probe.level: output[probe.run.tokens].clone() for probe in probes if probe.level in held}
        if held:
            forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more)
        else:
            for run in step.dense_runs:
                run_dense(run, output[run.tokens])
        go_sparse(levels - held)
        for probe in probes:
            sparse = of_held.get(probe.level, output[probe.run.tokens])
            run_dense(probe.run, exact := torch.empty_like(sparse))
            assert self.worker is not None
            assert self.worker.guard is not None
            self.worker.guard.compare((self.number, probe.level), sparse, exact)
        return output

    def run(self, slab: Slab, query: torch.Tensor, cache: PagedCache, output: torch.Tensor, spans: Spans = ()) -> None:
        """Select and attend for some of the step's rows."""
        assert self.worker is not None
        assert self.worker.memory is not None
        arena, recorder, scale = self.worker.memory.arena, self.worker.recorder, self.scale * cache.score_scale
        with arena.frame():
            kept_mass = slab.request.kept_mass
            layer = self.layer if kept_mass is None else with_kept_mass(self.layer, kept_mass)
            check = self.worker.resolved.config.check_index
            index = run(layer, LayerInputs(query, cache, slab.rows, scale), output, arena, self.sinks, check)
            recorder.count_pairs(self.number, index, slab.level)
            if spans and is_counting():
                add_pairs(spans, index)
