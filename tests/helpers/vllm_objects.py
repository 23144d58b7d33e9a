# SPDX-License-Identifier: Apache-2.0
"""vLLM's own objects around the plugin, without a server: configuration, attention layers, builders, batches."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import AttentionConfig, CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_backend.plugin import register
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.counters import Recorder
from vllm_sparse_backend.serving.worker.metadata import SparsePrefillMetadata, SparsePrefillMetadataBuilder
from vllm_sparse_kernels.paged import PagedCache

PAGE_TOKENS = 32
CPU = torch.device("cpu")
POISON = 1e3
"""Value of places that no row owns. vLLM's CPU attention reads past a row's end and multiplies by zero, so NaN would
show there too."""

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip


def make_model(folder: Path, dtype: str = "float32", **changes: Any) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | {"dtype": dtype} | changes))
    return ModelConfig(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype=dtype)


def make_config(model: ModelConfig, settings: Any = None, backend: str | None = "sparse-prefill") -> VllmConfig:
    register()
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=PAGE_TOKENS),
        attention_config=AttentionConfig(backend=backend),
        additional_config={} if settings is None else {"sparse_prefill": settings},
    )


def make_layer(config: VllmConfig, name: str, **options: Any) -> Attention:
    """Return a layer as models make it; ``options`` go to vLLM's Attention."""
    model = config.model_config
    size = {
        "num_heads": model.get_num_attention_heads(config.parallel_config),
        "head_size": model.get_head_size(),
        "scale": model.get_head_size() ** -0.5,
        "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
    }
    default = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with set_current_vllm_config(config):
            return Attention(**(size | options), cache_config=config.cache_config, prefix=name)
    finally:
        torch.set_default_dtype(default)


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def make_layers(config: VllmConfig, numbers: Sequence[int], **options: Any) -> list[Attention]:
    return [make_layer(config, layer_name(number), **options) for number in numbers]


def make_builder(
    config: VllmConfig, layers: Sequence[Attention], cls: type[SparsePrefillMetadataBuilder] | None = None
) -> SparsePrefillMetadataBuilder:
    """Return the builder of a group of layers, as vLLM's runner makes it."""
    spec = layers[0].get_kv_cache_spec(config)
    cls = cls or layers[0].get_attn_backend().get_builder_cls()
    return cls(spec, [layer.layer_name for layer in layers], config, CPU)


def recorder_of(builder: SparsePrefillMetadataBuilder) -> Recorder:
    """Return the counts of a builder's worker."""
    return builder.worker.recorder


def make_common(
    lengths: Sequence[tuple[int, int]],
    block_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    **changes: Any,
) -> CommonAttentionMetadata:
    """Return the metadata that vLLM's runner passes to builders for rows of (context_len, query_len)."""
    starts = torch.tensor([0, *torch.tensor([q for _, q in lengths]).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor([c + q for c, q in lengths], dtype=torch.int32)
    num_tokens, num_pages = int(starts[-1]), -(-int(seq_lens.max()) // PAGE_TOKENS) + 1
    if block_table is None:
        block_table = torch.arange(len(lengths) * num_pages, dtype=torch.int32).view(len(lengths), num_pages)
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": seq_lens,
        "num_reqs": len(lengths),
        "num_actual_tokens": num_tokens,
        "max_query_len": max(q for _, q in lengths),
        "max_seq_len": int(seq_lens.max()),
        "block_table_tensor": block_table,
        "slot_mapping": torch.arange(num_tokens) if slot_mapping is None else slot_mapping,
        "seq_lens_cpu_upper_bound": seq_lens.clone(),
        "is_prefilling": torch.tensor([q > 1 for _, q in lengths]),
    }
    return CommonAttentionMetadata(**(fields | changes))


@dataclass
class Step:
    """A batch whose keys and values have been written into a layer's cache by vLLM's own operation."""

    lengths: Sequence[tuple[int, int]]
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor  # as vLLM allocates it
    common: CommonAttentionMetadata
    keys: list[torch.Tensor]  # per row [seq_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]

    def forward(self, layer: Attention, metadata: Any, **changes: Any) -> torch.Tensor:
        """Run the layer's implementation on an output full of NaN."""
        out = torch.full_like(self.query, float("nan"))
        nothing = {"key": None, "value": None}  # already in the cache
        layer.impl.forward(
            layer, self.query, **(nothing | changes), kv_cache=self.kv_cache, attn_metadata=metadata, output=out
        )
        return out

    def by_dense_backend(self, layer: Attention, builder: SparsePrefillMetadataBuilder) -> torch.Tensor:
        """Return vLLM's own result for the whole batch."""
        metadata = compat.DenseBuilder.build(builder, 0, self.common)
        assert not isinstance(metadata, SparsePrefillMetadata)
        out = torch.full_like(self.query, float("nan"))
        compat.DenseImpl.forward(layer.impl, layer, self.query, None, None, self.kv_cache, metadata, out)
        return out

    def tokens(self, row: int) -> slice:
        start = sum(q for _, q in self.lengths[:row])
        return slice(start, start + self.lengths[row][1])

    def alone(self, row: int) -> tuple[torch.Tensor, PagedCache]:
        """Return query and cache of a single row, on a single page of plain layout."""
        return self.query[self.tokens(row)], PagedCache(self.keys[row][None], self.values[row][None])


def make_step(layer: Attention, lengths: Sequence[tuple[int, int]], seed: int = 0, **changes: Any) -> Step:
    """Return rows of (context_len, query_len) with normal q, k, v on shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    dtype, impl = layer.kv_cache_torch_dtype, layer.impl
    counts = [-(-(c + q) // PAGE_TOKENS) for c, q in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).int()
    block_table = torch.full((len(lengths), max(counts) + 1), len(order) + 7, dtype=torch.int32)
    kv_cache = torch.full((len(order), impl.num_kv_heads, PAGE_TOKENS, 2 * impl.head_size), POISON, dtype=dtype)
    keys, values, slots, next_page = [], [], [], 0
    for row, (context_len, query_len) in enumerate(lengths):
        block_table[row, : counts[row]] = order[next_page : next_page + counts[row]]
        next_page += counts[row]
        positions = torch.arange(context_len + query_len)
        row_slots = block_table[row, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS
        shape = (len(positions), impl.num_kv_heads, impl.head_size)
        new = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        impl.do_kv_cache_update(layer, *new, kv_cache, row_slots)
        keys.append(new[0])
        values.append(new[1])
        slots.append(row_slots[context_len:])
    num_tokens = sum(q for _, q in lengths)
    query = torch.randn(num_tokens, impl.num_heads, impl.head_size, generator=generator).to(dtype)
    common = make_common(lengths, block_table, torch.cat(slots), **changes)
    return Step(lengths, query, kv_cache, common, keys, values)
