# SPDX-License-Identifier: Apache-2.0
"""One layer of a model on captured prompts, with the selection and attention of a server on this device.

On a CUDA device, kernels select, and the engine that a server would choose attends. Elsewhere the references do both.
The device holds one layer at a time:

* queries, keys, values and dense outputs of every prompt in the model's dtype: (2 · heads + 2 · kv heads) · head_dim
  elements per token (20 KB for Llama-3.1-8B);
* for one chunk, two outputs in float32 and an index;
* 8 bytes for each token and head: errors under the method and under the default.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from vllm_sparse_backend.calibration.capture import Capture, LayerTensors
from vllm_sparse_backend.calibration.head_errors import BEYOND_P99, BEYOND_P999, LEAST_ERROR, Errors, HeadResult
from vllm_sparse_backend.calibration.prompt_chunks import chunk_rows, dense_attention, paged
from vllm_sparse_backend.calibration.streaming_heads import (
    PROMPT_TOKENS,
    STREAMING,
    AttentionTraits,
    attend_and_measure,
)
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.evaluation.attention_prompts import without_nan
from vllm_sparse_kernels import PagedCache, SparseIndex
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, choose_engine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import Layer, LayerPlan, layer_plan, run
from vllm_sparse_kernels.methods.base import Method


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


class LayerSetup(NamedTuple):
    """Methods of a layer's heads, and the attention engines of the device; None to use the references."""

    plan: LayerPlan
    engines: Mapping[str, AttendEngine] | None
    long: LongContexts | None = None


@dataclass(frozen=True)
class LayerPrompt:
    """One layer's part of a prompt on the device, in the chunks in which a server would prefill it."""

    batches: list[Batch]
    dense: list[torch.Tensor]
    """For each chunk, its output under dense attention [query_len, num_heads, head_dim]."""
    streaming_heads: frozenset[int] = frozenset()
    """Streaming heads on this prompt; empty if no chunk has a context from which they keep fewer keys."""

    @staticmethod
    def read(captured: Capture, layer: int, served: Served, device: torch.device) -> "LayerPrompt":
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
        return LayerPrompt(batches, [whole[span] for span in spans], streaming_heads)

    @property
    def num_pairs(self) -> int:
        """Causal (query, key) pairs of all chunks, for one head."""
        return sum(causal_pairs(batch.rows) for batch in self.batches)

    def passes(self, setup: LayerSetup) -> Iterator[tuple[torch.Tensor, SparseIndex]]:
        """Select and attend chunk by chunk, and yield the outputs and indices."""
        for batch in self.batches:
            rows = replace(batch.rows)  # no state remains between passes
            plan, block_tokens = setup.plan, None
            if setup.long is not None and rows.context_lens[0] >= setup.long.context_tokens:
                plan, block_tokens = setup.long.plan, setup.long.block_tokens
            layer = Layer.of(plan, batch.cache.head_dim, batch.q.device, block_tokens=block_tokens)
            out, call = batch.empty_out(), layer.new_call(batch.q, batch.cache, rows, batch.scale)
            if setup.engines:  # the engine that a server uses
                spec = AttendSpec.of(batch.cache, call.index, layer.options)
                layer = replace(layer, engine=choose_engine(setup.engines, spec).engine)
            run(layer, call, out)
            yield out, call.index

    def outcome(self, setup: LayerSetup) -> Outcome:
        """Compare the output under a method with the dense output, for all chunks."""
        errors, absolute, pairs = [], [], []
        for dense, (out, index) in zip(self.dense, self.passes(setup), strict=True):
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
    more = error_quantile(errors - of_default, BEYOND_P999)
    return torch.stack((mean, error_quantile(errors, BEYOND_P99), torch.maximum(mean / default, 1 + more)))


def error_quantile(of_queries: torch.Tensor, share: float) -> torch.Tensor:
    """Return the error that a share of queries exceeds, for each head."""
    ordered = of_queries.sort(0).values
    return ordered[len(ordered) - 1 - int(share * len(ordered))].double()


@dataclass
class CapturedLayer:
    """One layer of captured prompts, on which methods are measured: a ``LayerJudge`` that remembers its outcomes."""

    prompts: Sequence[LayerPrompt]
    served: Served
    engines: Mapping[str, AttendEngine] | None

    def __post_init__(self) -> None:
        self._known: dict[tuple[Method, ...], list[HeadResult]] = {}

    @property
    def num_heads(self) -> int:
        """Query heads of the layer."""
        return self.prompts[0].batches[0].num_heads

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        """Measure one method for each head, in one pass of selection and attention over each chunk."""
        key = tuple(methods)
        if key not in self._known:
            self._known[key] = self._measure(methods)
        return self._known[key]

    def _measure(self, methods: Sequence[Method]) -> list[HeadResult]:
        setup = self._setup(methods)
        outcomes = [prompt.outcome(setup) for prompt in self.prompts]
        errors = torch.stack(
            [summarize_errors(outcome.errors, default) for outcome, default in zip(outcomes, self._errors_of_default)]
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

    @cached_property
    def _errors_of_default(self) -> list[torch.Tensor]:
        """Errors under the server's default, for each prompt [num_queries, num_heads] float32.

        In chunks with a long context, the default's streaming heads keep only the first and the nearest keys. A server
        finds these heads on a prompt of its own. Here, the rule must find a head on every prompt.
        """
        batch = self.prompts[0].batches[0]
        default = [make_method("default", {})] * batch.num_heads
        setup = self._setup(default)
        streaming_heads = frozenset.intersection(*(prompt.streaming_heads for prompt in self.prompts))
        if streaming_heads and self.served.streaming_context_tokens is not None:
            methods = [STREAMING if head in streaming_heads else method for head, method in enumerate(default)]
            width = Layer.of(setup.plan, batch.cache.head_dim, batch.q.device).block_tokens
            plan = layer_plan(methods)
            setup = setup._replace(long=LongContexts(self.served.streaming_context_tokens, plan, width))
        return [prompt.outcome(setup).errors for prompt in self.prompts]

    def _setup(self, methods: Sequence[Method]) -> LayerSetup:
        return LayerSetup(layer_plan(methods), self.engines)


def extrapolate_unseen(errors: torch.Tensor) -> torch.Tensor:
    """Extrapolate errors to an unseen prompt: the largest plus its distance to the second largest."""
    ordered = errors.sort(0).values
    return 2 * ordered[-1] - ordered[max(0, len(ordered) - 2)]
