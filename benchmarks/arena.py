# SPDX-License-Identifier: Apache-2.0
"""The sizes of a server's arena that docs/operations.md shows. Computed on the host; no device is needed.

    python -m benchmarks.arena [--results docs/results/arena.jsonl]

Sizes are for one worker with the heads of an 8B model, on an H100 or H200, with the ``min_tokens`` and
``min_query_tokens`` of unmeasured devices. A server of another shape logs its own size.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.attention_prompts import Heads
from benchmarks.figures import Figure, merge_figures
from vllm_sparse_backend.config.crossover_table import UNMEASURED
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.serving.worker.arena import LayerMemory, StepLimits
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.memory import META

RESULTS = Path("docs/results/arena.jsonl")
HEADS_8B = Heads()
METHODS = (
    "default", "a_shape", "vertical_slash", "block_sparse", "anchor_attention", "sparge_attn", "flex_vertical_slash",
)  # fmt: skip
SIZES = ((32_768, 8_192), (131_072, 2_048), (131_072, 8_192), (131_072, 32_768), (1_048_576, 8_192))
"""(max_model_len, max_num_batched_tokens)."""
MAX_ROWS = 256
"""vLLM's max_num_seqs."""

UNLIMITED = 1 << 62
"""Bytes of a device that does not limit the arena."""


def layer_memory(method: str, heads: Heads = HEADS_8B, params: dict[str, Any] | None = None) -> LayerMemory:
    """Return the memory of a layer whose heads all run ``method``, on an H100."""
    (plan,) = Plan.by_level(SparsePrefillConfig(method=method, params=params or {}), heads.model(1))[ON].layers
    assert plan is not None
    return LayerMemory([Layer.of(plan, heads.head_dim, META)], heads.num_kv_heads, heads.head_dim, heads.dtype)


def step_limits(max_len: int, step_tokens: int) -> StepLimits:
    """Return the limits of a server's steps."""
    limits = StepLimits.of(step_tokens, MAX_ROWS, max_len, UNMEASURED)
    assert limits is not None
    return limits


def figures() -> Iterator[Figure]:
    for method in METHODS:
        memory = layer_memory(method)
        for max_len, step_tokens in SIZES:
            name = f"arena, {method}, requests of {max_len:,} tokens, steps of {step_tokens:,}"
            num_bytes, _ = memory.arena(step_limits(max_len, step_tokens), UNLIMITED)
            yield Figure(name, num_bytes >> 20, "MiB", None, "lower", "none: computed", "python -m benchmarks.arena")


def main(results: Annotated[Path, typer.Option(help="File of figures to merge the sizes into.")] = RESULTS) -> None:
    merge_figures(results, figures())


if __name__ == "__main__":
    typer.run(main)
