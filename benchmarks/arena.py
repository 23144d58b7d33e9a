# SPDX-License-Identifier: Apache-2.0
"""How large a server's arena is, by method, longest request and size of a step. Arithmetic: no device is needed.

    python -m benchmarks.arena [--results docs/results/arena.json]

Of one worker, for the heads of an 8B model, as an H100 or H200 has it, with ``min_tokens`` and ``min_query_tokens`` as
where nothing was measured. A server of another shape says its own size in its log.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import merge_figures
from vllm_sparse_backend.serving.arena import SEVERAL_ROWS_BYTES, SLACK, LayerNeed, largest_steps, rows_of
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.crossover import UNMEASURED_MIN_QUERY_TOKENS, UNMEASURED_MIN_TOKENS, Thresholds
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan

RESULTS = Path("docs/results/arena.json")
SHAPE = ModelShape("LlamaForCausalLM", num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128)
METHODS = (
    "default", "a_shape", "vertical_slash", "block_sparse", "anchor_attention", "sparge_attn", "flex_vertical_slash",
)  # fmt: skip
SIZES = ((32_768, 8_192), (131_072, 2_048), (131_072, 8_192), (131_072, 32_768), (1_048_576, 8_192))
"""(max_model_len, max_num_batched_tokens)."""
MAX_ROWS = 256
"""vLLM's max_num_seqs."""


def arena_bytes(method: str, max_len: int, step_tokens: int) -> int:
    """Of a server whose heads all run ``method``, on a device of which that is less than a sixteenth."""
    (groups,) = Plan.build(SparsePrefillConfig(method=method), SHAPE).layers
    assert groups is not None
    kv_heads, head_dim = SHAPE.num_kv_heads, SHAPE.head_dim
    need = LayerNeed.of(groups, kv_heads, head_dim, 2, torch.device("cpu"))
    thresholds = Thresholds(UNMEASURED_MIN_TOKENS, UNMEASURED_MIN_QUERY_TOKENS)
    needed = [need.num_bytes(rows_of(step)) for step in largest_steps(step_tokens, MAX_ROWS, max_len, thresholds)]
    return int(max(needed[0], min(max(needed), SEVERAL_ROWS_BYTES)) * SLACK)


def name_of(method: str, max_len: int, step_tokens: int) -> str:
    return f"arena, {method}, requests of {max_len:,} tokens, steps of {step_tokens:,}"


def figures() -> Iterator[dict[str, Any]]:
    for method in METHODS:
        for size in SIZES:
            yield {
                "name": name_of(method, *size), "value": arena_bytes(method, *size) >> 20, "unit": "MiB", "bar": None,
                "better": "lower", "device": "none: reckoned", "command": "python -m benchmarks.arena",
            }  # fmt: skip


def main(results: Annotated[Path, typer.Option(help="List of figures to merge these into.")] = RESULTS) -> None:
    merge_figures(results, {figure["name"]: figure for figure in figures()})


if __name__ == "__main__":
    typer.run(main)
