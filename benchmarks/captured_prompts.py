# SPDX-License-Identifier: Apache-2.0
"""A model's prompt, captured for timings: its layers, with heads repeated to fill a card, and plans of profiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vllm_sparse_backend.calibration.capture import Capture, capture_prompts, load_tokenizer
from vllm_sparse_backend.calibration.judge import chunk_rows, paged
from vllm_sparse_backend.calibration.prompts import MOST_CHARS, encoder
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import load_profile
from vllm_sparse_backend.prompts.lookups import begin_ids
from vllm_sparse_backend.prompts.texts import read_prompt_text
from vllm_sparse_kernels import PagedCache
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

NUM_HEADS = 32
"""Number of heads up to which a model's are repeated: few heads do not fill a card."""

FURTHEST_CLUSTER = 10_000
"""Upper bound of a model's number of heads."""


@dataclass(frozen=True)
class CapturedModel:
    """The layers of a model that can run sparse, on one prompt."""

    model: ModelShape
    layers: Sequence[int]
    copies: int
    """Times that each head is repeated."""
    prompts: Sequence[Batch]
    """The prompt in each layer."""

    def methods_of_profile(self, name_or_path: str) -> list[list[Method]]:
        """Return the methods of each layer's heads. Dense layers get the method that keeps everything."""
        profile, num_heads = load_profile(name_or_path, "--profile"), self.model.num_heads
        profile.check_model(self.model, f"--profile {name_or_path}")
        every: list[list[Method]] = []
        for layer in self.layers:
            methods = profile.methods_of(layer, num_heads)
            methods = (Dense(),) * num_heads if layer in profile.dense_layers else methods
            every.append([_of_copy(method, copy) for copy in range(self.copies) for method in methods])
        return every


def _of_copy(method: Method, copy: int) -> Method:
    """Return the method for a copy of its head, which has its own clusters of SharePrefill."""
    if isinstance(method, SharePrefill) and method.cluster != NOISE:
        return replace(method, cluster=method.cluster + copy * FURTHEST_CLUSTER)
    return method


def capture_model(model: Path, text: Path, skip: int, num_tokens: int, device: torch.device) -> CapturedModel:
    """Run a model on a text, without its first ``skip`` tokens."""
    token_ids = _read_tokens(model, text, skip, num_tokens)
    shape = ModelShape.from_folder(model)
    copies = max(1, NUM_HEADS // shape.num_heads)
    with TemporaryDirectory() as folder:
        (captured,) = capture_prompts(model, [token_ids], Path(folder), device, torch.bfloat16)
        layers = sorted(captured.scales)
        return CapturedModel(shape, layers, copies, [_prompt(captured, layer, copies, device) for layer in layers])


def _prompt(captured: Capture, layer: int, copies: int, device: torch.device) -> Batch:
    q, k, v = (x.repeat(1, copies, 1) for x in captured.read(layer, device))
    (rows,) = chunk_rows(captured.num_tokens, captured.num_tokens, device)
    return Batch(q, PagedCache(paged(k), paged(v)), rows, captured.scales[layer])


def _read_tokens(model: Path, text: Path, skip: int, num_tokens: int) -> list[int]:
    tokenizer, most_chars = load_tokenizer(model), (skip + num_tokens) * MOST_CHARS
    token_ids = encoder(tokenizer)(read_prompt_text(text, most_chars))
    if len(token_ids) < skip + num_tokens:
        raise ConfigurationError(f"text: {unexpected(f'{len(token_ids)} tokens', f'at least {skip + num_tokens}')}")
    return [*begin_ids(tokenizer), *token_ids[skip:]][:num_tokens]
