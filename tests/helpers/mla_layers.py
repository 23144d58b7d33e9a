# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM's multi-head latent attention on a CPU, without a model: vLLM's own builder, implementation and chunks
around our prefill backend, and a reference in plain torch."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import AttentionConfig, CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.helpers.vllm_objects import CPU, layer_name, make_common
from vllm_sparse_backend.plugin import register
from vllm_sparse_backend.serving import hooks
from vllm_sparse_backend.serving.worker.mla_prefill import SparseMlaPrefillBackend
from vllm_sparse_backend.serving.worker.owner import Worker

PAGE_TOKENS = 16
CHUNK_TOKENS = 2048
HEADS, LATENT, NOPE, ROPE, VALUE = 2, 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
DIMS = {"kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}


def make_mla_config(model: ModelConfig, settings: Any) -> VllmConfig:
    register()
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=PAGE_TOKENS),
        attention_config=AttentionConfig(mla_prefill_backend="sparse-prefill"),
        additional_config={"sparse_prefill": settings},
    )
    # On a CPU without AMX, vLLM's chunks of MLA are as long as the longest prompt. On a GPU they are not.
    config.scheduler_config.max_num_batched_tokens = CHUNK_TOKENS
    return config


class UpProjection(torch.nn.Module):
    """The projection from latent vectors to keys and values, as vLLM's linear layers: it returns a tuple."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=generator) / LATENT**0.5

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latent @ self.weight.T, None


class MlaStep(NamedTuple):
    """Rows of (context_len, query_len), their queries, and the latent vectors of all of their tokens."""

    lengths: Sequence[tuple[int, int]]
    q: torch.Tensor
    latent: Sequence[torch.Tensor]
    """For each row [context_len + query_len, LATENT + ROPE]."""


class MlaLayers:
    """Layers that share a builder, as vLLM's runner makes them."""

    def __init__(
        self, config: VllmConfig, numbers: Sequence[int] = (0, 1), scales: Sequence[float] = (SCALE, SCALE, SCALE)
    ) -> None:
        self.config, self.names = config, [layer_name(number) for number in numbers]
        generator = torch.Generator().manual_seed(0)
        self.up_projection = UpProjection(generator)
        context = config.compilation_config.static_forward_context
        context.clear()
        self.worker = Worker(config)
        hooks._install(hooks.MLA_WORKER)
        with set_current_vllm_config(config):
            for name, scale in zip(self.names, scales, strict=False):
                impl = CPUMLAImpl(
                    HEADS, LATENT + ROPE, scale, 1, None, None, "auto", None, "decoder", None, q_lora_rank=None,
                    qk_head_dim=NOPE + ROPE, kv_b_proj=self.up_projection, **DIMS,
                )  # fmt: skip
                context[name] = SimpleNamespace(impl=impl, num_heads=HEADS, q_lora_rank=None, **DIMS)
                context[name].prefill_backend = SparseMlaPrefillBackend(HEADS, scale, **DIMS, vllm_config=config)
            spec = MLAAttentionSpec(
                block_size=PAGE_TOKENS, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.float32
            )
            self.builder = MLACommonMetadataBuilder(spec, self.names, config, CPU)
        self.layers = [context[name] for name in self.names]

    def make_step(self, lengths: Sequence[tuple[int, int]]) -> MlaStep:
        generator = torch.Generator().manual_seed(0)
        q = 2 * torch.randn(sum(length for _, length in lengths), HEADS, NOPE + ROPE, generator=generator)
        return MlaStep(lengths, q, [torch.randn(c + n, LATENT + ROPE, generator=generator) for c, n in lengths])

    def run(self, step: MlaStep, number: int = 0) -> torch.Tensor:
        """Return the layer's output [tokens, HEADS, VALUE] of a step; NaN for decodes, which are rows of one token."""
        counts = [-(-len(latent) // PAGE_TOKENS) for latent in step.latent]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
        block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        cache = torch.full((len(order), PAGE_TOKENS, LATENT + ROPE), float("nan"))
        first = 0
        for row, (latent, count) in enumerate(zip(step.latent, counts, strict=True)):
            block_table[row, :count] = order[first : first + count]
            positions = torch.arange(step.lengths[row][0])  # the context is cached; new tokens are passed on
            cache[block_table[row, positions // PAGE_TOKENS].long(), positions % PAGE_TOKENS] = latent[positions]
            first += count
        metadata = self.builder.build(0, make_common(step.lengths, block_table))
        new = torch.cat([latent[c:] for latent, (c, _) in zip(step.latent, step.lengths, strict=True)])
        output = torch.full((len(step.q), HEADS * VALUE), float("nan"))
        prefilled = slice(metadata.num_decode_tokens, None)
        q, latent, rope = step.q[prefilled], new[prefilled, :LATENT], new[prefilled, None, LATENT:]
        impl = self.layers[number].impl
        impl.forward_mha(q, latent, rope, cache, metadata, torch.ones(1), output[prefilled])
        return output.view(-1, HEADS, VALUE)

    def expected(
        self, step: MlaStep, keeps: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return attention over the keys that ``keeps(row, query positions [n, 1], key positions)`` is true for."""
        outputs, first = [], 0
        for row, (latent, (context, length)) in enumerate(zip(step.latent, step.lengths, strict=True)):
            projected = self.up_projection(latent[:, :LATENT])[0].view(-1, HEADS, NOPE + VALUE)
            rope = latent[:, None, LATENT:].expand(-1, HEADS, -1)
            keys, values = torch.cat((projected[..., :NOPE], rope), 2), projected[..., NOPE:]
            positions, all_keys = context + torch.arange(length)[:, None], torch.arange(len(latent))
            kept = all_keys <= positions
            if keeps is not None:
                kept = kept & keeps(row, positions, all_keys)
            scores = torch.einsum("qhd,khd->hqk", step.q[first : first + length], keys) * SCALE
            weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
            first += length
        return torch.cat(outputs)
