# SPDX-License-Identifier: Apache-2.0
"""One layer of a model on captured prompts, selected and attended as a server on this device would prefill it.

On a CUDA device kernels select, and the engine attends that the server would choose; elsewhere the references do both.
All that a layer needs lies on the device at a time: queries, keys, values and dense outputs of every prompt, in the
model's dtype: (2 · heads + 2 · kv heads) · head_dim elements for each token of the prompts, 20 KB for Llama-3.1-8B; of
one chunk two outputs in float32 and an index; and 4 bytes for each token and head.
"""

import copy
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_backend.measure.data import without_nan
from vllm_sparse_backend.measure.report import write_json
from vllm_sparse_backend.profiling.capture import Capture
from vllm_sparse_backend.profiling.chunks import chunk_rows, dense_attention, paged
from vllm_sparse_backend.profiling.measure import RARE, WORST, Errors, Figures
from vllm_sparse_backend.profiling.outside import readable
from vllm_sparse_backend.settings.methods import parameters_of
from vllm_sparse_kernels import PagedCache
from vllm_sparse_kernels.attend import AttendSpec, Engine, choose
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import Layer, LayerPlan, layer_plan, run
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.trial import Batch

FORMAT = 3

State = dict[Hashable, Any]
"""``Rows.state`` of a chunk: what methods keep from layer to layer."""


@dataclass(frozen=True)
class Served:
    """How prompts are prefilled."""

    chunk_tokens: int = 8192
    min_tokens: int = 0
    """Positions from which on rows go sparse; those before are dense and not judged."""


@dataclass(frozen=True)
class LayerPrompt:
    """A layer's part of one prompt, on the device, in the chunks in which a server would prefill it."""

    batches: list[Batch]
    dense: list[torch.Tensor]
    """Of each chunk [query_len, num_heads, head_dim]: its output under dense attention."""
    norms: list[torch.Tensor]
    """Of each chunk [query_len, num_heads] float32: ‖o‖₁."""
    before: Sequence[State] = ()
    """Of each chunk, what the layers before have left; nothing unless given."""

    @staticmethod
    def read(
        captured: Capture, layer: int, served: Served, device: torch.device, before: Sequence[State] = ()
    ) -> "LayerPrompt":
        tensors, scale = captured.read(layer, device), captured.scales[layer]
        cache = PagedCache(paged(tensors.k), paged(tensors.v))
        rows = chunk_rows(captured.num_tokens, served.chunk_tokens, device, served.min_tokens)
        whole = dense_attention(tensors, scale)
        spans = [slice(one.context_lens[0], one.seq_lens[0]) for one in rows]
        dense = [whole[span] for span in spans]
        norms = [part.float().abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny) for part in dense]
        batches = [Batch(tensors.q[span], cache, one, scale) for span, one in zip(spans, rows, strict=True)]
        without_nan(batches[0])  # of the cache that all of them have
        return LayerPrompt(batches, dense, norms, before)

    @property
    def num_pairs(self) -> int:
        return sum(causal_pairs(batch.rows) for batch in self.batches)

    def _pass(self, chunk: int) -> Batch:
        """The chunk in a pass of its own: nothing is kept from pass to pass."""
        batch = self.batches[chunk]
        rows = replace(batch.rows)
        rows.state.update(copy.deepcopy(self.before[chunk]) if self.before else {})
        return replace(batch, rows=rows)

    def after(self, groups: LayerPlan) -> list[State]:
        """Of each chunk, what this layer leaves to the next."""
        states = []
        for i in range(len(self.batches)):
            batch = self._pass(i)
            layer = Layer.of(groups, batch.cache.head_dim, batch.q.device)
            layer.select(batch.q, batch.cache, layer.index(batch.rows), batch.scale)
            states.append(dict(batch.rows.state))
        return states

    def outcome(self, groups: LayerPlan, engines: Mapping[str, Engine] | None) -> torch.Tensor:
        """[4, num_heads] float64 on the device: error, worst, rare, density of one prompt. On a CPU no engines."""
        errors, pairs = [], []
        for i, (dense, norms) in enumerate(zip(self.dense, self.norms, strict=True)):
            batch = self._pass(i)
            layer, out = Layer.of(groups, batch.cache.head_dim, batch.q.device), batch.empty_out()
            if engines:  # the one that a server takes
                spec = AttendSpec.of(batch.cache, layer.index(batch.rows), layer.options)
                layer = replace(layer, engine=choose(engines, spec).engine)
            index = run(layer, batch.q, batch.cache, batch.rows, out, batch.scale)
            errors.append((out.float() - dense.float()).abs().sum(-1) / norms)
            pairs.append(index.pairs_of_heads())
        of_queries = torch.cat(errors)
        ordered = of_queries.sort(0).values
        worst, rare = (ordered[len(ordered) - 1 - int(share * len(ordered))].double() for share in (WORST, RARE))
        density = torch.stack(pairs).sum(0).double() / self.num_pairs
        return torch.stack((of_queries.double().mean(0), worst, rare, density))


class CapturedLayer:
    """What methods do to one layer of captured prompts; ``engines`` are those of a CUDA device, None on a CPU.

    ``before``: of each prompt's chunks, what the layers before have left; nothing unless given. ``others``: methods of
    heads of other layers.
    """

    def __init__(
        self,
        captures: Sequence[Capture],
        layer: int,
        served: Served,
        device: torch.device,
        engines: Mapping[str, Engine] | None,
        before: Sequence[Sequence[State]] = (),
        others: Sequence[Method] = (),
    ) -> None:
        self.engines, self.others = engines, tuple(others)
        of_each = zip(captures, before or repeat(()))
        self.prompts = [LayerPrompt.read(captured, layer, served, device, of) for captured, of in of_each]

    @property
    def batches(self) -> list[Batch]:
        """The chunks of the first prompt."""
        return self.prompts[0].batches

    def after(self, methods: Sequence[Method]) -> list[list[State]]:
        """Of each prompt's chunks, what the layer leaves to the next if its heads have these methods."""
        groups = layer_plan(methods, self.others)
        return [prompt.after(groups) for prompt in self.prompts]

    def figures(self, methods: Sequence[Method]) -> list[Figures]:
        """Of each head with its method: errors of the prompt where they are largest, density of all prompts."""
        groups = layer_plan(methods, self.others)
        found = torch.stack([prompt.outcome(groups, self.engines) for prompt in self.prompts])
        pairs = torch.tensor([prompt.num_pairs for prompt in self.prompts], dtype=torch.float64, device=found.device)
        density = (found[:, 3] * pairs[:, None]).sum(0) / pairs.sum()
        errors = found[:, :3]
        each = torch.cat((errors.amax(0), density[None], unseen(errors))).T.tolist()
        return [figures_of(one) for one in each]


def figures_of(numbers: Sequence[float]) -> Figures:
    """From error, worst, rare, density, and the three errors that unseen prompts may have."""
    error, worst, rare, density, *unseen = map(float, numbers)
    return Figures(error, worst, rare, density, Errors(*unseen))


def unseen(errors: torch.Tensor) -> torch.Tensor:
    """``Figures.unseen`` of what prompts have, along the first dimension; of a single one what it has."""
    ordered = errors.sort(0).values
    return 2 * ordered[-1] - ordered[max(0, len(ordered) - 2)]


class RememberingJudge:
    """A ``LayerJudge`` that writes down what it has judged, and reads the layer only for what it has not.

    ``path`` holds this layer's figures, all of one set of prompts; whoever breaks off loses what came after the last
    ``save``.
    """

    def __init__(self, layer: int, num_heads: int, path: Path, read: Callable[[], CapturedLayer]) -> None:
        self.layer, self.num_heads, self.path, self._read = layer, num_heads, path, read
        self.known: dict[str, list[Figures]] = {}
        self.changed = False
        if path.exists():
            with readable(path, "outcomes", "delete it"):
                data = json.loads(path.read_text(encoding="utf-8"))
                if data["format"] != FORMAT:
                    raise ValueError(f"format {data['format']}")
                self.known = {key: [figures_of(one) for one in heads] for key, heads in data["judged"].items()}

    @cached_property
    def captured(self) -> CapturedLayer:
        return self._read()

    def judge(self, methods: Sequence[Method]) -> list[Figures]:
        if len(methods) != self.num_heads:
            raise ValueError(f"judge: given {len(methods)} methods, expected one for each of {self.num_heads} heads")
        if (key := _key(methods)) not in self.known:
            self.known[key] = self.captured.figures(methods)
            self.changed = True
        return self.known[key]

    def save(self) -> None:
        if self.changed:
            judged = {
                key: [(of.error, of.worst, of.rare, of.density, *(of.unseen or ())) for of in heads]
                for key, heads in self.known.items()
            }
            write_json(self.path, {"format": FORMAT, "judged": judged})
            self.changed = False


def _key(methods: Sequence[Method]) -> str:
    """All fields of all methods; of equal ones those of one."""
    each = map(_text_of, methods[:1] if len(set(methods)) == 1 else methods)
    return f"[{', '.join(each)}]"


@lru_cache(maxsize=4096)
def _text_of(method: Method) -> str:
    return json.dumps(parameters_of(method))
