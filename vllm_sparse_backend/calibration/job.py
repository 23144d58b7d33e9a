# SPDX-License-Identifier: Apache-2.0
"""The inputs of a calibration, and what all searches read: captures, costs, and engines of the device.

A capture takes (heads + 2 · kv heads) · head_dim elements on disk for each token and layer: 13 GB for a prompt of
32,768 tokens of Llama-3.1-8B.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from vllm_sparse_backend.calibration.capture import Capture, capture_prompts
from vllm_sparse_backend.calibration.costs import Costs, measure_costs
from vllm_sparse_backend.calibration.judge import CapturedLayer, LayerPrompt, Served
from vllm_sparse_backend.calibration.prompts import PromptSet
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.attention_prompts import Heads, planted_prompt
from vllm_sparse_backend.evaluation.cuda_device import Card
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods.dense.method import Dense

Capturer = Callable[[Path, Sequence[Sequence[int]], Sequence[Path], str, torch.dtype], Iterable[Capture]]
"""Captures the prompts of a model into folders, as ``capture_prompts`` does."""


@dataclass(frozen=True)
class Progress:
    """Callbacks through which a run reports its progress."""

    begin: Callable[[str, int], None] = lambda what, steps: None
    """Called with the name of a stage and its number of steps."""
    step: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Job:
    """The inputs of a calibration. Equal jobs with equal costs produce equal profiles."""

    model: Path
    prompts: PromptSet
    held_out: PromptSet
    served: Served
    folder: Path
    """Folder for the captures, which the caller deletes."""
    device: str = "cpu"
    seed: int | None = None
    """Seed of generated prompts; None for the operator's own prompts."""
    sets_min_tokens: bool = False
    """Whether the profile sets ``min_tokens``; otherwise the server's setting applies."""
    capturer: Capturer = capture_prompts
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        shortest = min((len(ids) for ids in (*self.prompts.prompts, *self.held_out.prompts)), default=0)
        if shortest <= self.served.min_tokens:
            expected = f"prompts of more than {self.served.min_tokens} tokens, because shorter prompts run dense"
            raise ConfigurationError(f"prompts: {unexpected(f'{shortest} tokens', expected)}")

    @cached_property
    def shape(self) -> ModelShape:
        """Layers, heads and head size of the model."""
        return ModelShape.from_folder(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to capture in: bfloat16 on CUDA; float32 on a CPU, whose bfloat16 is slow."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32

    @property
    def device_name(self) -> str:
        """Name of the CUDA device, or ``CPU``."""
        return torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else "CPU"

    @cached_property
    def costs(self) -> Costs:
        """Times of selection and attention, measured on a CUDA device."""
        if self.card is None:
            raise ConfigurationError(
                f"--device: {unexpected(self.device, 'cuda')}: this search measures times, and those of a CPU do not "
                "represent a server; use profile calibrate with another method than minference"
            )
        return measure_costs(self.card, self._batches)

    def _batches(self) -> Sequence[Batch]:
        """Load the first prompt's chunks of the first layer that can run sparse."""
        captured = self.captures["prompts"][0]
        return LayerPrompt.read(captured, self.layers[0], self.served, torch.device(self.device)).batches

    @cached_property
    def card(self) -> Card | None:
        """The CUDA device with the engines that pass a trial, as on a server at start-up; None on a CPU."""
        card = Card() if self.device.startswith("cuda") else None
        if card is not None:
            card.engines = self.correct_engines(card.engines)
        return card

    def correct_engines(self, engines: Mapping[str, AttendEngine]) -> dict[str, AttendEngine]:
        """Drop engines whose attention over a generated prompt with the model's heads is wrong."""
        shape, device = self.shape, torch.device(self.device)
        heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype=self.dtype)
        plan = layer_plan([Dense()] * shape.num_heads)
        layer = TimedLayer.of(planted_prompt(heads, 512, device).chunk(256, 256), plan, "auto")
        layer.select()
        able = {name: engine for name, engine in engines.items() if layer.refusal(engine) is None}
        wrong = {name: why for name, engine in able.items() if (why := layer.wrong(engine))}
        for name, why in wrong.items():
            self.progress.say(f"engine {name} not used: {why}")
        return {name: engine for name, engine in engines.items() if name not in wrong}

    @cached_property
    def captures(self) -> dict[str, list[Capture]]:
        """Captures of ``prompts`` and ``held-out``, made with one load of the model."""
        captures = self.capture([*self.prompts.prompts, *self.held_out.prompts])
        num_prompts = len(self.prompts.prompts)
        return {"prompts": captures[:num_prompts], "held-out": captures[num_prompts:]}

    def capture(self, prompts: Sequence[Sequence[int]]) -> list[Capture]:
        """Run the model on prompts, and write the inputs of its attention layers to the job's folder."""
        self._check_disk(prompts)
        self.progress.say(f"capturing {len(prompts)} prompts")
        folders = [self.folder / f"prompt-{i}" for i in range(len(prompts))]
        return list(self.capturer(self.model, prompts, folders, self.device, self.dtype))

    def _check_disk(self, prompts: Sequence[Sequence[int]]) -> None:
        shape = self.shape
        token_bytes = (
            shape.num_layers * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * self.dtype.itemsize
        )
        wanted, free = token_bytes * sum(map(len, prompts)), shutil.disk_usage(self.folder).free
        if wanted > free:
            problem = f"{self.folder}: captures take {wanted / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB left"
            raise ConfigurationError(f"{problem}; write the profile to a larger disk, or use fewer or shorter prompts")

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the layers that can run sparse."""
        return sorted(self.captures["prompts"][0].scales)

    def read_layer(self, kind: str, layer: int) -> CapturedLayer:
        """Load a layer of the captures of one kind."""
        device = torch.device(self.device)
        prompts = [LayerPrompt.read(captured, layer, self.served, device) for captured in self.captures[kind]]
        return CapturedLayer(prompts, self.served, self.card.engines if self.card else None)
