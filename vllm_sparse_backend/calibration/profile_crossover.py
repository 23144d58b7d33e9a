# SPDX-License-Identifier: Apache-2.0
"""Prompt lengths from which a profile's heads are faster than dense attention on this card.

The measurement is the same as in `bench crossover`, but on the longest of the profile's prompts. Every head has its own
method, and every layer has the engine that a server uses. The profile contains the result for ``auto``.
"""

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.layer_judge import LayerPrompt, Served
from vllm_sparse_backend.config.crossover_table import ProfileCrossover
from vllm_sparse_backend.config.layer_weights import LinearSizes
from vllm_sparse_backend.config.method_parameters import parameters_of
from vllm_sparse_backend.config.settings import AUTO
from vllm_sparse_backend.evaluation.attention_prompts import AttentionPrompt
from vllm_sparse_backend.evaluation.crossover_bench import SHORTEST_TOKENS, against_dense, climb_down, crossover_ladders
from vllm_sparse_backend.evaluation.cuda_device import Card
from vllm_sparse_backend.evaluation.layer_timing import layers_of
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.rows import ceil_div

MOST_LAYERS = 8
"""Maximum number of timed sparse layers, spread over the model. The device holds them all at once."""

Methods = Sequence[Sequence[Method]]
"""The method of each layer and head of the model."""


def measure_crossover(job: Job, methods: Methods) -> ProfileCrossover | None:
    """Measure the crossover of a profile's methods, or read it from the job's folder."""
    longest = max(map(len, job.prompts.prompts))
    sparse = [layer for layer, heads in enumerate(methods) if any(not isinstance(method, Dense) for method in heads)]
    if job.card is None or not sparse or longest < 2 * SHORTEST_TOKENS:
        return None
    text = json.dumps([[parameters_of(method) for method in heads] for heads in methods])
    card, layers = job.card, sparse[:: ceil_div(len(sparse), MOST_LAYERS)]
    name = f"crossover-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    crossover: ProfileCrossover = job.load_or_make(
        name, ProfileCrossover, lambda: _measured(job, card, methods, layers).model_dump()
    )
    return crossover


def _measured(job: Job, card: Card, methods: Methods, layers: Sequence[int]) -> ProfileCrossover:
    captured = max(job.captures["prompts"], key=lambda capture: capture.num_tokens)
    whole, device = Served(captured.num_tokens), torch.device(job.device)
    prompts = [AttentionPrompt(LayerPrompt.read(captured, layer, whole, device).batches[0]) for layer in layers]
    plan = [layer_plan(methods[i], chain.from_iterable([*methods[:i], *methods[i + 1 :]])) for i in layers]
    linear = LinearSizes.of(job.model)
    engines: set[str] = set()
    least: dict[str, int | None] = {}

    def measure(seq_len: int, query_len: int) -> dict[str, Any]:
        step = layers_of(prompts, plan, seq_len - query_len, query_len, AUTO)
        attending = [layer.engine(card.engines) for layer in step]
        engines.update(engine.name for engine in attending)
        return dict(against_dense(card, step, attending, linear))

    def climb(name: str, rungs: Mapping[int, tuple[int, int]]) -> Generator[dict[str, Any], None, None]:
        least[name] = yield from climb_down(rungs, measure)

    ladders = crossover_ladders(captured.num_tokens, job.served.chunk_tokens)
    job.progress.begin("lengths", sum(map(len, ladders.values())))
    for name, rungs in ladders.items():
        for _ in climb(name, rungs):
            job.progress.step()
    return ProfileCrossover(
        device=card.name,
        engines=tuple(sorted(engines)),
        longest_tokens=captured.num_tokens,
        chunk_tokens=job.served.chunk_tokens,
        **least,
    )
