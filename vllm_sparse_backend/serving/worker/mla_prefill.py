# SPDX-License-Identifier: Apache-2.0
"""The prefill backend for multi-head latent attention (MLA) that ``MLA_FLAG`` selects.

It holds the backend that vLLM would choose itself. That backend runs every step and layer without sparse rows, and the
dense rows of all others. Sparse rows run on ``MlaPrefill``. Nothing in a step waits for the device.

vLLM creates a backend for each layer, and a copy of it for each group of layers. All of them share an ``MlaWorker``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from vllm_sparse_backend.config.crossover_table import AUTO, Lengths
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.mla import ENGINE, describe
from vllm_sparse_backend.config.model_check import QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM, V_HEAD_DIM
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.identity import MLA_FLAG, logger
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.mla_startup import refuse_stock_prefill
from vllm_sparse_backend.serving.worker import startup_log
from vllm_sparse_backend.serving.worker.compile_monitor import warming_up
from vllm_sparse_backend.serving.worker.layers import served_layers
from vllm_sparse_backend.serving.worker.mla_step import MlaStep, StepCall
from vllm_sparse_backend.serving.worker.owner import Worker, worker_of
from vllm_sparse_backend.serving.worker.rows import BatchRow, RowClassifier
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.mla import MlaCall, MlaMethod, MlaPrefill, MlaRow

WARM_UP_TOKENS = 512
"""New tokens of the calls that compile kernels. One variant of each kernel serves calls of any size."""


class MlaWorker:
    """State that the prefill backends of one worker share: settings, scratch memory, counters and layers."""

    def __init__(self, worker: Worker, num_heads: int, scale: float) -> None:
        if (refusal := MlaPrefill.refusal(worker.device)) is not None:
            raise ConfigurationError(f"{MLA_FLAG}: {refusal}")
        self.worker, self.num_heads, self.scale = worker, num_heads, scale
        (method,) = worker.resolved.plan.methods  # profiles, which could have several, are refused for MLA
        assert isinstance(method, MlaMethod)
        self.method: MlaMethod = method
        self.layers: Mapping[int, Any] = {}
        """The served model's layers by number, once ``adopt`` was called."""
        self.numbers: Mapping[int, int] = {}
        """Numbers of the layers that run sparse, by the ``id`` of their implementation."""
        self.kernels: MlaPrefill | None = None

    def reserve_memory(self) -> None:
        """Allocate the kernels' memory, and compile the kernels. Later calls change nothing."""
        if self.kernels is not None:
            return
        vllm_config, device = self.worker.vllm_config, self.worker.device
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        key_tokens = max(step_tokens, compat.mla_chunk_tokens(vllm_config))
        selects = isinstance(self.method, TopP)
        # The profile run is in inference mode; tensors created in it could not be written to outside of it.
        with torch.inference_mode(False):
            self.kernels = MlaPrefill(self.num_heads, self.scale, step_tokens, key_tokens, device, selects=selects)
            self.uncounted = torch.zeros(1, dtype=torch.int64, device=device)
        if compat.IS_CPU:
            return
        methods = [self.method]
        if isinstance(self.method, TopP):  # requests may ask for any p, and 1 needs no selection
            methods = [replace(self.method, kept_mass=share) for share in (1.0, 0.5)]
        with warming_up():
            for method in methods:
                self._warm_up(self.kernels, method, min(WARM_UP_TOKENS, step_tokens))

    def _warm_up(self, kernels: MlaPrefill, method: MlaMethod, num_tokens: int) -> None:
        """Run new tokens and a chunk of context, with the layouts in which vLLM passes keys and values."""
        options = {"dtype": self.worker.vllm_config.model_config.dtype, "device": self.worker.device}
        q = torch.randn(num_tokens, self.num_heads, QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM, **options)
        k = torch.randn_like(q)
        v = torch.randn(num_tokens, self.num_heads, QK_NOPE_HEAD_DIM + V_HEAD_DIM, **options)[..., QK_NOPE_HEAD_DIM:]
        out = torch.empty(num_tokens, self.num_heads, V_HEAD_DIM, **options)
        lse = torch.empty(self.num_heads, num_tokens, dtype=torch.float32, device=self.worker.device)
        row = MlaRow(0, num_tokens, num_tokens, 0, 0, num_tokens, num_tokens)
        for is_causal, part in (True, row), (False, row._replace(key_position=0)):
            call = kernels.prepare(method, [part], is_causal=is_causal)
            kernels.attend(call, q, k, v, out=out, lse=lse, kept_pairs=self.uncounted)

    def adopt(self) -> None:
        """Make the layers of this worker run sparse, once vLLM has built them. Later calls change nothing."""
        if self.layers:
            return
        self.reserve_memory()
        vllm_config, resolved = self.worker.vllm_config, self.worker.resolved
        self.layers = served_layers(
            vllm_config,
            {
                name: layer
                for name, layer in vllm_config.compilation_config.static_forward_context.items()
                if isinstance(getattr(layer, "prefill_backend", None), SparseMlaPrefillBackend)
            },
        )
        supported = [
            number
            for number, layer in self.layers.items()
            # The kernels were built with the first layer's shape.
            if layer.prefill_backend.num_heads == self.num_heads
            and layer.prefill_backend.scale == self.scale
            and compat.is_stock_mla_layer(layer)
        ]
        numbers = [number for number in supported if resolved.plan.layer(number) is not None]
        if not numbers and not (supported and vllm_config.parallel_config.pipeline_parallel_size > 1):
            kinds = sorted({type(layer).__name__ for layer in self.layers.values()})
            raise ConfigurationError(
                f"{MLA_FLAG}: given a model with the attention layers {', '.join(kinds) or 'none'}, expected at least "
                "one of vLLM's MLAAttention with dense prefill; serve the model without this flag"
            )
        self.numbers = {id(self.layers[number].impl): number for number in numbers}
        self.worker.attention_names = {number: ENGINE if number in numbers else "dense" for number in self.layers}
        lengths = {level: resolved.lengths(level, {ENGINE}) for level in resolved.plans}
        self.row_classifier = RowClassifier(lengths, self.worker.requests, cuts_rows=False)
        if numbers and self.worker.rank == 0:
            self._log(vllm_config, numbers, lengths[ON])

    def _log(self, vllm_config: VllmConfig, numbers: Sequence[int], lengths: Lengths) -> None:
        config = self.worker.resolved.config
        logger.info(
            "sparse-prefill: MLA layers %s prefill with %s, for rows that begin after %d tokens and have at least %d "
            "new ones; dense rows and decodes run as in stock vLLM",
            format_ranges(numbers), describe(self.method), lengths.min_tokens, lengths.min_query_tokens,
        )  # fmt: skip
        dense = set(self.layers) - set(numbers)
        if dense:
            logger.info("sparse-prefill: MLA layers %s prefill dense", format_ranges(dense))
        if AUTO in (config.min_tokens, config.min_query_tokens):
            logger.info(
                "sparse-prefill: no crossover of MLA is measured on any device: auto uses the conservative defaults; "
                "set min_tokens and min_query_tokens to choose other numbers"
            )
        startup_log.log_levels(vllm_config, lengths)
        startup_log.warn_if_no_chunk_begins_after(vllm_config, lengths.min_tokens)

    def prepare(self, level: RequestLevel, rows: Sequence[MlaRow], is_causal: bool) -> MlaCall:
        """Prepare rows of requests of the same level for all layers of a step."""
        assert self.kernels is not None
        method = self.method
        if isinstance(method, TopP) and level.kept_mass is not None:
            method = method.with_kept_mass(level.kept_mass)
        return self.kernels.prepare(method, rows, is_causal=is_causal)


class SparseMlaPrefillBackend(MLAPrefillBackend):
    """vLLM's own prefill backend for MLA with sparse rows."""

    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=QK_NOPE_HEAD_DIM, qk_rope_head_dim=QK_ROPE_HEAD_DIM, v_head_dim=V_HEAD_DIM)
    ]

    _rows: Sequence[BatchRow] = ()
    """All rows of a step, from ``begin_step`` until ``prepare_metadata``."""
    _step: MlaStep | None = None
    _is_counted = False
    _layer: int | None = None
    """Number of the layer whose calls follow, if it runs sparse."""
    _serves = False
    """Whether this copy is for the served model's layers (not a draft model's), and any of its layers runs sparse."""
    _counts_rows = False
    """Whether this group counts the rows of steps. All groups of a worker see the same rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stock = compat.stock_mla_prefill(self.vllm_config)(*args, **kwargs)
        refuse_stock_prefill(self.stock)
        worker = worker_of(self.vllm_config)
        if worker.mla is None:
            worker.mla = MlaWorker(worker, self.num_heads, float(self.scale))
        self.shared: MlaWorker = worker.mla

    @staticmethod
    def get_name() -> str:
        return "SPARSE_PREFILL"

    def clone(self) -> "SparseMlaPrefillBackend":
        """Return a backend for a group of layers. By then vLLM has built all layers, so they are made to run sparse.

        vLLM clones the backend of the group's first layer. Where a served and a draft model share a group, that is a
        layer of the served model, which vLLM builds first.
        """
        clone: SparseMlaPrefillBackend = super().clone()
        self.shared.adopt()
        served = [layer.prefill_backend for layer in self.shared.layers.values()]
        clone._serves = self in served and bool(self.shared.numbers)
        clone._counts_rows = self is served[0]
        return clone

    def supports_out(self) -> bool:
        """Return whether calls write into a given tensor."""
        return self.stock.supports_out()

    def begin_step(self, common: CommonAttentionMetadata, common_prefix_len: int, max_decode_tokens: int) -> None:
        """Take the rows of a step, before ``prepare_metadata``. A draft model's stay dense and are not counted."""
        if self._serves:
            self._rows = self.shared.row_classifier.rows_of_step(common, common_prefix_len, max_decode_tokens)
            self._is_counted = self.shared.worker.requests.is_counted
            if self._counts_rows:
                self.shared.worker.count_rows(common, self._rows)

    def begin_layer(self, impl: Any) -> None:
        """Take the implementation of the layer whose calls follow."""
        self._layer = self.shared.numbers.get(id(impl))

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Divide the calls of a step among its rows."""
        super().prepare_metadata(prefill_metadata)
        self.stock.prepare_metadata(prefill_metadata)
        self._step = MlaStep.of(self._rows, prefill_metadata, self.stock, self.shared.prepare) if self._rows else None
        self._rows = ()

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of new tokens among themselves."""
        if self._layer is None or self._step is None:
            return self.stock.run_prefill_new_tokens(
                q=q, k=k, v=v, return_softmax_lse=return_softmax_lse, out=out, output_scale=output_scale
            )
        assert output_scale is None  # supports_quant_output is False
        out, lse = self._run(self._layer, self._step.new_tokens, q, k, v, out)
        return (out, lse) if return_softmax_lse else out

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of new tokens over a chunk of their rows' contexts."""
        if self._layer is None or self._step is None:
            return self.stock.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v, out=out)
        return self._run(self._layer, self._step.chunks[chunk.index], q, k, v, out)

    def _run(
        self,
        layer: int,
        call: StepCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the dense and the sparse rows of a call into a single output."""
        assert self.shared.kernels is not None
        if out is None:
            out = torch.empty(q.shape[0], self.num_heads, self.v_head_dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.num_heads, q.shape[0], dtype=torch.float32, device=q.device)
        if call.has_gaps:
            out.zero_()
            lse.fill_(-torch.inf)
        for run in call.dense:
            part, lse[:, run.queries] = run.attend(q=q[run.queries], k=k[run.keys], v=v[run.keys])
            out[run.queries] = part[..., : self.v_head_dim]  # FlashAttention 2 pads values to the keys' width
        recorder, kept_pairs = self.shared.worker.recorder, self.shared.uncounted
        for rows in call.sparse:
            if self._is_counted:
                causal_pairs = self.num_heads * rows.call.causal_pairs
                kept_pairs = recorder.kept_pairs_counter(layer, rows.level, causal_pairs)
            self.shared.kernels.attend(rows.call, q, k, v, out=out, lse=lse, kept_pairs=kept_pairs)
        return out, lse
