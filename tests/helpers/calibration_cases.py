# SPDX-License-Identifier: Apache-2.0
"""Captures of heads with columns and diagonals, without a model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.helpers.folders import model_folder
from tests.helpers.lined import lined_batch
from vllm_sparse_backend.calibration.capture import Capture, LayerTensors
from vllm_sparse_backend.calibration.costs import Cost, Costs
from vllm_sparse_backend.calibration.judge import Served
from vllm_sparse_backend.calibration.loop import Job
from vllm_sparse_backend.progress import Progress

COSTS = Costs(0.0, 4.0, lambda method: Cost(group_ms=0.01, head_ms=0.01, full_ms=1.0))
"""Preset times of a layer of four heads, which the tests' CPU cannot measure."""

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
}  # fmt: skip


class LinedCapturer:
    """Captures layers that are made from the prompt's tokens."""

    def __init__(self, left_out: Sequence[int] = ()) -> None:
        self.left_out = left_out

    def __call__(self, prompts: Sequence[Sequence[int]], folder: Path) -> list[Capture]:
        return [self.capture(ids, folder / f"prompt-{i}") for i, ids in enumerate(prompts)]

    def capture(self, ids: Sequence[int], folder: Path) -> Capture:
        folder.mkdir(parents=True)
        made = Capture(folder, len(ids))
        for layer in range(LAYERS):
            if layer not in self.left_out:
                made.add(layer, *self.layer(len(ids), random.Random(f"{layer}/{tuple(ids[:8])}").getrandbits(32)))
        return made

    def layer(self, num_tokens: int, seed: int) -> tuple[LayerTensors, float]:
        batch = lined_batch([(0, num_tokens)], HEADS, KV_HEADS, HEAD_DIM, 16, seed=seed)
        keys, values = batch.cache.gather(batch.rows.block_table[0], num_tokens)
        return LayerTensors(batch.q.cpu(), keys.cpu(), values.cpu()), batch.scale


@dataclass(frozen=True)
class StructuredJob(Job):
    capturer: LinedCapturer = field(default_factory=LinedCapturer)

    def capture(self, prompts: Sequence[Sequence[int]]) -> list[Capture]:
        return self.capturer(prompts, self.folder)


def random_prompts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(num_tokens)] for _ in range(count)]


def make_job(folder: Path, num_tokens: int = 300, num_prompts: int = 1, **changes: object) -> StructuredJob:
    """Return a job with chunks of 128 tokens, 100 dense positions, a prompt by default and another held-out prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "model": model_folder(folder.parent / "model", CONFIG), "prompts": random_prompts(num_prompts, num_tokens, 1),
        "held_out": random_prompts(1, num_tokens, 2), "served": Served(128, 100), "folder": folder,
        "device": torch.device("cpu"), "seed": None, "min_tokens": None, "progress": Progress(),
    } | changes  # fmt: skip
    return StructuredJob(**fields)
