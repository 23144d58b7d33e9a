# SPDX-License-Identifier: Apache-2.0
"""Finds the streaming heads of the served model when a worker starts, before its layers get their plans.

The worker runs the model on one generated prompt (``calibration.streaming_heads``). In this run, each layer computes
its attention in plain torch, without the KV cache, which does not exist yet, and measures its heads. The result is kept
in vLLM's cache folder under a hash of the weights. The next start with the same weights reads it.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakSet

import torch
from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError
from vllm.config import VllmConfig

from vllm_sparse_backend.calibration import streaming_heads as calibration
from vllm_sparse_backend.calibration.capture import begin_ids
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import KEY, OPTION
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.model_layers import model_layers, plain_impls
from vllm_sparse_backend.serving.worker.shared_worker import Worker

logger = logging.getLogger(LOGGER)
T = TypeVar("T")

FOLDER = "sparse_prefill/streaming_heads"
"""Folder of the results in vLLM's cache folder."""

WITHOUT = "sparse-prefill: all heads score keys in long prompts"
"""Begins the line that a worker logs if it cannot find streaming heads."""

CHECKSUM_BYTES = 4 << 20
"""Bytes of a weight that are summed up at a time: each takes 16 bytes of temporary memory."""

_asked: WeakSet[torch.nn.Module] = WeakSet()
"""Models for which this process has already looked for streaming heads. It must not do so twice, because all ranks have
to take part."""

StreamingHeads = Mapping[int, frozenset[int]]
"""By layer, the numbers of its streaming heads on this rank."""


class _File(BaseModel):
    """The file of a result."""

    model_config = ConfigDict(extra="forbid")

    layers: dict[int, tuple[StrictInt, ...]]


def find_streaming_heads(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """Find the streaming heads on this rank, before the layers are adopted.

    All ranks of all pipeline stages must call this. If one of them cannot find its heads, no rank has streaming heads.
    """
    if model in _asked:
        return
    _asked.add(model)
    layers = {layer.number: layer.impl for layer in model_layers(vllm_config).values()}
    problem = layer_problem(vllm_config) if layers else "a worker has no layer that can run sparse"
    problems = [other for other in compat.gather_over_stages(problem) if other]
    if not layers:
        return  # the metadata builders refuse such a worker, with the reasons, or warn of such a pipeline stage
    worker = next(iter(layers.values())).shared_worker(vllm_config, compat.current_device(), planned=True)
    is_required = worker.resolved.config.requires_streaming_heads
    worker.streaming_heads = {}
    if problems:
        if is_required:
            raise ConfigurationError(f"{OPTION} {KEY}.streaming_heads: {problems[0]}; leave streaming_heads out")
        if worker.rank == 0:
            logger.info("%s: %s", WITHOUT, problems[0])
        return
    start = time.monotonic()
    stage, num_stages = compat.pipeline_parallel(vllm_config)
    place = f"rank {worker.rank}" + (f" of pipeline stage {stage}" if num_stages > 1 else "")
    ranks = _Ranks(worker.rank, place, is_required)
    inputs = ranks.attempt("the prompt and the checksums of the weights", lambda: _inputs(vllm_config, model))
    if inputs is None:
        return
    prompt, key = inputs
    # Heads of a rank also depend on the weights of all others.
    path = result_path(key, compat.gather_over_stages(key))
    heads = read_result(path, {number: impl.num_heads for number, impl in layers.items()})
    # A rank with a result must run the model too if another rank has none, because ranks exchange activations.
    is_known = all(compat.gather_over_stages(heads is not None))
    if not is_known:
        heads = ranks.attempt("the run of the model", lambda: measure(vllm_config, model, layers, prompt))
        if heads is not None:
            write_result(path, heads)
    if heads is None:
        return
    worker.streaming_heads = heads
    _log(worker, heads, sum(impl.num_heads for impl in layers.values()), is_known, time.monotonic() - start)


@dataclass(frozen=True)
class _Ranks:
    """The ranks of all pipeline stages, which need streaming heads on all of them or on none."""

    rank: int
    place: str
    is_required: bool

    def attempt(self, step: str, call: Callable[[], T]) -> T | None:
        """Call a function on all ranks. Every rank must call this, and waits for the others."""
        result, problem, error = None, None, None
        try:
            result = call()
        except Exception as caught:
            error = caught
            reason = str(error).partition("\n")[0]
            problem = f"{step} failed on {self.place}: {type(error).__name__}: {reason}"
            # Logged before this rank waits: another rank may wait for this one in the run.
            logger.warning("sparse-prefill: streaming heads are not found: %s", problem)
        problems = [other for other in compat.gather_over_stages(problem) if other]
        if not problems:
            return result
        if self.is_required:
            raise error or ConfigurationError(f"{OPTION} {KEY}.streaming_heads: {problems[0]}")
        if self.rank == 0:
            logger.warning("%s: %s", WITHOUT, problems[0])
        return None


def _inputs(vllm_config: VllmConfig, model: torch.nn.Module) -> tuple[list[int], str]:
    """Return the prompt, and this rank's part of the key of the result."""
    prompt = _prompt(vllm_config)
    return prompt, result_key(vllm_config, model, prompt)


def result_path(key: str, keys: Sequence[str]) -> Path:
    """Return the file of a result."""
    name = hashlib.sha256(json.dumps([key, *keys]).encode()).hexdigest()[:32]
    return compat.cache_folder() / FOLDER / f"{name}.json"


def layer_problem(vllm_config: VllmConfig) -> str | None:
    """Return which layer mixes tokens in another way than attention that ``measure`` can compute."""
    plain = plain_impls(vllm_config)
    compilation = vllm_config.compilation_config
    experts = frozenset(compilation.static_all_moe_layers)  # listed among the layers, but they mix no tokens
    for name, layer in compilation.static_forward_context.items():
        if name in experts:
            continue
        impl = plain.get(name)
        if impl is None:
            problem = f"is {type(layer).__name__}, not plain attention"
        elif impl.attn_type != "decoder":
            problem = f"has attention of type {impl.attn_type}"
        elif impl.alibi_slopes is not None:
            problem = "has ALiBi"
        elif getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            problem = "reads the cache of another layer"
        else:
            continue
        return f"layer {name} {problem}, expected causal attention of every layer over its own keys"
    return None


def _prompt(vllm_config: VllmConfig) -> list[int]:
    tokenizer: Any = compat.tokenizer(vllm_config)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    name = vllm_config.model_config.tokenizer
    prompt = calibration.streaming_prompt(encode, begin_ids(tokenizer), name)
    num_embeddings = vllm_config.model_config.get_vocab_size()
    if max(prompt) >= num_embeddings:  # on a GPU, this would end the process
        raise ConfigurationError(
            f"streaming_heads: the tokenizer of {name} makes token {max(prompt)}, expected less than the model's "
            f"{num_embeddings} tokens; serve the model with its own tokenizer"
        )
    return prompt


def measure(
    vllm_config: VllmConfig, model: torch.nn.Module, layers: Mapping[int, SparsePrefillImpl], prompt: Sequence[int]
) -> StreamingHeads:
    """Run the model on a prompt and return the streaming heads of its layers."""
    measured: dict[SparsePrefillImpl, calibration.FarAttention] = {}
    impls = plain_impls(vllm_config).values()  # those of a draft model do not run

    def attend(impl: SparsePrefillImpl, layer: Any, qkv: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        query, key, value = qkv
        traits = calibration.AttentionTraits(
            scale=impl.scale * compat.query_scale(query, layer),
            window_tokens=layer.sliding_window,
            softcap=impl.logits_soft_cap or 0.0,
            sinks=impl.sinks,
        )
        attention, measured[impl] = calibration.attend_and_measure(query, key, value, traits)
        out.copy_(attention.view_as(out))

    for impl in impls:
        impl.attend_without_cache = attend
    try:
        compat.run_model(vllm_config, model, prompt)
    finally:
        for impl in impls:
            impl.attend_without_cache = None
    return {number: measured[impl].streaming_heads() for number, impl in layers.items()}


def result_key(vllm_config: VllmConfig, model: torch.nn.Module, prompt: Sequence[int]) -> str:
    """Hash what a result depends on, on this rank: weights, configuration, the cache's dtype, prompt, rule and rank."""
    rule = (
        *(calibration.SINK_TOKENS, calibration.WINDOW_TOKENS, calibration.BLOCK_TOKENS, calibration.HEAVY_SHARE),
        *(calibration.MAX_FAR_SHARE, calibration.MAX_HEAVY_QUERIES),
    )
    config = {name: value for name, value in compat.hf_config(vllm_config).items() if not name.startswith("_")}
    cache_dtype = str(vllm_config.cache_config.cache_dtype)  # queries of an fp8 cache are rounded
    place = *compat.tensor_parallel(vllm_config), *compat.pipeline_parallel(vllm_config)
    data = [rule, place, list(prompt), config, cache_dtype, weight_checksums(model)]
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:32]


def weight_checksums(model: torch.nn.Module) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return a checksum of each weight of this rank. Waits for the device."""
    return [
        (name, str(tensor.dtype), tuple(tensor.shape), int(_checksum(tensor)))
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if tensor.numel()
    ]


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all bytes, each times an odd number that depends on its place, modulo 2⁶⁴."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    chunk_bytes = min(CHECKSUM_BYTES, flat.numel())
    factors = 2 * torch.arange(chunk_bytes, device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(flat.split(chunk_bytes)):
        total += (2 * number + 1) * (chunk * factors[: chunk.numel()]).sum()
    return total


def read_result(path: Path, num_heads: Mapping[int, int]) -> StreamingHeads | None:
    """Read a result that an earlier start wrote."""
    try:
        layers = _File.model_validate_json(path.read_bytes()).layers
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("sparse-prefill: %s cannot be read, and is replaced: %s", path, str(error).splitlines()[0])
        return None
    fits = layers.keys() == num_heads.keys() and all(
        0 <= head < num_heads[number] for number, heads in layers.items() for head in heads
    )
    if not fits:
        logger.warning("sparse-prefill: %s is for other layers or heads, and is replaced", path)
        return None
    return {number: frozenset(heads) for number, heads in layers.items()}


def write_result(path: Path, heads: StreamingHeads) -> None:
    """Write a result for the next start. If that fails, the next start measures again."""
    text = _File(layers={number: tuple(sorted(layer_heads)) for number, layer_heads in heads.items()}).model_dump_json()
    # Several workers may write the same file: each writes its own, and the last to be renamed stays.
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")  # readable for other users of the folder, as the umask permits
        os.replace(partial, path)
    except OSError as error:
        logger.warning("sparse-prefill: %s cannot be written (%s); the next start measures again", path, error.strerror)
        with contextlib.suppress(OSError):
            partial.unlink()


def _log(worker: Worker, heads: StreamingHeads, num_heads: int, is_known: bool, seconds: float) -> None:
    if worker.rank != 0:
        return
    settings = worker.resolved.streaming_heads
    assert settings is not None
    source = "from an earlier start" if is_known else f"measured in {seconds:.1f} s"
    logger.info(
        "sparse-prefill: %d of %d heads of this rank are streaming heads (%s): in steps after at least %d tokens of a "
        "request, they keep only %d first and %d nearest keys",
        sum(map(len, heads.values())), num_heads, source, settings.min_context_tokens, calibration.SINK_TOKENS,
        calibration.WINDOW_TOKENS,
    )  # fmt: skip
