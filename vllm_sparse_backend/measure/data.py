# SPDX-License-Identifier: Apache-2.0
"""Prompts to measure on: structured ones of any length, one layer each, on the device, paged."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.measure.structured import SEQUENCE, paged_batch, structured
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.trial import Batch


@dataclass(frozen=True)
class Heads:
    """Of one layer on one rank; 8B models of Llama's and Qwen's families have these defaults."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16

    @staticmethod
    def of(model: Path | None, page_tokens: int) -> "Heads":
        """Of a model's folder, if one is given."""
        if model is None:
            return Heads(page_tokens=page_tokens)
        shape = ModelShape.from_folder(model)
        return Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, page_tokens)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.num_heads} heads, {self.num_kv_heads} kv heads, head_dim {self.head_dim}, {dtype}"

    def model(self, num_layers: int) -> ModelShape:
        return ModelShape("Structured", num_layers, self.num_heads, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class Prompt:
    """One layer of a whole prompt, of which chunks are prefilled."""

    whole: Batch

    @property
    def num_tokens(self) -> int:
        return self.whole.rows.query_lens[0]

    def chunk(self, context_len: int, query_len: int) -> Batch:
        """The step that prefills ``query_len`` tokens after ``context_len`` cached ones."""
        end = context_len + query_len
        if end > self.num_tokens:
            raise BenchError(
                f"a chunk of {query_len:,} after {context_len:,}: the prompt has {self.num_tokens:,} tokens"
            )
        rows = Rows((0,), (query_len,), (context_len,), self.whole.rows.block_table)
        return replace(self.whole, q=self.whole.q[context_len:end], rows=rows)


def without_nan(batch: Batch) -> Batch:
    """The batch, its cache free of the NaN that stand in unused places: FlashAttention multiplies these by 0."""
    for side in (batch.cache.keys, batch.cache.values):
        side.nan_to_num_()
    return batch


def structured_prompts(heads: Heads, num_tokens: int, count: int, device: torch.device) -> list[Prompt]:
    """Layers of one prompt: their seeds differ, their pages lie alike, as one block table serves all layers."""
    prompts = []
    for seed in range(count):
        data = structured(num_tokens, 0, heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.dtype, device, seed)
        prompts.append(Prompt(without_nan(paged_batch(data, heads.page_tokens))))
    return prompts


def structured_clusters(heads: Heads, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Which heads of structured prompts are alike, for SharePrefill: those of a kind."""
    kinds = sorted(set(SEQUENCE))
    return (tuple(kinds.index(SEQUENCE[head % len(SEQUENCE)]) for head in range(heads.num_heads)),) * num_layers
