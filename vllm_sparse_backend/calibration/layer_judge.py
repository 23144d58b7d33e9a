# SPDX-License-Identifier: Apache-2.0
"""One layer of a model on captured prompts, with the selection and attention of a server on this device.

On a CUDA device, kernels select, and the engine that a server would choose attends. Elsewhere the references do both.
The device holds one layer at a time:

* queries, keys, values and dense outputs of every prompt in the model's dtype: (2 · heads + 2 · kv heads) · head_dim
  elements per token (20 KB for Llama-3.1-8B);
* for one chunk, two outputs in float32 and an index;
* 8 bytes for each token and head: errors under the method and under the default.
"""

import copy
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_sparse_backend.calibration.capture import Capture, LayerTensors
from vllm_sparse_backend.calibration.external import read_json
from vllm_sparse_backend.calibration.head_errors import BEYOND_P99, BEYOND_P999, LEAST_ERROR, Errors, HeadResult
from vllm_sparse_backend.calibration.prompt_chunks import chunk_rows, dense_attention, paged
from vllm_sparse_backend.calibration.streaming_heads import (
    PROMPT_TOKENS,
    STREAMING,
    AttentionTraits,
    attend_and_measure,
)
from vllm_sparse_backend.config.method_parameters import make_method, parameters_of
from vllm_sparse_backend.evaluation.attention_prompts import without_nan
from vllm_sparse_backend.evaluation.report import write_json
from vllm_sparse_kernels import PagedCache, SparseIndex
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, choose_engine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import Layer, LayerPlan, layer_plan, run
from vllm_sparse_kernels.methods.base import Method

State = dict[Hashable, Any]
"""``Rows.state`` of a chunk: the state that methods pass from layer to layer."""


class Outcome(NamedTuple):
    """Effect of methods on the heads of one prompt, on the device."""

    errors: torch.Tensor
    absolute: torch.Tensor
    kept_pairs: torch.Tensor


@dataclass(frozen=True)
class Served:
    """How a server prefills the prompts: chunk size, and the length of the dense start, both in tokens."""

    chunk_tokens: int = 8192
    min_tokens: int = 0
    """First position that runs sparse. Earlier positions are dense and not judged."""
    streaming_context_tokens: int | None = None
    """Number of a prompt's earlier tokens from which streaming heads keep fewer keys by default. None if a server of
    this model does not look for them (``streaming_heads.py``)."""


class LongContexts(NamedTuple):
    """Other methods for the chunks of a prompt that have a long context."""

    context_tokens: int
    plan: LayerPlan
    block_tokens: int


@dataclass(frozen=True)
class LayerPrompt:
    """One layer's part of a prompt on the device, in the chunks in which a server would prefill it."""

    batches: list[Batch]
    dense: list[torch.Tensor]
    """For each chunk, its output under dense attention [query_len, num_heads, head_dim]."""
    before: Sequence[State] = ()
    """For each chunk, the state that earlier layers left; empty if there is none."""
    streaming_heads: frozenset[int] = frozenset()
    """Streaming heads on this prompt; empty if no chunk has a context from which they keep fewer keys."""

    @staticmethod
    def read(
        captured: Capture, layer: int, served: Served, device: torch.device, before: Sequence[State] = ()
    ) -> "LayerPrompt":
        """Load a captured layer and compute its output under dense attention."""
        tensors, scale = captured.read(layer, device), captured.scales[layer]
        cache = PagedCache(paged(tensors.k), paged(tensors.v))
        rows = chunk_rows(captured.num_tokens, served.chunk_tokens, device, served.min_tokens)
        whole = dense_attention(tensors, scale)
        spans = [slice(chunk.context_lens[0], chunk.seq_lens[0]) for chunk in rows]
        batches = [Batch(tensors.q[span], cache, chunk, scale) for span, chunk in zip(spans, rows, strict=True)]
        without_nan(batches[0])  # replaces NaN in the cache that all chunks share
        streaming_heads: frozenset[int] = frozenset()
        least_context = served.streaming_context_tokens
        if least_context is not None and any(chunk.context_lens[0] >= least_context for chunk in rows):
            streaming_heads = streaming_heads_of(tensors, scale)
        return LayerPrompt(batches, [whole[span] for span in spans], before, streaming_heads)

    @property
    def num_pairs(self) -> int:
        """Causal (query, key) pairs of all chunks, for one head."""
        return sum(causal_pairs(batch.rows) for batch in self.batches)

    def passes(
        self, plan: LayerPlan, engines: Mapping[str, AttendEngine] | None, long: LongContexts | None = None
    ) -> Iterator[tuple[torch.Tensor, SparseIndex, State]]:
        """Select and attend chunk by chunk."""
        for i, batch in enumerate(self.batches):
            rows = replace(batch.rows)  # no state remains between passes
            rows.state.update(copy.deepcopy(self.before[i]) if self.before else {})
            chosen, block_tokens = plan, None
            if long is not None and rows.context_lens[0] >= long.context_tokens:
                chosen, block_tokens = long.plan, long.block_tokens
            layer = Layer.of(chosen, batch.cache.head_dim, batch.q.device, block_tokens=block_tokens)
            out, call = batch.empty_out(), layer.new_call(batch.q, batch.cache, rows, batch.scale)
            if engines:  # the engine that a server uses
                spec = AttendSpec.of(batch.cache, call.index, layer.options)
                layer = replace(layer, engine=choose_engine(engines, spec).engine)
            run(layer, call, out)
            yield out, call.index, rows.state

    def outcome(
        self, plan: LayerPlan, engines: Mapping[str, AttendEngine] | None, long: LongContexts | None = None
    ) -> Outcome:
        """Compare the output under a method with the dense output, for all chunks."""
        errors, absolute, pairs = [], [], []
        for dense, (out, index, _) in zip(self.dense, self.passes(plan, engines, long), strict=True):
            norms = dense.float().abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
            distances = (out.float() - dense.float()).abs().sum(-1)
            errors.append(distances / norms)
            absolute.append(distances.double().sum(0))
            pairs.append(index.pairs_of_heads())
        (num_tokens,) = self.batches[-1].rows.seq_lens
        return Outcome(torch.cat(errors), torch.stack(absolute).sum(0) / num_tokens, torch.stack(pairs).sum(0).double())


def streaming_heads_of(tensors: LayerTensors, scale: float) -> frozenset[int]:
    """Find a layer's streaming heads by the rule of a server, on the first tokens of a captured prompt."""
    query, key, value = (x[:PROMPT_TOKENS] for x in tensors)
    return attend_and_measure(query, key, value, AttentionTraits(scale))[1].streaming_heads()


def summarize_errors(errors: torch.Tensor, of_default: torch.Tensor) -> torch.Tensor:
    """Reduce queries' errors to the figures of ``Errors``, except the last, ``absolute``."""
    mean, default = errors.double().mean(0), of_default.double().mean(0).clamp(min=LEAST_ERROR)
    (more,) = error_quantiles(errors - of_default, BEYOND_P999)
    return torch.stack(
        (mean, *error_quantiles(errors, BEYOND_P99, BEYOND_P999), torch.maximum(mean / default, 1 + more))
    )


def error_quantiles(of_queries: torch.Tensor, *shares: float) -> list[torch.Tensor]:
    """Return upper quantiles of queries' errors."""
    ordered = of_queries.sort(0).values
    return [ordered[len(ordered) - 1 - int(share * len(ordered))].double() for share in shares]


class CapturedLayer:
    """One layer of captured prompts, on which methods are measured.

    ``engines`` holds the engines of a CUDA device, None on a CPU. ``before`` holds, for each prompt's chunks, the state
    that earlier layers left. ``others`` holds methods of heads of other layers.
    """

    def __init__(
        self,
        captures: Sequence[Capture],
        layer: int,
        served: Served,
        device: torch.device,
        engines: Mapping[str, AttendEngine] | None,
        before: Sequence[Sequence[State]] = (),
        others: Sequence[Method] = (),
    ) -> None:
        self.engines, self.others, self.served = engines, tuple(others), served
        captures_and_states = zip(captures, before or repeat(()))
        self.prompts = [
            LayerPrompt.read(captured, layer, served, device, states) for captured, states in captures_and_states
        ]

    def after(self, methods: Sequence[Method]) -> list[list[State]]:
        """Run the layer and return the state that it passes to the next layer."""
        plan = layer_plan(methods, self.others)
        return [[dict(state) for *_, state in prompt.passes(plan, self.engines)] for prompt in self.prompts]

    @cached_property
    def _of_default(self) -> list[torch.Tensor]:
        """Errors under the server's default, for each prompt [num_queries, num_heads] float32.

        In chunks with a long context, the default's streaming heads keep only the first and the nearest keys. A server
        finds these heads on a prompt of its own. Here, the rule must find a head on every prompt.
        """
        batch = self.prompts[0].batches[0]
        default = [make_method("default", {})] * batch.num_heads
        plan = layer_plan(default, self.others)
        streaming_heads = frozenset.intersection(*(prompt.streaming_heads for prompt in self.prompts))
        long = None
        if streaming_heads and self.served.streaming_context_tokens is not None:
            methods = [STREAMING if head in streaming_heads else method for head, method in enumerate(default)]
            width = Layer.of(plan, batch.cache.head_dim, batch.q.device).block_tokens
            long = LongContexts(self.served.streaming_context_tokens, layer_plan(methods, self.others), width)
        return [prompt.outcome(plan, self.engines, long).errors for prompt in self.prompts]

    def figures(self, methods: Sequence[Method]) -> list[HeadResult]:
        """Run the layer on all prompts and measure each head."""
        plan = layer_plan(methods, self.others)
        outcomes = [prompt.outcome(plan, self.engines) for prompt in self.prompts]
        errors = torch.stack(
            [summarize_errors(outcome.errors, default) for outcome, default in zip(outcomes, self._of_default)]
        )
        absolute = torch.stack([outcome.absolute for outcome in outcomes]).amax(0)[None]
        kept_pairs = torch.stack([outcome.kept_pairs for outcome in outcomes]).sum(0)
        density = kept_pairs / sum(prompt.num_pairs for prompt in self.prompts)
        seen = torch.cat((errors.amax(0), absolute)).T.tolist()
        unseen = torch.cat((extrapolate_unseen(errors), absolute)).T.tolist()
        return [
            HeadResult(**Errors(*of_seen)._asdict(), density=kept, unseen=Errors(*of_unseen))
            for of_seen, of_unseen, kept in zip(seen, unseen, density.tolist(), strict=True)
        ]


def extrapolate_unseen(errors: torch.Tensor) -> torch.Tensor:
    """Extrapolate errors to an unseen prompt: the largest plus its distance to the second largest."""
    ordered = errors.sort(0).values
    return 2 * ordered[-1] - ordered[max(0, len(ordered) - 2)]


class RememberingJudge:
    """A ``LayerJudge`` that saves its outcomes and loads the layer only for unknown outcomes.

    The file ``path`` holds this layer's figures for one set of prompts. An interruption loses outcomes since the last
    ``save``.
    """

    def __init__(self, layer: int, num_heads: int, path: Path, read: Callable[[], CapturedLayer]) -> None:
        self.layer, self.num_heads, self.path, self._read = layer, num_heads, path, read
        self.known: dict[str, list[HeadResult]] = read_json(path, dict[str, list[HeadResult]]) if path.exists() else {}
        self.num_saved = len(self.known)

    @cached_property
    def captured(self) -> CapturedLayer:
        """The layer, loaded when it is first needed."""
        return self._read()

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        """Return the figures, from the file if they are known."""
        if len(methods) != self.num_heads:
            raise ValueError(f"judge: given {len(methods)} methods, expected one for each of {self.num_heads} heads")
        # The key has all fields of all methods, or of the first method if all are equal.
        key = json.dumps([parameters_of(method) for method in (methods[:1] if len(set(methods)) == 1 else methods)])
        if key not in self.known:
            self.known[key] = self.captured.figures(methods)
        return self.known[key]

    def save(self) -> None:
        """Write all outcomes to ``path``, if there are new outcomes."""
        if len(self.known) > self.num_saved:
            write_json(self.path, {key: [asdict(result) for result in results] for key, results in self.known.items()})
            self.num_saved = len(self.known)
