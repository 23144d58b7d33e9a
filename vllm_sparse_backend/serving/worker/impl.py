# SPDX-License-Identifier: Apache-2.0
"""One attention layer: dense rows run on vLLM's own implementation, sparse rows through select and attend.

The cache has been written when ``forward`` is called. Nothing in ``forward`` waits for the device.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config

from vllm_sparse_backend.config.fallback import Fallback, LayerTraits, layer_fallback
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.owner import LayerLevel, Worker
from vllm_sparse_backend.serving.worker.rows import Slab, SparseStep
from vllm_sparse_kernels.layer import Layer, LayerPlan, fits_shared_memory, run, with_kept_mass
from vllm_sparse_kernels.paged import PagedCache


class SparsePrefillImpl(compat.DenseImpl):
    """Attention of one layer. It runs dense until ``adopt`` gives it levels."""

    worker: Worker
    """Set once the layer runs sparse."""
    out_dtype: torch.dtype | None = None
    """Dtype of the output. It differs from the query's dtype if the query is fp8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bound by name, because releases of vLLM differ in their arguments and in how they pass them.
        arguments = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = get_current_vllm_config()
        self.out_dtype = config.model_config.dtype
        traits = LayerTraits(
            head_dim=self.head_size,
            attn_type=arguments.get("attn_type", "decoder"),
            sliding_window=arguments["sliding_window"],
            alibi=arguments["alibi_slopes"] is not None,
            softcap=arguments.get("logits_soft_cap"),
            **compat.layer_limits(config, arguments["kv_cache_dtype"], self.supports_quant_query_input),
        )
        self.fallback: Fallback | None = layer_fallback(traits)
        self.levels: Mapping[str, LayerLevel] = {}
        """How the layer runs at each level; empty if it always runs dense."""

    @property
    def layer(self) -> Layer:
        """The methods and engines at the server's own level. The layer must run sparse."""
        return self.levels[ON].layer

    def dense_reason(self, plans: Sequence[LayerPlan]) -> Fallback | None:
        """Return why the layer prefills dense."""
        if self.fallback is not None:
            return self.fallback
        if not plans:
            return Fallback.DENSE_LAYER
        if len(plans[0].methods) != self.num_heads:
            return Fallback.OTHER_HEADS
        device = torch.device(compat.DEVICE_TYPE)
        if not all(fits_shared_memory(plan, self.head_size, device) for plan in plans):
            return Fallback.SHARED_MEMORY
        return None

    def adopt(self, number: int, levels: Mapping[str, LayerLevel], worker: Worker) -> None:
        """Make the layer run sparse from now on."""
        self.number = number
        self.levels = levels
        self.worker = worker

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
        **kwargs: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the attention of one step. vLLM has already written the cache.

        The metadata says which tokens run dense, on vLLM's own attention, and which rows run sparse: these select keys
        and attend to them.
        """
        step: SparseStep | None = getattr(attn_metadata, "sparse", None)
        if step is None or not self._runs_sparse_in(step):  # decodes, dense prefills and dense layers
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **kwargs)

        for dense in step.dense_runs:
            part = (x if x is None else x[dense.tokens] for x in (query, key, value))
            super().forward(layer, *part, kv_cache, dense.metadata, output[dense.tokens], *scales, **kwargs)
        cache = compat.with_scales(compat.paged_cache(kv_cache, self.head_size), layer)
        for slab in step.slabs:
            self.attend_sparse(slab, query, cache, output, step.is_counted)
        return output

    def _runs_sparse_in(self, step: SparseStep) -> bool:
        """Return whether the layer runs sparse at the level of any row of a step."""
        return bool(self.levels) and not all(self.levels[slab.level.name].stays_dense for slab in step.slabs)

    def attend_sparse(
        self, slab: Slab, query: torch.Tensor, cache: PagedCache, output: torch.Tensor, is_counted: bool
    ) -> None:
        """Select and attend for some of the step's rows."""
        assert self.worker.memory is not None
        arena = self.worker.memory.arena
        layer = self.levels[slab.level.name].layer
        if slab.level.kept_mass is not None:  # the p that its requests set
            layer = with_kept_mass(layer, slab.level.kept_mass)
        with arena.frame():
            call = layer.new_call(query, cache, slab.rows, self.scale * cache.score_scale, arena)
            run(layer, call, output, self.sinks, self.worker.resolved.config.check_index)
            if is_counted:
                self.worker.recorder.count_pairs(self.number, call.index, slab.level.name)
