"""From vLLM's batch to what each row runs on: decode rows and dense rows → the delegate, sparse rows → our kernels.

Rows are told apart by lengths that the host knows; nothing here waits for the device. A batch without a sparse row gets
the delegate's own metadata, untouched.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_sparse_backend import compat
from vllm_sparse_backend.config import load_config
from vllm_sparse_backend.errors import ConfigurationError
from vllm_sparse_backend.metrics import Recorder
from vllm_sparse_backend.plan import LayerPlan, Plan
from vllm_sparse_backend.reasons import Fallback
from vllm_sparse_backend.startup import no_layer_message
from vllm_sparse_kernels import Rows, SparseIndex, StripeLayout
from vllm_sparse_kernels.select.base import Method

logger = init_logger(__name__)

SPARSE, DENSE, DECODE = "sparse", "dense", "decode"


@dataclass(frozen=True)
class Delegated:
    """Neighbouring rows that the delegate runs: their tokens, and metadata as if they were the whole batch."""

    tokens: slice
    metadata: compat.DelegateMetadata


@dataclass
class SparseStep:
    """The part of a step that prefills sparsely."""

    rows: Rows
    delegated: tuple[Delegated, ...]
    _indices: dict[tuple[int, tuple[StripeLayout, ...]], SparseIndex] = field(default_factory=dict)
    _layouts: dict[Method, StripeLayout] = field(default_factory=dict)

    def index(self, groups: LayerPlan, num_heads: int, block_tokens: int) -> SparseIndex:
        """Room for one layer's selection. Layers run one after the other, and those that need equal room share it."""
        layouts = {head: self._layout(group.method.alike) for group in groups for head in group.heads}
        key = (block_tokens, tuple(layouts[head] for head in range(num_heads)))
        if key not in self._indices:
            self._indices[key] = SparseIndex.allocate(self.rows, num_heads, block_tokens, layouts)
        return self._indices[key]

    def _layout(self, method: Method) -> StripeLayout:
        if method not in self._layouts:
            self._layouts[method] = method.stripe_layout(self.rows)
        return self._layouts[method]


@dataclass
class SparsePrefillMetadata(compat.DelegateMetadata):
    """The delegate's metadata of the whole batch, for layers that stay dense, and the sparse part of the step."""

    sparse: SparseStep | None = None


@dataclass(frozen=True)
class RowKind:
    """What one row of a batch runs on, and why where it prefills dense."""

    path: str
    reason: Fallback | None = None


class SparsePrefillMetadataBuilder(compat.DelegateBuilder):
    # Metadata of another cache group would carry this group's sparse rows along.
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return compat.uniform_decode_graphs(super().get_cudagraph_support(*args, **kwargs))

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        config = load_config(vllm_config.additional_config)
        rank, size = compat.tensor_parallel(vllm_config)
        self.plan = Plan.build(config, compat.model_shape(vllm_config), rank, size)
        self.recorder = Recorder(device, config.metrics_interval_s, counts_rows=rank == 0)
        self._logged: set[Fallback] = set()
        self._adopt_layers(config.check_index)

    def _adopt_layers(self, check_index: bool) -> None:
        """Hand each layer its part of the plan, and say at start-up what will run how."""
        from vllm.model_executor.models.utils import extract_layer_index

        from vllm_sparse_backend.impl import SparsePrefillImpl

        layers = self.vllm_config.compilation_config.static_forward_context
        reasons: set[Fallback] = set()
        sparse_layers: list[int] = []
        for name in self.layer_names:
            impl = layers[name].impl
            if not isinstance(impl, SparsePrefillImpl):
                continue
            layer = extract_layer_index(name)
            reason = impl.adopt(layer, self.plan.layer(layer), self.recorder, check_index)
            if reason is None:
                sparse_layers.append(layer)
            elif reason not in reasons:
                reasons.add(reason)
                logger.info("sparse-prefill: layer %d prefills dense: %s", layer, reason.explain)
        if not sparse_layers:
            raise ConfigurationError(no_layer_message(reasons - {Fallback.DENSE_LAYER}))
        self.recorder.add_layers(sparse_layers)
        if compat.IS_CPU:
            compat.check_cpu_layout(self.isa, self.kv_cache_spec)
        for line in self.plan.describe():
            logger.info("sparse-prefill: %s", line)
        if not compat.IS_CPU:
            from vllm_sparse_backend.warmup import warm_up

            impls = [layers[name].impl for name in self.layer_names]
            sparse_impls = [impl for impl in impls if isinstance(impl, SparsePrefillImpl)]
            warm_up(sparse_impls, self.kv_cache_spec, self.vllm_config.model_config.max_model_len, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> compat.DelegateMetadata:
        common = common_attn_metadata
        seq_lens = compat.host_seq_lens(common)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        kinds = self._classify(common_prefix_len, common, starts, seq_lens)
        self._count(kinds)
        if not any(kind.path == SPARSE for kind in kinds):
            return super().build(common_prefix_len, common, fast_build)
        delegated = tuple(self._delegate(common, starts, seq_lens, kinds, fast_build))
        rows = self._sparse_rows(common, starts, seq_lens, kinds)
        # Last, as the delegate keeps one persistent buffer for its schedule: the whole batch's must be what stays.
        whole = super().build(common_prefix_len, common, fast_build)
        parts = {f.name: getattr(whole, f.name) for f in fields(whole)}
        return SparsePrefillMetadata(**parts, sparse=SparseStep(rows, delegated))

    def _classify(
        self, common_prefix_len: int, common: CommonAttentionMetadata, starts: list[int], seq_lens: list[int]
    ) -> list[RowKind]:
        """What each row runs on. Rows as short as a decode's are left to the delegate: its graphs may run them."""
        prefilling = None if common.is_prefilling is None else common.is_prefilling[: common.num_reqs].tolist()
        threshold = self.reorder_batch_threshold or 1
        batch_reason = None
        if common.causal is not True:
            batch_reason = Fallback.NON_CAUSAL
        elif common_prefix_len > 0:
            batch_reason = Fallback.CASCADE
        prefix_lm = getattr(common, "mm_req_doc_ranges", None) or {}
        kinds = []
        for i, seq_len in enumerate(seq_lens):
            query_len = starts[i + 1] - starts[i]
            if query_len <= threshold or (prefilling is not None and not prefilling[i]):
                kinds.append(RowKind(DECODE))
            elif batch_reason is not None:
                kinds.append(RowKind(DENSE, batch_reason))
            elif i in prefix_lm:
                kinds.append(RowKind(DENSE, Fallback.PREFIX_LM))
            elif seq_len < self.plan.min_tokens:
                kinds.append(RowKind(DENSE, Fallback.TOO_SHORT))
            else:
                kinds.append(RowKind(SPARSE))
        return kinds

    def _count(self, kinds: list[RowKind]) -> None:
        for kind in kinds:
            self.recorder.count_row(kind.path, kind.reason)
            if kind.reason is not None and kind.reason not in self._logged:
                self._logged.add(kind.reason)
                logger.info("sparse-prefill: a row prefills dense: %s (said once)", kind.reason.explain)
        self.recorder.flush_when_due()

    def _delegate(
        self,
        common: CommonAttentionMetadata,
        starts: list[int],
        seq_lens: list[int],
        kinds: list[RowKind],
        fast_build: bool,
    ) -> Iterator[Delegated]:
        """The runs of neighbouring rows that are not sparse, each with metadata of its own."""
        for is_sparse, group in groupby(range(len(kinds)), key=lambda i: kinds[i].path == SPARSE):
            run = list(group)
            first, end = run[0], run[-1] + 1
            if is_sparse or starts[first] == starts[end]:
                continue
            tokens = slice(starts[first], starts[end])
            part = self._part_of(common, first, end, tokens, seq_lens[first:end])
            metadata = super().build(0, part, fast_build)
            if isinstance(metadata.scheduler_metadata, torch.Tensor):
                metadata.scheduler_metadata = metadata.scheduler_metadata.clone()
            yield Delegated(tokens, metadata)

    @staticmethod
    def _part_of(
        common: CommonAttentionMetadata, first: int, end: int, tokens: slice, seq_lens: list[int]
    ) -> CommonAttentionMetadata:
        """Rows [first, end) of a batch as a batch of their own."""
        start_loc_cpu = common.query_start_loc_cpu[first : end + 1]
        per_row = {
            name: value[first:end]
            for name in (
                "seq_lens_cpu_upper_bound",
                "is_prefilling",
                "req_idx",
                "_seq_lens_cpu",
                "_num_computed_tokens_cpu",
            )
            if (value := getattr(common, name, None)) is not None
        }
        return common.replace(
            query_start_loc=common.query_start_loc[first : end + 1] - tokens.start,
            query_start_loc_cpu=start_loc_cpu - tokens.start,
            seq_lens=common.seq_lens[first:end],
            num_reqs=end - first,
            num_actual_tokens=tokens.stop - tokens.start,
            max_query_len=int((start_loc_cpu[1:] - start_loc_cpu[:-1]).max()),
            max_seq_len=max(seq_lens),
            block_table_tensor=common.block_table_tensor[first:end],
            slot_mapping=common.slot_mapping[tokens],
            _num_computed_tokens_cache=None,
            **per_row,
        )

    @staticmethod
    def _sparse_rows(
        common: CommonAttentionMetadata, starts: list[int], seq_lens: list[int], kinds: list[RowKind]
    ) -> Rows:
        ids = [i for i, kind in enumerate(kinds) if kind.path == SPARSE]
        query_lens = tuple(starts[i + 1] - starts[i] for i in ids)
        if ids[-1] - ids[0] + 1 == len(ids):
            block_table = common.block_table_tensor[ids[0] : ids[-1] + 1]
        else:
            chosen = torch.tensor(ids, pin_memory=common.block_table_tensor.is_cuda)
            block_table = common.block_table_tensor.index_select(
                0, chosen.to(common.block_table_tensor.device, non_blocking=True)
            )
        return Rows(
            tokens=tuple(starts[i] for i in ids),
            query_lens=query_lens,
            context_lens=tuple(seq_lens[i] - q for i, q in zip(ids, query_lens, strict=True)),
            block_table=block_table,
        )
