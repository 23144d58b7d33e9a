# SPDX-License-Identifier: Apache-2.0
"""From a model and prompts to a profile, in a folder that a run which was broken off is taken up from.

The folder holds ``job.json``, what is calibrated on what; ``prompts-0`` and so on and ``held-out-0`` and so on, the
captures, as long as they are needed; ``costs.json``; and a file for each layer with the outcomes of all that was judged
there, of the prompts and of the held-out ones. Each of these is put there whole or not at all. Searches ask again from
their beginning what such a file answers at once, so a run that was broken off, wherever that was, ends with the same
profile as one that was not; and another search or bound on the same prompts starts from what is known.

On a disk a capture takes (heads + 2 · kv heads) · head_dim elements for each token and layer: 2.6 MB for 32 tokens of
Llama-3.1-8B, 13 GB for a prompt of 32,768. They are deleted once a profile is written.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_sparse_backend.identity import PACKAGE, package_version
from vllm_sparse_backend.measure.report import versions, write_json
from vllm_sparse_backend.profiling.capture import Capture, capture_each, weights_sha256
from vllm_sparse_backend.profiling.costs import Costs, EstimatedCosts, MeasuredCosts, with_copies
from vllm_sparse_backend.profiling.judge import CapturedLayer, RememberingJudge, Served
from vllm_sparse_backend.profiling.measure import Bound, Figures, LayerJudge
from vllm_sparse_backend.profiling.prompts import PromptSet
from vllm_sparse_backend.profiling.quality import chunk_rows
from vllm_sparse_backend.settings import figures as profile_figures
from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Profile, Provenance
from vllm_sparse_kernels.attend import Engine
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

Search = Callable[[LayerJudge, Bound], list[Method]]
SLACK = 1.2
"""What held-out prompts may take of a bound."""


class Capturer(Protocol):
    """Captures prompts of a model into folders, those that are not there yet."""

    def __call__(self, model: Path, prompts: Sequence[Sequence[int]], folders: Sequence[Path]) -> Sequence[Capture]: ...


@dataclass(frozen=True)
class Tell:
    """What a run reports of its progress."""

    begin: Callable[[str, int], None] = lambda what, steps: None
    """A stage, and how many steps it has."""
    step: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Job:
    """What is calibrated, and on what. Equal jobs make equal profiles, if they read the same costs."""

    model: Path
    prompts: PromptSet
    held_out: PromptSet
    served: Served
    folder: Path
    device: str = "cpu"
    costs_path: Path | None = None
    seed: int | None = None
    """Of the prompts; None where they are the operator's own."""
    says_min_tokens: bool = False
    """Whether the profile has the positions up to which all is dense, or leaves them to the server."""
    capturer: Capturer | None = None
    """None: transformers, on this device."""
    copies: int = 1
    """Of the model's heads, side by side where costs are measured: few heads do not fill a card."""
    tell: Tell = field(default_factory=Tell)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.from_folder(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """References compute in float32, and a CPU's own bfloat16 is slow."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else "CPU"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What outcomes and costs depend on, as JSON has it."""
        through = "transformers" if self.capturer is None else type(self.capturer).__name__
        made_of = {
            "model": self.model.resolve().name, "shape": asdict(self.shape), "weights": weights_sha256(self.model),
            "through": through, "prompts": self.prompts.sha256,
            "held_out": self.held_out.sha256, **asdict(self.served), "device": self.device_name,
            "copies": self.copies, "versions": versions(),
        }  # fmt: skip
        return dict(json.loads(json.dumps(made_of)))

    def enter(self) -> None:
        """Make the folder, or see that it holds this very job. Raises ConfigurationError naming what differs."""
        path = self.folder / "job.json"
        shortest = min((len(ids) for ids in (*self.prompts.prompts, *self.held_out.prompts)), default=0)
        if shortest <= self.served.min_tokens:
            expected = f"prompts of more than {self.served.min_tokens} tokens, up to which all is dense"
            raise ConfigurationError(f"prompts: {unexpected(f'{shortest} tokens', expected)}")
        if path.exists():
            try:
                held = dict(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise ConfigurationError(f"{path}: cannot be read: {error}; delete the folder") from None
            if names := sorted(name for name in {**held, **self.identity} if held.get(name) != self.identity.get(name)):
                raise ConfigurationError(
                    f"{self.folder}: holds another job, which differs in {', '.join(names)}: name another folder with "
                    "--work, or delete it"
                )
        else:
            write_json(path, self.identity)

    @cached_property
    def costs(self) -> Costs:
        if self._card is not None:
            path = self.costs_path or self.folder / "costs.json"
            return MeasuredCosts(self._card, path, self.identity, self.copies)
        rows = chunk_rows(
            len(self.prompts.prompts[0]), self.served.chunk_tokens, torch.device("cpu"), self.served.min_tokens
        )
        return EstimatedCosts(sum(map(causal_pairs, rows)), self.shape.num_heads, self.shape.head_dim)

    @cached_property
    def _card(self) -> Any:
        if not self.device.startswith("cuda"):
            return None
        from vllm_sparse_backend.measure.card import Card

        return Card()

    @property
    def engines(self) -> Mapping[str, Engine] | None:
        """Those of a CUDA device."""
        return None if self._card is None else dict(self._card.engines)

    def captures(self, kind: str) -> list[Capture]:
        """Of ``prompts`` or of ``held-out``: what is missing of either is captured now, with one load of the model."""
        if not self._captured:
            every = {"prompts": self.prompts.prompts, "held-out": self.held_out.prompts}
            prompts = [ids for of in every.values() for ids in of]
            folders = [self.folder / f"{kind}-{i}" for kind, of in every.items() for i in range(len(of))]
            self._check_disk([ids for ids, folder in zip(prompts, folders) if not (folder / "capture.json").exists()])
            self.tell.say(f"capturing {len(prompts)} prompts")
            run = self.capturer or partial(_capture_here, device=self.device, dtype=self.dtype)
            found = list(run(self.model, prompts, folders))
            cut = len(self.prompts.prompts)
            self._captured.update({"prompts": found[:cut], "held-out": found[cut:]})
        return self._captured[kind]

    @cached_property
    def _captured(self) -> dict[str, list[Capture]]:
        return {}

    def _check_disk(self, prompts: Sequence[Sequence[int]]) -> None:
        shape = self.shape
        each = shape.num_layers * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * self.dtype.itemsize
        wanted, free = each * sum(map(len, prompts)), shutil.disk_usage(self.folder).free
        if wanted > free:
            raise ConfigurationError(
                f"{self.folder}: captures take {wanted / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB left: name "
                "a folder with more room with --work, or ask for fewer or shorter prompts"
            )

    def judge(self, layer: int, kind: str = "prompts") -> RememberingJudge:
        """Of one layer, on the prompts or on the held-out ones."""
        device = torch.device(self.device)

        def read() -> CapturedLayer:
            return CapturedLayer(self.captures(kind), layer, self.served, device, self.engines)

        path = self.folder / f"{kind}-layer-{layer:03}.json"
        judge = RememberingJudge(layer, self.shape.num_heads, self.costs, path, read)
        if isinstance(self.costs, MeasuredCosts) and kind == "prompts":
            self.costs.batches = cache(lambda: with_copies(judge.captured.batches, self.copies))
        return judge

    @cached_property
    def layers(self) -> list[int]:
        """Those that can go sparse. It is written down, as captures are deleted."""
        path = self.folder / "layers.json"
        if not path.exists():
            write_json(path, sorted(self.captures("prompts")[0].scales))
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path}: cannot be read: {error}; delete it") from None
        every = range(self.shape.num_layers)
        if not (isinstance(found, list) and found and all(layer in every for layer in found)):
            raise ConfigurationError(f"{path}: {unexpected(found, 'a list of layers of the model')}; delete it")
        return found

    def clear(self) -> None:
        """Delete the captures: they are most of the folder, and can be made again."""
        for kind, of in (("prompts", self.prompts), ("held-out", self.held_out)):
            for i in range(len(of.prompts)):
                shutil.rmtree(self.folder / f"{kind}-{i}", ignore_errors=True)
        self._captured.clear()


def _capture_here(
    model: Path, prompts: Sequence[Sequence[int]], folders: Sequence[Path], device: str, dtype: torch.dtype
) -> Sequence[Capture]:
    return list(capture_each(model, prompts, folders, device, dtype))


@dataclass(frozen=True)
class Found:
    """What a search found for one bound: methods by layer and head of the whole model, and what came of them."""

    bound: Bound
    methods: list[list[Method]]
    figures: list[list[Figures] | None]
    """On the prompts; None for layers that never go sparse."""
    held_out: list[list[Figures] | None]

    def summary(self) -> dict[str, float]:
        """Of the held-out prompts, over the heads that are not dense: what part of them holds the bound, whole and
        with ``SLACK``; the most that a head takes of it; means."""
        sparse = [
            of
            for methods, figures in zip(self.methods, self.held_out)
            for method, of in zip(methods, figures or ())
            if not isinstance(method, Dense)
        ]
        if not sparse:
            return {}
        shares = [self.bound.share(of) for of in sparse]
        every = sum(map(len, self.methods))
        figures = {
            "heads_within_bound": sum(share <= 1 for share in shares) / len(shares),
            "heads_within_1.2_of_it": sum(share <= SLACK for share in shares) / len(shares),
            "most_of_bound": max(shares),
            "error": sum(of.error for of in sparse) / len(sparse),
            "worst_error": sum(of.worst for of in sparse) / len(sparse),
            "error_of_bound": sum(of.error for of in sparse) / len(sparse) / self.bound.error,
        }
        if math.isfinite(self.bound.mean):
            figures["mean_of_bound"] = sum(of.error for of in sparse) / every / self.bound.mean
        return {name: float(f"{value:.4g}") for name, value in figures.items()}

    @property
    def density(self) -> float:
        """Mean over all layers' heads."""
        heads = [of.density for layer in self.figures for of in layer or ()]
        whole = sum(len(methods) for methods in self.methods)
        return (sum(heads) + whole - len(heads)) / whole


def mean_error(figures: Sequence[Sequence[Figures] | None], num_heads: int) -> float:
    """Of all heads of the model; those of layers that have no figures are dense."""
    return sum(of.error for layer in figures for of in layer or ()) / (len(figures) * num_heads)


def run(
    job: Job, search: Search, bounds: Mapping[str, Bound], source: str, margin: float = 0.0, unseen: bool = False
) -> Profile:
    """The profile that a search finds, with a level for each bound, checked on the held-out prompts.

    ``margin``: the share of a bound that searches leave to what prompts they have not seen may have more; ``unseen``:
    whether they leave what the prompts tell of that too (``Bound.unseen``). Raises ConfigurationError where no head of
    any layer holds the first bound.
    """
    job.enter()
    found = {name: Found(bound, [], [], []) for name, bound in bounds.items()}
    layers = job.layers
    job.tell.begin("layers", len(layers))
    for layer in range(job.shape.num_layers):
        if layer in layers:
            judge, check = job.judge(layer), job.judge(layer, "held-out")
            for one in found.values():
                methods = search(judge, one.bound.less(margin, unseen))
                one.methods.append(methods)
                one.figures.append(_of_sparse(judge, methods))
                judge.save()
                one.held_out.append(_of_sparse(check, methods))
                check.save()
            job.tell.step()
        else:
            for one in found.values():
                one.methods.append([Dense()] * job.shape.num_heads)
                one.figures.append(None)
                one.held_out.append(None)
    return profile_of(job, found, source)


def _of_sparse(judge: RememberingJudge, methods: Sequence[Method]) -> list[Figures] | None:
    """None where all heads are dense: nothing is to be judged then."""
    return None if all(isinstance(method, Dense) for method in methods) else judge.judge(methods)


def profile_of(job: Job, found: Mapping[str, Found], source: str) -> Profile:
    """The first is the profile's own level; others at which nothing goes sparse are left out, as ``exact`` is one."""
    levels = {
        name: Level.of_heads(one.methods, provenance_of(job, one, source))
        for name, one in found.items()
        if any(not isinstance(method, Dense) for layer in one.methods for method in layer)
    }
    if (first := next(iter(found))) not in levels:
        # Another in its place would be what requests get that name none.
        numbers = ":".join(f"{x:g}" for x in found[first].bound.numbers.values())
        raise ConfigurationError(
            f"{source}: no head of any layer holds the bound {numbers} of level {first} with any setting and pays: "
            "expected a larger --level, or longer prompts"
        )
    own, *others = levels
    given = {name: getattr(levels[own], name) for name in Level.model_fields}
    return Profile.model_validate({
        "format": 1, "model": job.shape, "level": own, **given,
        "min_tokens": job.served.min_tokens if job.says_min_tokens else None,
        "levels": {name: levels[name] for name in others},
    })  # fmt: skip


def provenance_of(job: Job, found: Found, source: str) -> Provenance:
    rows: dict[str, profile_figures.PerHead] = {
        name: [[getattr(of, of_name) for of in layer] if layer else None for layer in found.figures]
        for name, of_name in (("density", "density"), ("error", "error"), ("worst_error", "worst"))
    }
    return given_provenance(job, source).model_copy(
        update={
            "bounds": found.bound.numbers,
            "density": float(f"{found.density:.4g}"),
            "figures": profile_figures.Figures.of_heads(**rows),
            "held_out": found.summary(),
        }
    )


def given_provenance(job: Job, source: str) -> Provenance:
    """What is known before anything is searched."""
    return Provenance(
        tool_version=package_version(PACKAGE),
        prompts_sha256=job.prompts.sha256,
        device=job.device_name,
        source=source,
        seed=job.seed,
        versions=versions(),
    )
