# SPDX-License-Identifier: Apache-2.0
"""One layer of a model on captured prompts, with the selection and attention of a server on this device.

On a CUDA device, kernels select, and the engine that a server would choose attends. Elsewhere the references do both.
The device holds one layer at a time:

* queries, keys, values and dense outputs of every prompt in the model's dtype: (2 · heads + 2 · kv heads) · head_dim
  elements per token (20 KB for Llama-3.1-8B);
* for one chunk, two outputs in float32 and an index;
* 8 bytes for each token and head: errors under the method and under the default.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from vllm_sparse_backend.calibration.capture import Capture, LayerTensors
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.streaming_heads import (
    PROMPT_TOKENS,
    AttentionTraits,
    attend_and_measure,
    streaming_method,
)
from vllm_sparse_kernels import PagedCache, Rows, SparseIndex
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.engine_choice import choose_engine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import Layer, layer_plan, run
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import USUAL_PAGE_SIZE
from vllm_sparse_kernels.rows import ceil_div

BEYOND_P99 = 0.01
"""Share of queries whose error is above ``HeadErrors.p99``. Few queries retrieve, so a mean hides their errors."""
BEYOND_P999 = 0.001
"""Share of queries that ``HeadErrors.of_default`` leaves out: fewer than a hundredth of a prompt's queries may look up
an answer."""

LEAST_ERROR = 0.02
"""Lower limit of the default's error in ratios. A smaller denominator would make heads dense needlessly."""


class HeadErrors(NamedTuple):
    """Errors of one head under one method, over the queries of a prompt, which runs chunk by chunk.

    A query's error is ‖o − õ‖₁ / ‖o‖₁, where o is its output under dense attention and õ its output under the method.
    """

    error: float
    """Mean over queries."""
    p99: float
    """Error that a hundredth of queries (``BEYOND_P99``) exceeds."""
    of_default: float
    """Error relative to the server's default: the smallest k for which the mean error is at most k times the default's
    (or ``LEAST_ERROR``), and at most a thousandth of queries exceed their own error under the default by k − 1.

    Means and tails alone do not show which queries have the errors. Heads that attend everywhere have a tail of 0.8
    under the default, from queries that lose nothing. A method with the same tail may lose every lookup.
    """
    absolute: float
    """SALE's Err(τ) = ‖O − Õ‖₁ / N (section 3.3): the sum over a head's channels of |o − õ|, averaged over the N tokens
    of a prompt, including tokens that run dense. Its size depends on the model's values."""


@dataclass(frozen=True)
class HeadResult:
    """Figures of one head under one method, over all prompts."""

    seen: HeadErrors
    """Each error is the largest over the prompts, so a bound holds on every prompt."""
    unseen: HeadErrors
    """Expected errors on an unseen prompt, by leave-one-out: the largest plus its distance to the second largest. With
    a single prompt, its own errors. ``absolute`` is the largest of the prompts, as SALE compares it."""
    density: float
    """Kept pairs divided by causal pairs."""


class Bound(NamedTuple):
    """Upper limits of a head's ``HeadErrors``, in their order. That of ``absolute`` is SALE's θ."""

    error: float = math.inf
    p99: float = math.inf
    of_default: float = math.inf
    absolute: float = math.inf

    def with_margin(self, margin: float) -> "Bound":
        """Tighten the bound for a search, leaving a margin for unseen prompts.

        ``of_default`` is unchanged, because it compares two methods on the same prompts. ``absolute`` is unchanged,
        because it is the paper's number.
        """
        return self._replace(error=self.error * (1 - margin), p99=self.p99 * (1 - margin))

    def holds(self, figures: HeadResult) -> bool:
        """Return whether a head meets the bound, including on unseen prompts as ``HeadResult.unseen`` predicts."""
        return all(share <= 1 for share in self._shares(figures.unseen))

    def used_fraction(self, figures: HeadResult) -> float:
        """Return the fraction of the bound that a head uses on these prompts."""
        return max(self._shares(figures.seen))

    def _shares(self, errors: HeadErrors) -> list[float]:
        return [error / limit for error, limit in zip(errors, self, strict=True)]

    @property
    def numbers(self) -> dict[str, float]:
        """The finite limits by name."""
        return {name: limit for name, limit in self._asdict().items() if math.isfinite(limit)}


class Outcome(NamedTuple):
    """Effect of methods on the heads of one prompt, on the device."""

    errors: torch.Tensor
    absolute: torch.Tensor
    kept_pairs: torch.Tensor


@dataclass(frozen=True)
class Served:
    """How a server prefills the prompts: chunk size, and the length of the dense start, both in tokens."""

    chunk_tokens: int
    min_tokens: int
    """First position that runs sparse. Earlier positions are dense and not judged."""
    finds_streaming_heads: bool = False
    """Whether the server's default finds streaming heads (``streaming_heads.py``)."""


@dataclass(frozen=True)
class LayerPrompt:
    """One layer's part of a prompt on the device, in the chunks in which a server would prefill it."""

    batches: list[Batch]
    dense: list[torch.Tensor]
    """For each chunk, its output under dense attention [query_len, num_heads, head_dim]."""
    engines: Mapping[str, AttendEngine] | None
    """Attention engines of the device; None to use the references."""
    windows: Mapping[int, int] | None
    """Windows of the prompt's streaming heads; None if the prompt is too short for them."""

    @staticmethod
    def read(
        captured: Capture,
        layer: int,
        served: Served,
        device: torch.device,
        engines: Mapping[str, AttendEngine] | None = None,
    ) -> "LayerPrompt":
        """Load a captured layer and compute its output under dense attention."""
        tensors, scale = captured.read(layer, device), captured.scales[layer]
        cache = PagedCache(paged(tensors.k), paged(tensors.v))
        rows = chunk_rows(captured.num_tokens, served.chunk_tokens, device, served.min_tokens)
        whole = dense_attention(tensors, scale)
        spans = [slice(chunk.context_lens[0], chunk.seq_lens[0]) for chunk in rows]
        batches = [Batch(tensors.q[span], cache, chunk, scale) for span, chunk in zip(spans, rows, strict=True)]
        windows = None
        if served.finds_streaming_heads and captured.num_tokens >= PROMPT_TOKENS:
            # By the rule of a server, on the prompt's first tokens.
            query, key, value = (x[:PROMPT_TOKENS] for x in tensors)
            windows = attend_and_measure(query, key, value, AttentionTraits(scale))[1].windows()
        return LayerPrompt(batches, [whole[span] for span in spans], engines, windows)

    @property
    def num_pairs(self) -> int:
        """Causal (query, key) pairs of all chunks, for one head."""
        return sum(causal_pairs(batch.rows) for batch in self.batches)

    def layer(self, methods: Sequence[Method], block_tokens: int | None = None) -> Layer:
        """Build the layer with these methods; ``block_tokens`` is None for the width that suits them."""
        batch = self.batches[0]
        return Layer.of(layer_plan(methods), batch.cache.head_dim, batch.q.device, block_tokens=block_tokens)

    def passes(self, layer: Layer) -> Iterator[tuple[torch.Tensor, SparseIndex]]:
        """Select and attend chunk by chunk, and yield the outputs and indices."""
        cache = self.batches[0].cache
        for batch in self.batches:
            rows = replace(batch.rows)  # no state remains between passes
            out, call = batch.empty_out(), layer.new_call(batch.q, cache, rows, batch.scale)
            if self.engines:
                layer = with_engine(layer, call, self.engines)
            run(layer, call, out)
            yield out, call.index

    def outcome(self, layer: Layer) -> Outcome:
        """Compare a layer's output with the dense output, for all chunks."""
        errors, absolute, pairs = [], [], []
        for dense, (out, index) in zip(self.dense, self.passes(layer), strict=True):
            norms = dense.float().abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
            distances = (out.float() - dense.float()).abs().sum(-1)
            errors.append(distances / norms)
            absolute.append(distances.double().sum(0))
            pairs.append(index.pairs_of_heads())
        (num_tokens,) = self.batches[-1].rows.seq_lens
        return Outcome(torch.cat(errors), torch.stack(absolute).sum(0) / num_tokens, torch.stack(pairs).sum(0).double())


def with_engine(layer: Layer, call: Call, engines: Mapping[str, AttendEngine]) -> Layer:
    """Return the layer with the attention engine that a server would use."""
    spec = AttendSpec.of(call.cache, call.index, layer.options)
    return replace(layer, engine=choose_engine(engines.values(), spec).engine)


def summarize_errors(errors: torch.Tensor, of_default: torch.Tensor) -> torch.Tensor:
    """Reduce queries' errors to those of ``HeadErrors``, except the last, ``absolute``."""
    mean, default = errors.double().mean(0), of_default.double().mean(0).clamp(min=LEAST_ERROR)
    more = error_quantile(errors - of_default, BEYOND_P999)
    return torch.stack((mean, error_quantile(errors, BEYOND_P99), torch.maximum(mean / default, 1 + more)))


def error_quantile(of_queries: torch.Tensor, share: float) -> torch.Tensor:
    """Return the error that a share of queries exceeds, for each head."""
    num_queries = len(of_queries)
    return of_queries.kthvalue(num_queries - int(share * num_queries), 0).values.double()


@dataclass
class CapturedLayer:
    """One layer of captured prompts, on which methods are measured. Remembers the figures of methods."""

    prompts: Sequence[LayerPrompt]
    _known: dict[tuple[Method, ...], list[HeadResult]] = field(default_factory=dict, init=False)

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
        outcomes = [prompt.outcome(prompt.layer(methods)) for prompt in self.prompts]
        errors = torch.stack(
            [summarize_errors(outcome.errors, default) for outcome, default in zip(outcomes, self._errors_of_default)]
        )
        absolute = torch.stack([outcome.absolute for outcome in outcomes]).amax(0)
        seen, unseen = (
            torch.cat((part, absolute[None])).T.tolist() for part in (errors.amax(0), extrapolate_unseen(errors))
        )
        kept_pairs = torch.stack([outcome.kept_pairs for outcome in outcomes]).sum(0)
        densities = (kept_pairs / sum(prompt.num_pairs for prompt in self.prompts)).tolist()
        return [
            HeadResult(HeadErrors(*of_seen), HeadErrors(*of_unseen), density)
            for of_seen, of_unseen, density in zip(seen, unseen, densities, strict=True)
        ]

    @cached_property
    def _errors_of_default(self) -> list[torch.Tensor]:
        """Errors under the server's default, for each prompt [num_queries, num_heads] float32.

        The default's streaming heads keep only the first and the nearest keys. A server finds these heads on a prompt
        of its own. Here, the rule must find a head on every prompt that is long enough, and the head keeps the largest
        window of these prompts.
        """
        default = [make_method("default", {})] * self.num_heads
        by_prompt = [prompt.windows for prompt in self.prompts if prompt.windows is not None]
        with_streaming_heads: list[Method] = [
            streaming_method(max(windows[head] for windows in by_prompt))
            if by_prompt and all(head in windows for windows in by_prompt)
            else method
            for head, method in enumerate(default)
        ]
        return [
            prompt.outcome(prompt.layer(with_streaming_heads, prompt.layer(default).block_tokens)).errors
            for prompt in self.prompts
        ]


def extrapolate_unseen(errors: torch.Tensor) -> torch.Tensor:
    """Extrapolate errors to an unseen prompt: the largest plus its distance to the second largest."""
    ordered = errors.sort(0).values
    return 2 * ordered[-1] - ordered[max(0, len(ordered) - 2)]


def chunk_rows(num_tokens: int, chunk_tokens: int, device: torch.device, min_tokens: int = 0) -> list[Rows]:
    """Return the steps in which a server prefills a prompt, starting at position ``min_tokens``."""
    table = torch.arange(ceil_div(num_tokens, USUAL_PAGE_SIZE), dtype=torch.int32, device=device)[None]
    spans = [
        (max(start, min_tokens), min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)
    ]
    return [Rows((0,), (end - begin,), (begin,), table) for begin, end in spans if begin < end]


def dense_attention(tensors: LayerTensors, scale: float) -> torch.Tensor:
    """Compute causal attention over all keys."""
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def paged(x: torch.Tensor) -> torch.Tensor:
    """Split keys or values into pages of the usual size. Unused places are 0: FlashAttention multiplies them by 0."""
    padding = -len(x) % USUAL_PAGE_SIZE
    return pad(x, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, USUAL_PAGE_SIZE))
