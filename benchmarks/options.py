# SPDX-License-Identifier: Apache-2.0
"""Options that the lab's programs share, and how they show what comes of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.method_specs import MethodSpec
from vllm_sparse_backend.config.errors import not_one_of
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.evaluation.attention_prompts import AttentionPrompt
from vllm_sparse_backend.evaluation.cuda_device import Card
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer, layers_of
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels import AttendOptions, PagedCache, SparseIndex
from vllm_sparse_kernels.attention import AttendSpec, Engine, choose_engine

CHUNK_TOKENS = 8192
Json = Annotated[Path | None, typer.Option("--json", help="File for all that was measured.")]
Results = Annotated[Path | None, typer.Option(help="List of figures to merge this run's into.")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help="NAME or NAME:FIELD=VALUE,…; may be repeated. By default all.")
]
OneMethod = Annotated[str, typer.Option("--method", help="NAME or NAME:FIELD=VALUE,…; the server's default.")]
Contexts = Annotated[str, typer.Option(help="Cached tokens before the chunk, by comma.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a chunk, as --max-num-batched-tokens.")]
Engines = Annotated[str, typer.Option(help="Engines by comma; by default all, each where it can.")]
Model = Annotated[Path | None, typer.Option(help="Model folder whose heads are measured, in place of an 8B model's.")]
Page = Annotated[int, typer.Option("--page-size", help="Tokens of a page of the cache.")]
Clusters = Annotated[
    Path | None, typer.Option(help="Another capture of the model, to find SharePrefill's clusters in.")
]
Device = Annotated[str | None, typer.Option(help="cuda, or cpu, where references select, slowly.")]
Text = Annotated[Path | None, typer.Option(help="Text file, or folder of *.py; vLLM's sources unless given.")]


def engines_named(card: Card, names: Sequence[str]) -> list[str]:
    """These, or all. Raises BenchError where there is none of a name."""
    if unknown := [name for name in names if name not in card.engines]:
        raise BenchError(f"--engines: {not_one_of(unknown[0], card.engines)}")
    return list(names or card.engines)


def device_label(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def plan_asked(method: str, shape: ModelShape) -> tuple[str, Plan]:
    """What a figure calls it, and the plan of NAME:FIELD=VALUE, or the server's own where ``method`` is empty."""
    if not method:
        return "default", Plan.build(SparsePrefillConfig(), shape)
    spec = MethodSpec.parse(method)
    return str(spec), spec.plan(shape)


def layers_served(
    card: Card, prompts: Sequence[AttentionPrompt], plan: Plan, context_len: int, query_len: int
) -> tuple[Engine, list[TimedLayer]]:
    """The chunk in each layer, for the engine that a server would take."""
    for engine in card.engines.values():
        layers = layers_of(prompts, plan.layers, context_len, query_len, engine.name)
        if all(layer.refusal(engine) is None for layer in layers):
            return engine, layers
    raise BenchError("no engine can attend over this plan's index here")


def is_default(
    table: Mapping[str, Engine], name: str, cache: PagedCache, index: SparseIndex, options: AttendOptions | None = None
) -> bool:
    """Whether a server takes this engine for such an index, unless told: then its figures are the project's."""
    return choose_engine(table, AttendSpec.of(cache, index, options)).engine.name == name


def difference(out: torch.Tensor, dense: torch.Tensor) -> float:
    """‖out − dense‖ / ‖dense‖ over everything."""
    return float((out.float() - dense.float()).norm() / dense.float().norm())
