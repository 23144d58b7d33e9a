# SPDX-License-Identifier: Apache-2.0
"""Prompts for timing attention: queries, keys and values of one layer in a paged cache, prefilled in chunks.

Attention over random normal data is dense: no method can leave out any key. In ``planted_prompt`` a share ``DENSITY``
of the keys, in runs of ``RUN_TOKENS``, matches the queries of its kv head and has nearly all of the softmax's mass. The
density is therefore known, and methods that select by attention mass find it.
"""

from dataclasses import dataclass, replace

import torch

from vllm_sparse_backend.calibration.judge import chunk_rows, paged
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_kernels import PagedCache, Rows
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.rows import ceil_div

DENSITY = 0.1
RUN_TOKENS = 64
PLANTED = 9.0
"""Length of the vector that queries and planted keys share. It raises scaled scores by about 7 at head_dim 128."""


@dataclass(frozen=True)
class Heads:
    """Heads of one layer on one rank; the defaults fit 8B models of the Llama and Qwen families."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.num_heads} heads, {self.num_kv_heads} kv heads, head_dim {self.head_dim}, {dtype}"

    def model(self, num_layers: int) -> ModelShape:
        return ModelShape(
            architecture="Made",
            num_layers=num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


def chunk_of(whole: Batch, context_len: int, query_len: int) -> Batch:
    """Return the step that prefills ``query_len`` tokens of a prompt after ``context_len`` cached tokens."""
    rows = Rows((0,), (query_len,), (context_len,), whole.rows.block_table)
    return replace(whole, q=whole.q[context_len : context_len + query_len], rows=rows)


def planted_prompt(heads: Heads, num_tokens: int, device: torch.device, seed: int = 0) -> Batch:
    """Return one layer, equal for equal arguments on the same kind of device. All seeds use the same pages."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    num_kv_heads, head_dim = heads.num_kv_heads, heads.head_dim
    wanted = PLANTED * torch.nn.functional.normalize(normal(num_kv_heads, 1, head_dim), dim=-1)
    runs = torch.rand(ceil_div(num_tokens, RUN_TOKENS), num_kv_heads, 1, generator=generator, device=device) < DENSITY
    planted = runs.repeat_interleave(RUN_TOKENS, 0)[:num_tokens]
    k = normal(num_tokens, num_kv_heads, head_dim) + planted * wanted[:, 0]
    v = normal(num_tokens, num_kv_heads, head_dim)
    q = normal(num_tokens, num_kv_heads, heads.num_heads // num_kv_heads, head_dim) + wanted
    keys, values = paged(torch.cat((k, v), -1).to(heads.dtype)).split(head_dim, -1)  # next to each other, as in vLLM
    (rows,) = chunk_rows(num_tokens, num_tokens, device)
    return Batch(q.flatten(1, 2).to(heads.dtype), PagedCache(keys, values), rows, head_dim**-0.5)
