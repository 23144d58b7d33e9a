# SPDX-License-Identifier: Apache-2.0
"""A mixed batch of a layer, and the references of its sparse rows."""

from collections.abc import Sequence
from dataclasses import replace

import torch

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.batches import new_index
from tests.helpers.vllm_objects import CPU, Step
from vllm_sparse_kernels import Rows, SparseIndex
from vllm_sparse_kernels.attention.reference import attend
from vllm_sparse_kernels.block_width import index_block_tokens
from vllm_sparse_kernels.call import Call, HeadGroup
from vllm_sparse_kernels.layer import attend_options
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method

# Decodes, short prompts and sparse rows in no particular order, with contexts of any length.
MIXED = ((333, 150), (40, 1), (0, 63), (1, 200), (100, 131), (0, 1), (701, 40), (64, 1), (31, 64))

MIN_TOKENS = 120

SPARSE_ROWS = (0, 3, 4, 6)

CLOSE = {"rtol": 0, "atol": 2e-6}


def dense_tokens(step: Step, row: int) -> int:
    """Return the number of a row's tokens within the first MIN_TOKENS positions."""
    return max(MIN_TOKENS - step.lengths[row][0], 0)


def sparse_part(step: Step, row: int) -> Rows:
    """Return a row alone, past the first MIN_TOKENS positions. Use the same object for all layers, because a layer
    stores data in it for the next layer."""
    context_len, query_len = step.lengths[row]
    cut = dense_tokens(step, row)
    return Rows((0,), (query_len - cut,), (context_len + cut,), torch.zeros(1, 1, dtype=torch.int32))


def reference(
    step: Step, row: int, methods: Sequence[Method], scale: float, rows: Rows | None = None
) -> tuple[torch.Tensor, SparseIndex]:
    """Run the sparse part of a row through the references of each head's method and of attend."""
    query, cache = step.alone(row)
    query, rows = query[dense_tokens(step, row) :], rows or sparse_part(step, row)
    layouts = {head: method.stripe_layout(rows) for head, method in enumerate(methods)}
    block_tokens = index_block_tokens(methods, cache.head_dim, CPU)
    index = new_index(rows, query.shape[1], block_tokens, layouts)
    call = Call(query, cache, index, scale)
    for head, method in enumerate(methods):
        METHODS[name_of(method)].reference(replace(call, heads=HeadGroup((head,), (method,))))
    out = torch.full_like(query, float("nan"))
    attend(call, out, options=attend_options(methods, CPU))
    return out, index
