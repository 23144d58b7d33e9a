# SPDX-License-Identifier: Apache-2.0
"""The prefill backend for multi-head latent attention (MLA) that ``MLA_FLAG`` selects.

It holds the backend that vLLM would choose itself. That backend runs every step and layer without sparse rows, and the
dense rows of all others. Sparse rows run on ``MlaPrefill``. Nothing in a step waits for the device.

vLLM creates a backend for each layer, and a copy of it for each group of layers. All of them share an ``MlaWorker``.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

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
from vllm_sparse_backend.identity import LOGGER, MLA_FLAG
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.mla_startup import refuse_stock_prefill
from vllm_sparse_backend.serving.worker import startup_log
from vllm_sparse_backend.serving.worker.compile_monitor import warming_up
from vllm_sparse_backend.serving.worker.mla_step import MlaBatch, MlaStep, SparseRows, StepCall
from vllm_sparse_backend.serving.worker.owner import Worker, worker_of
from vllm_sparse_backend.serving.worker.rows import RowClassifier, Step
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.mla import MlaCall, MlaMethod, MlaPrefill, MlaRow

logger = logging.getLogger(LOGGER)

ATTENTION_NAME = "mla"
"""Name of sparse MLA prefill in the metric ``layers``."""

WARM_UP_TOKENS = 512
"""New tokens of the calls that compile kernels. One variant of each kernel serves calls of any size."""

MERGED_TOKENS = 512
"""Tokens that ``merge`` processes at a time: for 16 heads, a float32 temporary takes 4 MiB."""


class MlaShape(NamedTuple):
    """Shape of a layer's prefill attention on this rank."""

    num_heads: int
    scale: float


class MlaWorker:
    """State that the prefill backends of one worker share: settings, scratch memory, counters and the current rows."""

    def __init__(self, worker: Worker, shape: MlaShape) -> None:
        self.worker, self.shape = worker, shape
        self.layers: frozenset[int] = frozenset()
        self._served_layers: Mapping[int, Any] = {}
        self._numbers: Mapping[int, int] = {}
        self._device = worker.device
        self._dtype = worker.vllm_config.model_config.dtype
        self.kernels = compat.outside_memory_pool(worker.vllm_config, self._device, self._allocate)
        self._row_classifier: RowClassifier | None = None
        self._batch: tuple[Step | None, MlaBatch | None] = (None, None)

    def _allocate(self) -> MlaPrefill:
        with _usual_defaults():
            return self._allocated()

    def _allocated(self) -> MlaPrefill:
        refusal = MlaPrefill.refusal(self._device)
        if refusal is not None:
            raise ConfigurationError(f"{MLA_FLAG}: {refusal}")
        vllm_config, method = self.worker.vllm_config, _method_of(self.worker)
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        key_tokens = max(step_tokens, compat.mla_chunk_tokens(vllm_config))
        kernels = MlaPrefill(*self.shape, step_tokens, key_tokens, self._device, selects=isinstance(method, TopP))
        self.uncounted = torch.zeros(1, dtype=torch.int64, device=self._device)
        if not compat.IS_CPU:
            methods: list[MlaMethod] = [method]
            if isinstance(method, TopP):  # requests may ask for any p, and 1 needs no selection
                methods = [replace(method, kept_mass=share) for share in (1.0, 0.5)]
            with warming_up():
                for to_compile in methods:
                    self._warm_up(kernels, to_compile, min(WARM_UP_TOKENS, step_tokens))
        return kernels

    def _warm_up(self, kernels: MlaPrefill, method: MlaMethod, num_tokens: int) -> None:
        """Run new tokens and a chunk of context, with the layouts in which vLLM passes keys and values."""
        num_heads, options = self.shape.num_heads, {"dtype": self._dtype, "device": self._device}
        q = torch.randn(num_tokens, num_heads, QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM, **options)
        k = torch.randn_like(q)
        v = torch.randn(num_tokens, num_heads, QK_NOPE_HEAD_DIM + V_HEAD_DIM, **options)[..., QK_NOPE_HEAD_DIM:]
        out = torch.empty(num_tokens, num_heads, V_HEAD_DIM, **options)
        lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=self._device)
        row = MlaRow(0, num_tokens, num_tokens, 0, 0, num_tokens, num_tokens)
        for is_causal, part in (True, row), (False, row._replace(key_position=0)):
            call = kernels.prepare(method, [part], is_causal=is_causal)
            kernels.attend(call, q, k, v, out=out, lse=lse, kept_pairs=self.uncounted)

    def adopt(self) -> None:
        """Make the layers of this worker run sparse, once vLLM has built them. Later calls change nothing."""
        if self._row_classifier is not None:
            return
        vllm_config, resolved = self.worker.vllm_config, self.worker.resolved
        all_layers = mla_layers(vllm_config)
        numbers = sorted(
            number
            for number, layer in all_layers.items()
            if layer.prefill_backend.shape == self.shape
            and compat.is_stock_mla_layer(layer)
            and resolved.plan.layer(number) is not None
        )
        self._refuse_without_layers(vllm_config, all_layers, numbers)
        self.layers = frozenset(numbers)
        self._served_layers = all_layers
        self._numbers = {id(all_layers[number].impl): number for number in numbers}
        self.worker.attention_names = {
            number: ATTENTION_NAME if number in self.layers else "dense" for number in all_layers
        }
        self.worker.recorder.add_layers(numbers, resolved.plans)
        lengths = {level: resolved.lengths(level, {ENGINE}) for level in resolved.plans}
        self._row_classifier = RowClassifier(lengths, bool(numbers), self.worker.requests)
        if numbers and self.worker.rank == 0:
            self._log(vllm_config, all_layers, lengths[ON])

    def _refuse_without_layers(
        self, vllm_config: VllmConfig, all_layers: Mapping[int, Any], numbers: list[int]
    ) -> None:
        """Refuse a model whose layers do not prefill through the functions that our hooks wrap."""
        supported = [number for number, layer in all_layers.items() if compat.is_stock_mla_layer(layer)]
        if numbers or (supported and vllm_config.parallel_config.pipeline_parallel_size > 1):
            return
        kinds = sorted({type(layer).__name__ for layer in all_layers.values()})
        raise ConfigurationError(
            f"{MLA_FLAG}: given a model with the attention layers {', '.join(kinds) or 'none'}, expected at least one "
            "of vLLM's MLAAttention with dense prefill; serve the model without this flag"
        )

    def _log(self, vllm_config: VllmConfig, all_layers: Mapping[int, Any], lengths: Lengths) -> None:
        config = self.worker.resolved.config
        logger.info(
            "sparse-prefill: MLA layers %s prefill with %s, for %s; dense rows and decodes run as in stock vLLM",
            format_ranges(sorted(self.layers)), describe(_method_of(self.worker)), lengths,
        )  # fmt: skip
        dense = sorted(set(all_layers) - self.layers)
        if dense:
            logger.info("sparse-prefill: MLA layers %s prefill dense", format_ranges(dense))
        if AUTO in (config.min_tokens, config.min_query_tokens):
            logger.info(
                "sparse-prefill: no crossover of MLA is measured on any device: auto uses the conservative defaults; "
                "set min_tokens and min_query_tokens to choose other numbers"
            )
        startup_log.log_levels(vllm_config, self.worker.resolved, lengths)

    def prepare(self, request: RequestLevel, rows: Sequence[MlaRow], is_causal: bool) -> MlaCall:
        """Prepare rows of requests of the same level for all layers of a step."""
        method = _method_of(self.worker)
        if isinstance(method, TopP) and request.kept_mass is not None:
            method = method.with_kept_mass(request.kept_mass)
        return self.kernels.prepare(method, rows, is_causal=is_causal)

    def number_of(self, impl: Any) -> int | None:
        """Return the number of the layer with this implementation, if it can run sparse."""
        return self._numbers.get(id(impl))

    def serves(self, backend: MLAPrefillBackend) -> bool:
        """Return whether a prefill backend is that of a layer of the served model, not of a draft model."""
        return any(layer.prefill_backend is backend for layer in self._served_layers.values())

    def batch_of(
        self, common: CommonAttentionMetadata, common_prefix_len: int, max_decode_tokens: int
    ) -> MlaBatch | None:
        """Classify and count the rows of a step. Groups of layers share the result within a step."""
        step = self.worker.requests.step
        if step is not None and self._batch[0] is step:
            return self._batch[1]
        batch = self._new_batch(common, common_prefix_len, max_decode_tokens)
        self._batch = (step, batch)
        return batch

    def _new_batch(
        self, common: CommonAttentionMetadata, common_prefix_len: int, max_decode_tokens: int
    ) -> MlaBatch | None:
        assert self._row_classifier is not None
        recorder, is_counted = self.worker.recorder, self.worker.requests.is_counted
        if common.max_query_len <= 1:
            if is_counted:
                recorder.count_decodes(int(common.query_start_loc_cpu[common.num_reqs]))
            return None
        rows = self._row_classifier.classify(common, common_prefix_len, max_decode_tokens)
        if is_counted:
            recorder.count_rows(row.kind for row in rows)
        return MlaBatch(rows, is_counted)


@contextmanager
def _usual_defaults() -> Iterator[None]:
    """Restore torch's defaults, float32 on the host: vLLM builds layers with the model's dtype and its device."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _method_of(worker: Worker) -> MlaMethod:
    """Return the only method of the settings: profiles, which could have several, are refused for MLA."""
    (method,) = worker.resolved.plan.methods
    assert isinstance(method, MlaMethod)
    return method


class SparseMlaPrefillBackend(MLAPrefillBackend):
    """vLLM's own prefill backend for MLA with sparse rows."""

    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=QK_NOPE_HEAD_DIM, qk_rope_head_dim=QK_ROPE_HEAD_DIM, v_head_dim=V_HEAD_DIM)
    ]

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        vllm_config: VllmConfig,
    ) -> None:
        dims = {
            "num_heads": num_heads, "scale": scale, "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim, "v_head_dim": v_head_dim, "vllm_config": vllm_config,
        }  # fmt: skip
        super().__init__(**dims)
        self.stock = compat.stock_mla_prefill(vllm_config)(**dims)
        refuse_stock_prefill(self.stock)
        self.shape = MlaShape(num_heads, float(scale))
        worker = worker_of(vllm_config)
        if worker.mla is None:
            # With the first layer, so that vLLM counts its memory before it sizes the KV cache.
            worker.mla = MlaWorker(worker, self.shape)
        self.shared: MlaWorker = worker.mla
        self._batch: MlaBatch | None = None
        self._step: MlaStep | None = None
        self._layer: int | None = None
        self._is_of_draft_model = False

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
        clone._is_of_draft_model = not self.shared.serves(self)
        return clone

    def supports_out(self) -> bool:
        """Return whether calls write into a given tensor."""
        return bool(self.stock.supports_out())

    def begin_step(self, common: CommonAttentionMetadata, common_prefix_len: int, max_decode_tokens: int) -> None:
        """Take the rows of a step, before ``prepare_metadata``. A draft model's stay dense and are not counted."""
        if not self._is_of_draft_model:
            self._batch = self.shared.batch_of(common, common_prefix_len, max_decode_tokens)

    def begin_layer(self, impl: Any) -> None:
        """Take the implementation of the layer whose calls follow."""
        self._layer = self.shared.number_of(impl)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Divide the calls of a step among its rows."""
        super().prepare_metadata(prefill_metadata)
        self.stock.prepare_metadata(prefill_metadata)
        batch, self._batch = self._batch, None
        self._step = None
        if batch is not None:
            self._step = MlaStep.of(batch, prefill_metadata, self.stock, self.shared.prepare)

    def _sparse_step(self) -> MlaStep | None:
        """Return the step if the current layer runs any row sparse."""
        return self._step if self._layer in self.shared.layers else None

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
        step = self._sparse_step()
        if step is None:
            return self.stock.run_prefill_new_tokens(
                q=q, k=k, v=v, return_softmax_lse=return_softmax_lse, out=out, output_scale=output_scale
            )
        assert output_scale is None  # supports_quant_output is False
        out, lse = self._run(step, step.new_tokens, q, k, v, out, return_softmax_lse)
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
        step = self._sparse_step()
        if step is None:
            return self.stock.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v, out=out)
        call = step.chunks[chunk.index]
        if call.sparse:
            return self._run(step, call, q, k, v, out, True)
        stock_out, lse = self.stock.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v, out=out)
        # FlashAttention 2 pads values to the keys' width, but all parts of a step's output need the same layout.
        return stock_out[..., : self.v_head_dim].contiguous(), lse

    def _run(
        self,
        step: MlaStep,
        call: StepCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        return_softmax_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the dense and the sparse rows of a call into a single output."""
        if out is None:
            out = torch.empty(q.shape[0], self.num_heads, self.v_head_dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.num_heads, q.shape[0], dtype=torch.float32, device=q.device)
        if call.has_gaps:
            out.zero_()
            lse.fill_(-torch.inf)
        for run in call.dense:
            tensors = {"q": q[run.queries], "k": k[run.keys], "v": v[run.keys]}
            if run.chunk is not None:
                part, lse[:, run.queries] = run.stock.run_prefill_context_chunk(chunk=run.chunk, **tensors)
            elif return_softmax_lse:
                part, lse[:, run.queries] = run.stock.run_prefill_new_tokens(**tensors, return_softmax_lse=True)
            else:
                part = run.stock.run_prefill_new_tokens(**tensors, return_softmax_lse=False)
            out[run.queries] = part[..., : self.v_head_dim]
        attend = partial(self._attend, step.is_counted, k, v)
        for rows in call.sparse:
            attend(rows, q, out, lse)
        for queries, rows in call.heads:
            head_out, head_lse = torch.empty_like(out[queries]), torch.empty_like(lse[:, queries])
            attend(rows, q[queries], head_out, head_lse)
            merge(out[queries], lse[:, queries], head_out, head_lse)
        return out, lse

    def _attend(
        self,
        is_counted: bool,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: SparseRows,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Run sparse rows, and count their pairs."""
        assert self._layer is not None
        kept_pairs = self.shared.uncounted
        if is_counted:
            recorder, pairs = self.shared.worker.recorder, self.num_heads * rows.call.causal_pairs
            kept_pairs = recorder.kept_pairs_counter(self._layer, rows.level, pairs)
        self.shared.kernels.attend(rows.call, q, k, v, out=out, lse=lse, kept_pairs=kept_pairs)


def merge(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge attention over two sets of keys."""
    for first in range(0, len(out), MERGED_TOKENS):
        tokens = slice(first, first + MERGED_TOKENS)
        parts = lse[:, tokens], other_lse[:, tokens]
        merged = torch.logaddexp(*parts)
        weight, other_weight = ((part - merged).exp().t()[..., None] for part in parts)
        # Weights are float32, so products are too.
        merged_out = out[tokens] * weight
        merged_out += other_out[tokens] * other_weight
        out[tokens] = merged_out
        lse[:, tokens] = merged


def mla_layers(vllm_config: VllmConfig) -> dict[int, Any]:
    """Return the served model's layers with our prefill backend, without those of a draft model."""
    first, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    layers: dict[int, Any] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        number = compat.layer_number(name)
        has_ours = isinstance(getattr(layer, "prefill_backend", None), SparseMlaPrefillBackend)
        if has_ours and number is not None and first <= number < end:
            layers.setdefault(number, layer)
    return layers
