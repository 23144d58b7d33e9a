# SPDX-License-Identifier: Apache-2.0
"""Finds the streaming heads of the served model when a worker starts, before its layers get their plans.

The worker runs the model on one generated prompt. In this run, each layer computes its attention in plain torch,
without the KV cache, which does not exist yet, and measures its heads (``vllm_sparse_backend.streaming_heads``).
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase

from vllm_sparse_backend import streaming_heads
from vllm_sparse_backend.config.carried import finds_streaming_heads
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.identity import digest, logger
from vllm_sparse_backend.prompts.lookups import begin_ids
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.streaming_startup import describe, do_without
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.layers import plain_impls, served_layers
from vllm_sparse_backend.serving.worker.owner import StreamingHeads, Worker, worker_of
from vllm_sparse_backend.serving.worker.prompt_run import run_model

T = TypeVar("T")


def find_streaming_heads(worker: Worker, get_model: Callable[[], torch.nn.Module]) -> None:
    """Find the streaming heads on this rank, before the layers are adopted, if this server does.

    All ranks of all pipeline stages must call this. If one of them cannot find its heads, no rank has streaming heads.
    """
    vllm_config = worker.vllm_config
    # vLLM may profile a model again, for example to measure the memory of its CUDA graphs.
    if not finds_streaming_heads(vllm_config.additional_config) or worker.streaming.by_layer:
        return
    start = time.monotonic()
    try:
        model, layers, prompt = _on_all_ranks(vllm_config, lambda: (get_model(), *_layers_and_prompt(vllm_config)))
        heads = _on_all_ranks(vllm_config, lambda: measure(vllm_config, model, layers, prompt))
    except _SearchError as error:
        do_without(vllm_config, str(error), logging.WARNING if compat.is_first_rank(vllm_config) else logging.DEBUG)
        return
    num_heads = sum(impl.num_heads for impl in layers.values())
    by_rank = compat.gather_over_stages((num_heads, model_heads(worker.rank, layers, heads)))
    all_heads = sorted(chain.from_iterable(rank_heads for _, rank_heads in by_rank))
    worker.streaming = StreamingHeads(heads, digest(json.dumps(all_heads), 12))
    if compat.is_first_rank(vllm_config):
        windows = Counter(window for _, _, window in all_heads)
        logger.info(
            "sparse-prefill: %d of %d heads are streaming heads (fingerprint %s, measured in %.1f s): they keep only "
            "%d first and their nearest keys (%s)",
            len(all_heads), sum(num_heads for num_heads, _ in by_rank), worker.streaming.fingerprint,
            time.monotonic() - start, streaming_heads.SINK_TOKENS,
            ", ".join(f"{count} keep {window}" for window, count in sorted(windows.items())) or "none",
        )  # fmt: skip


def model_heads(
    rank: int, layers: Mapping[int, SparsePrefillImpl], heads: Mapping[int, Mapping[int, int]]
) -> list[tuple[int, int, int]]:
    """Return the streaming heads of a rank as (layer, number of the head in the whole layer, window)."""
    return [
        (number, rank * layers[number].num_heads + head, window)
        for number, windows in heads.items()
        for head, window in windows.items()
    ]


class _SearchError(Exception):
    """A rank cannot find its streaming heads. All ranks raise it."""


def _on_all_ranks(vllm_config: VllmConfig, function: Callable[[], T]) -> T:
    """Call a function on all ranks, and wait for the others. If it fails on one rank, it fails on all."""
    problem = None
    try:
        result = function()
    except Exception as error:
        problem = f"rank {vllm_config.parallel_config.rank}: {describe(error)}"
    first_problem = next(filter(None, compat.gather_over_stages(problem)), None)
    if first_problem is not None:
        raise _SearchError(first_problem)
    return result


def _layers_and_prompt(vllm_config: VllmConfig) -> tuple[dict[int, SparsePrefillImpl], list[int]]:
    """Return the layers whose heads this rank measures, and the prompt. Raises an error if it cannot measure them."""
    layers = served_layers(vllm_config, plain_impls(vllm_config))
    if not layers:
        raise ConfigurationError("this worker has no layer that can run sparse")
    refuse_layers(vllm_config)
    return layers, _prompt(vllm_config)


def refuse_layers(vllm_config: VllmConfig) -> None:
    """Raise ConfigurationError if the run cannot compute how a layer mixes tokens."""
    plain = plain_impls(vllm_config)
    compilation = vllm_config.compilation_config
    experts = frozenset(compilation.static_all_moe_layers)  # listed among the layers, but they mix no tokens
    for name, layer in compilation.static_forward_context.items():
        if name in experts or isinstance(layer, MambaBase):
            continue
        impl = plain.get(name)
        if impl is None:
            problem = f"is {type(layer).__name__}"
        elif impl.attn_type != "decoder":
            problem = f"has attention of type {impl.attn_type}"
        elif impl.alibi_slopes is not None:
            problem = "has ALiBi"
        elif getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            problem = "reads the cache of another layer"
        else:
            continue
        raise ConfigurationError(
            f"layer {name} {problem}, expected causal attention over the layer's own keys, or a recurrence"
        )


def _prompt(vllm_config: VllmConfig) -> list[int]:
    tokenizer: Any = compat.tokenizer(vllm_config)
    # The text is longer than the model's context. transformers warns of that, but only a part of the text is used.
    quiet = {"verbose": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, **quiet))

    prompt = streaming_heads.streaming_prompt(encode, begin_ids(tokenizer))
    num_embeddings = vllm_config.model_config.get_vocab_size()
    if max(prompt) >= num_embeddings:  # on a GPU, this would end the process
        raise ConfigurationError(
            f"streaming_heads: the tokenizer makes token {max(prompt)}, expected less than the model's "
            f"{num_embeddings} tokens; serve the model with its own tokenizer"
        )
    return prompt


def measure(
    vllm_config: VllmConfig, model: torch.nn.Module, layers: Mapping[int, SparsePrefillImpl], prompt: Sequence[int]
) -> dict[int, dict[int, int]]:
    """Run the model on a prompt and return the windows of its layers' streaming heads."""
    measured: dict[SparsePrefillImpl, streaming_heads.FarAttention] = {}
    errors: list[Exception] = []
    impls = plain_impls(vllm_config).values()  # those of a draft model do not run

    def attend(
        impl: SparsePrefillImpl,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Replace the layer's ``forward`` during this run."""
        try:
            traits = streaming_heads.AttentionTraits(
                scale=impl.scale * compat.query_scale(query, layer),
                window_tokens=layer.sliding_window,
                softcap=impl.logits_soft_cap or 0.0,
                sinks=impl.sinks,
            )
            attention, measured[impl] = streaming_heads.attend_and_measure(query, key, value, traits)
            output.copy_(attention.view_as(output))
        except Exception as error:
            # The run goes on: other ranks would wait for this one where the layers exchange activations.
            errors.append(error)
            output.zero_()
        return output

    for impl in impls:
        impl.forward = partial(attend, impl)  # type: ignore[method-assign]
    try:
        run_model(vllm_config, model, prompt)
    finally:
        for impl in impls:
            del impl.forward
    if errors:
        raise errors[0]
    return {number: measured[impl].windows() for number, impl in layers.items()}


def heads_of_worker(vllm_worker: Any) -> str:
    """Return the fingerprint of the streaming heads of all ranks; empty without streaming heads. Runs in a worker."""
    return worker_of(vllm_worker.vllm_config).streaming.fingerprint
