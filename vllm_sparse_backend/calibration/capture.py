# SPDX-License-Identifier: Apache-2.0
"""Queries (after rotary embedding), keys and values of every layer of a Hugging Face model, for one prompt.

An attention function, registered through the interface of transformers, writes its inputs to disk layer by layer and
continues with torch's scaled dot product attention, so memory holds one layer.
"""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_sparse_backend.calibration.external import readable, require_module
from vllm_sparse_backend.config.errors import ConfigurationError, refusal
from vllm_sparse_backend.config.model_check import max_positions, read_config

ATTENTION = "sparse_prefill_capture"

DEFAULT_TOKENS = 32768
"""Length of prompts by default, for models with at least as many positions."""


class LayerTensors(NamedTuple):
    """Queries, keys and values of one captured layer."""

    q: torch.Tensor  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]


@dataclass(frozen=True)
class Capture:
    """A captured prompt: a file for each layer that can run sparse, in the dtype that the model ran in."""

    folder: Path
    num_tokens: int
    scales: dict[int, float] = field(default_factory=dict)
    """For each captured layer, the scale of q·k."""

    def read(self, layer: int, device: torch.device | None = None) -> LayerTensors:
        """Load one captured layer."""
        return LayerTensors(**torch.load(self._path(layer), map_location=device))

    def add(self, layer: int, tensors: LayerTensors, scale: float) -> None:
        """Write one layer to the capture's folder."""
        path = self._path(layer)
        try:
            torch.save(tensors._asdict(), path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of several lines
            why = str(error).splitlines()[0]
            remedy = "write the profile to a larger disk, or use fewer or shorter prompts"
            raise ConfigurationError(f"{path}: cannot be written: {why}; {remedy}") from error
        self.scales[layer] = scale

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}.pt"


def capture_prompts(
    model: Path, prompts: Sequence[Sequence[int]], folder: Path, device: torch.device, dtype: torch.dtype
) -> list[Capture]:
    """Run a model on prompts, and write the inputs of its attention layers to a folder."""
    transformers = _transformers()
    plain = transformers.AttentionInterface()["sdpa"]
    capture: Capture

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *more_arguments: Any,
        scaling: float | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        """Write query [1, num_heads, num_tokens, head_dim] and key, value [1, num_kv_heads, ...]; then attend."""
        _refuse_unlike(model.name, more)
        if mask is None:  # layers with a sliding window or chunks have one, and never run sparse
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            parts = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
            capture.add(module.layer_idx, LayerTensors(*parts), scale)
        return plain(module, query, key, value, mask, *more_arguments, scaling=scaling, **more)

    transformers.AttentionInterface.register(ATTENTION, record)
    transformers.AttentionMaskInterface.register(ATTENTION, transformers.AttentionMaskInterface()["sdpa"])
    with readable(model, "weights"):
        network = transformers.AutoModelForCausalLM.from_pretrained(
            model, attn_implementation=ATTENTION, dtype=dtype, local_files_only=True
        )
    layers = network.base_model.to(device).eval()  # without the output head: logits are not needed
    captures = []
    for number, token_ids in enumerate(prompts):
        capture = Capture(folder / f"prompt-{number}", len(token_ids))
        capture.folder.mkdir()
        with torch.inference_mode():
            layers(torch.tensor([list(token_ids)], device=device), use_cache=False)
        if not capture.scales:
            raise ConfigurationError(
                f"{model.name}: given only layers with a sliding window, with chunks or without attention, expected at "
                "least one layer with plain causal attention; serve the model without a profile"
            )
        captures.append(capture)
    return captures


def prompt_tokens(model: Path, tokens: int | None) -> int:
    """Return the length of captured prompts: ``tokens``, or by default at most the model's positions."""
    positions = max_positions(read_config(model)) or math.inf
    if tokens is None:
        return int(min(DEFAULT_TOKENS, positions))
    if tokens > positions:
        raise refusal("--tokens", tokens, f"at most {positions}, the positions of {model}")
    return tokens


def _refuse_unlike(model: str, more: dict[str, Any]) -> None:
    """Raise ConfigurationError if a layer's attention is not plain: the capture continues with plain attention."""
    for keyword, what in (("softcap", "a soft cap on their scores"), ("s_aux", "learnt sinks")):
        if more.get(keyword) is not None:
            raise ConfigurationError(
                f"{model}: given layers with {what}, expected layers without; captures do not support them, so write "
                "the profile by hand, or serve the model without a profile"
            )


def load_tokenizer(model: Path) -> Any:
    """Load a model's tokenizer with transformers."""
    with readable(model, "tokenizer"):
        return _transformers().AutoTokenizer.from_pretrained(model, local_files_only=True)


def default_text() -> Path:
    """Return the folder of the installed vLLM's sources, the default text of prompts. Does not import vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "--text: given none, expected a file or folder: vLLM, whose sources are the default, is not installed"
        )
    return Path(spec.submodule_search_locations[0])


def _transformers() -> Any:
    return require_module("transformers", "capturing needs transformers, which comes with vLLM")
