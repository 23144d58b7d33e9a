# SPDX-License-Identifier: Apache-2.0
"""The small model outside of vLLM: transformers' Llama, chunk by chunk, each layer's attention as a plan has it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM

from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_kernels import PagedCache, Rows, SparseIndex
from vllm_sparse_kernels.attend.reference import attend
from vllm_sparse_kernels.layer import HeadGroup, attend_options, methods_by_head
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.width import index_block_tokens

ATTENTION = "planned"
PAGE_TOKENS = 64


def load(folder: Path) -> LlamaForCausalLM:
    AttentionInterface.register(ATTENTION, _attention)
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION, dtype=torch.float32)


Parts = tuple[Rows, Rows | None, Rows | None]


def parts_of(rows: Rows, min_tokens: int) -> Parts:
    """A step's row whole, and its queries before and from ``min_tokens`` on, None where there are none. One for all
    layers: what one keeps for the next lies there."""
    (context_len,), (query_len,) = rows.context_lens, rows.query_lens
    num_dense = min(max(min_tokens - context_len, 0), query_len)
    dense = replace(rows, query_lens=(num_dense,)) if num_dense else None
    sparse = Rows((num_dense,), (query_len - num_dense,), (context_len + num_dense,), rows.block_table)
    return rows, dense, sparse if num_dense < query_len else None


class Request:
    """One request's keys and values, and what its sparse chunks kept: (query, key) pairs by layer."""

    def __init__(self, model: LlamaForCausalLM, plan: Plan, min_tokens: int = 0) -> None:
        self.model = model
        self.plan = plan
        self.min_tokens = min_tokens
        self.cache = DynamicCache(config=model.config)
        self.kept_pairs: Counter[int] = Counter()

    @torch.inference_mode()
    def prefill(self, token_ids: list[int], chunk_tokens: int) -> torch.Tensor:
        """Log-probabilities [len(token_ids), vocabulary] of what follows each token; they come after earlier ones."""
        chunks = torch.tensor(token_ids).split(chunk_tokens)
        return torch.cat([self._step(chunk) for chunk in chunks]).log_softmax(-1)

    def _step(self, token_ids: torch.Tensor) -> torch.Tensor:
        context_len, query_len = self.cache.get_seq_length(), len(token_ids)
        pages = torch.randperm(ceil_div(context_len + query_len, PAGE_TOKENS), dtype=torch.int32)
        parts = parts_of(Rows((0,), (query_len,), (context_len,), pages[None]), self.min_tokens)
        done = self.model(token_ids[None], past_key_values=self.cache, use_cache=True, request=self, parts=parts)
        return done.logits[0]

    def keep(self, num_tokens: int) -> None:
        """Forget what was prefilled after the first ``num_tokens``."""
        self.cache.crop(num_tokens - self.cache.get_seq_length())

    def attend(self, layer: int, q: torch.Tensor, cache: PagedCache, parts: Parts, scale: float) -> torch.Tensor:
        groups = self.plan.layer(layer)
        assert groups is not None
        out, every = torch.empty_like(q), (HeadGroup(tuple(range(q.shape[1])), Dense()),)
        _, dense, sparse = parts
        if dense is not None:
            self._attend(every, q, cache, dense, out, scale)
        if sparse is not None:
            index = self._attend(groups, q, cache, sparse, out, scale)
            self.kept_pairs[layer] += int(index.kept_pairs())
        return out

    def _attend(
        self, groups: tuple[HeadGroup, ...], q: torch.Tensor, cache: PagedCache, rows: Rows, out: torch.Tensor,
        scale: float,
    ) -> SparseIndex:  # fmt: skip
        methods = methods_by_head(groups)
        layouts = {head: method.stripe_layout(rows) for head, method in enumerate(methods)}
        index = SparseIndex.allocate(rows, q.shape[1], index_block_tokens(methods, cache.head_dim, q.device), layouts)
        for group in groups:
            heads = torch.tensor(group.heads, dtype=torch.int32)
            METHODS[name_of(group.method)].reference(group.method, q, cache, index, heads, scale)
        attend(q, cache, index, out, scale, options=attend_options(methods, q.device))
        return index


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, *,
    scaling: float, request: Request, parts: Parts, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """query [1, num_heads, query_len, head_dim], key and value [1, num_kv_heads, seq_len, head_dim]."""
    cache = PagedCache(_paged(key, parts[0]), _paged(value, parts[0]))
    return request.attend(module.layer_idx, query[0].transpose(0, 1), cache, parts, scaling)[None], None


def _paged(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    pages = rows.block_table[0].long()
    padding = len(pages) * PAGE_TOKENS - rows.seq_lens[0]
    in_order = torch.nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, padding), value=float("nan"))
    paged = torch.empty(len(pages), PAGE_TOKENS, *in_order.shape[1:])
    paged[pages] = in_order.unflatten(0, (len(pages), PAGE_TOKENS))
    return paged
