# SPDX-License-Identifier: Apache-2.0
"""One calibration run: a model, its prompts, and the folder from which an interrupted run resumes.

The folder contains ``job.json``, which identifies the run; captures (``prompts-0``, ``held-out-0`` and so on) until the
profile is written; ``costs.json``; and one file for each layer with the outcomes of all methods judged on it. Each file
is written atomically. A resumed search starts from the beginning and reads outcomes from these files, so an interrupted
run ends with the same profile, and another search on the same prompts reuses known outcomes.

A capture takes (heads + 2 · kv heads) · head_dim elements on disk for each token and layer: 13 GB for a prompt of
32,768 tokens of Llama-3.1-8B.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from vllm_sparse_backend.calibration.capture import Capture, capture_prompts, weights_sha256
from vllm_sparse_backend.calibration.external import read_json
from vllm_sparse_backend.calibration.head_costs import PAIR_MS, Costs, EstimatedCosts, MeasuredCosts
from vllm_sparse_backend.calibration.layer_judge import LayerPrompt, Served
from vllm_sparse_backend.calibration.prompt_chunks import chunk_rows
from vllm_sparse_backend.calibration.prompts import PromptSet
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.attention_prompts import Heads, planted_prompt
from vllm_sparse_backend.evaluation.cuda_device import Card
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer
from vllm_sparse_backend.evaluation.report import versions, write_json
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods.dense.method import Dense

OTHERS_BYTES = 2 << 30
"""Bytes of device memory outside torch that this process itself may use. More bytes belong to other processes."""

Capturer = Callable[[Path, Sequence[Sequence[int]], Sequence[Path]], Iterable[Capture]]
"""Captures the prompts of a model into folders. A folder that already holds its capture is not changed."""


@dataclass(frozen=True)
class JobProgress:
    """Callbacks through which a run reports its progress."""

    begin: Callable[[str, int], None] = lambda what, steps: None
    """Called with the name of a stage and its number of steps."""
    step: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Job:
    """The inputs of a calibration. Equal jobs produce equal profiles if they read the same costs."""

    model: Path
    prompts: PromptSet
    held_out: PromptSet
    served: Served
    folder: Path
    device: str = "cpu"
    seed: int | None = None
    """Seed of generated prompts; None for the operator's own prompts."""
    says_min_tokens: bool = False
    """Whether the profile sets ``min_tokens``; otherwise the server's setting applies."""
    capturer: Capturer | None = None
    """Captures the prompts; None to use transformers on ``device``."""
    progress: JobProgress = field(default_factory=JobProgress)

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
    def identity(self) -> dict[str, Any]:
        """Everything that outcomes and costs depend on, as plain JSON values."""
        made_of = {
            "model": self.model.resolve().name, "shape": asdict(self.shape), "weights": weights_sha256(self.model),
            "prompts": self.prompts.sha256, "held_out": self.held_out.sha256, **asdict(self.served),
            "device": self.device_name, "versions": versions(),
        }  # fmt: skip
        return dict(json.loads(json.dumps(made_of)))

    @property
    def _parts(self) -> dict[str, PromptSet]:
        return {"prompts": self.prompts, "held-out": self.held_out}

    def open_folder(self) -> None:
        """Create the job's folder, or check that it belongs to this job."""
        shortest = min((len(ids) for prompt_set in self._parts.values() for ids in prompt_set.prompts), default=0)
        if shortest <= self.served.min_tokens:
            expected = f"prompts of more than {self.served.min_tokens} tokens, because shorter prompts run dense"
            raise ConfigurationError(f"prompts: {unexpected(f'{shortest} tokens', expected)}")
        path = self.folder / "job.json"
        if not path.exists():
            write_json(path, self.identity)
            return
        held = read_json(path, dict[str, Any], "delete the folder")
        if names := sorted(name for name in {**held, **self.identity} if held.get(name) != self.identity.get(name)):
            problem = f"{self.folder}: holds another job, which differs in {', '.join(names)}"
            raise ConfigurationError(f"{problem}; name another folder with --work, or delete this one")

    @cached_property
    def costs(self) -> Costs:
        """Times of selection and attention: measured on a CUDA device, estimated elsewhere."""
        if self.card is not None:
            return MeasuredCosts(self.card, self.folder / "costs.json", self.first_batches)
        rows = chunk_rows(
            len(self.prompts.prompts[0]), self.served.chunk_tokens, torch.device("cpu"), self.served.min_tokens
        )
        full_ms = sum(map(causal_pairs, rows)) * self.shape.head_dim * PAIR_MS
        return EstimatedCosts(self.shape.num_heads, full_ms)

    def first_batches(self) -> list[Batch]:
        """Load the first prompt's chunks of the first layer that can run sparse."""
        captured = self.captures["prompts"][0]
        return LayerPrompt.read(captured, self.layers[0], self.served, torch.device(self.device)).batches

    @cached_property
    def card(self) -> Card | None:
        """The CUDA device with the engines that pass a trial, as on a server at start-up; None on a CPU."""
        card = Card() if self.device.startswith("cuda") else None
        if card is not None:
            card.engines = self.correct_engines(card.engines)
            self.warn_of_other_processes(card.device)
        return card

    def warn_of_other_processes(self, device: torch.device) -> None:
        """Report other processes that hold device memory, because their work would distort measured times."""
        free, total = torch.cuda.mem_get_info(device)
        if (held := total - free - torch.cuda.memory_reserved(device)) > OTHERS_BYTES:
            why = "their work distorts the times by which methods are chosen"
            self.progress.say(f"other processes hold {held / 2**30:.0f} GiB of {self.device_name}: {why}")

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
        """Captures of ``prompts`` and ``held-out``. Missing captures are made with one load of the model."""
        prompts = [ids for prompt_set in self._parts.values() for ids in prompt_set.prompts]
        folders = self._capture_folders()
        self._check_disk([ids for ids, folder in zip(prompts, folders) if not (folder / "capture.json").exists()])
        self.progress.say(f"capturing {len(prompts)} prompts")
        run = self.capturer or partial(capture_prompts, device=self.device, dtype=self.dtype)
        captures = list(run(self.model, prompts, folders))
        cut = len(self.prompts.prompts)
        return {"prompts": captures[:cut], "held-out": captures[cut:]}

    def _capture_folders(self) -> list[Path]:
        return [
            self.folder / f"{kind}-{i}"
            for kind, prompt_set in self._parts.items()
            for i in range(len(prompt_set.prompts))
        ]

    def _check_disk(self, prompts: Sequence[Sequence[int]]) -> None:
        shape = self.shape
        token_bytes = (
            shape.num_layers * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * self.dtype.itemsize
        )
        wanted, free = token_bytes * sum(map(len, prompts)), shutil.disk_usage(self.folder).free
        if wanted > free:
            problem = f"{self.folder}: captures take {wanted / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB left"
            raise ConfigurationError(f"{problem}; use a larger disk with --work, or fewer or shorter prompts")

    def load_or_make(self, name: str, form: Any, make: Callable[[], Any]) -> Any:
        """Read a value from the job's folder, or compute it and write it there first."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            write_json(path, make())
        return read_json(path, form)

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the layers that can run sparse, stored in a file because captures are deleted later."""
        of_model = Annotated[int, Field(ge=0, lt=self.shape.num_layers)]
        form = Annotated[list[of_model], Field(min_length=1)]
        return list(self.load_or_make("layers", form, lambda: sorted(self.captures["prompts"][0].scales)))

    def clear(self) -> None:
        """Delete the captures, which take most of the folder's space and can be made again."""
        for folder in self._capture_folders():
            shutil.rmtree(folder, ignore_errors=True)
        self.__dict__.pop("captures", None)
