# SPDX-License-Identifier: Apache-2.0
"""Queries (after rotary embedding), keys and values of every layer of a Hugging Face model, for one prompt.

An attention function, registered through the interface of transformers, writes its inputs to disk layer by layer and
continues with torch's scaled dot product attention, so memory holds one layer. A capture is a folder of

* ``layer-000.safetensors`` and so on: ``q`` [num_tokens, num_heads, head_dim], ``k`` and ``v`` [num_tokens,
  num_kv_heads, head_dim], in the dtype that the model ran in;
* ``capture.json``, written last: the captured layers, and the layers left out because they never run sparse.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from vllm_sparse_backend.calibration.external import readable, require_module, safetensors, writable
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.input_files import MAX_DATA_BYTES, read_bytes
from vllm_sparse_backend.config.model_check import read_config
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.output_files import whole_file
from vllm_sparse_backend.evaluation.report import write_json

ATTENTION = "sparse_prefill_capture"


class LayerTensors(NamedTuple):
    """Queries, keys and values of one captured layer."""

    q: torch.Tensor  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]


@dataclasses.dataclass(frozen=True)
class Capture:
    """A captured prompt on disk."""

    folder: Path
    model: str
    """Name of the model's folder."""
    shape: ModelShape
    num_tokens: int
    scales: dict[int, float]
    """For each captured layer, the scale of q·k."""
    left_out: dict[int, str]
    """For each other layer, why it was left out."""

    def read(self, layer: int, device: str | torch.device = "cpu") -> LayerTensors:
        """Load one captured layer."""
        with readable(self._path(layer), "tensors"):
            tensors = safetensors().load_file(self._path(layer), device=str(device))
            return LayerTensors(tensors["q"], tensors["k"], tensors["v"])

    def add(self, layer: int, tensors: LayerTensors, scale: float) -> None:
        """Write one layer to the capture's folder."""
        with whole_file(self._path(layer)) as path, writable(path):
            safetensors().save_file(tensors._asdict(), path)
        self.scales[layer] = scale

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03}.safetensors"

    @staticmethod
    def open(folder: Path) -> "Capture":
        """Open the capture in a folder."""
        path = folder / "capture.json"
        if not path.is_file():
            raise ConfigurationError(f"{folder}: given a folder without capture.json, expected a finished capture")
        with readable(path, "contents", "delete its folder, and run the command again"):
            capture = TypeAdapter(Capture).validate_json(read_bytes(path, MAX_DATA_BYTES), strict=True)
        return dataclasses.replace(capture, folder=folder)


def capture_prompts(
    model: Path,
    prompts: Sequence[Sequence[int]],
    folders: Sequence[Path],
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Capture]:
    """Run a model on prompts, and write the inputs of its attention layers to disk, one layer at a time."""
    transformers = _transformers()
    plain = transformers.AttentionInterface()["sdpa"]

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *more_arguments: Any,
        scaling: float | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        """Write query [1, num_heads, num_tokens, head_dim] and key, value [1, num_kv_heads, ...]; then attend."""
        _refuse_unlike(model.name, more)
        if mask is not None:
            capture.left_out[module.layer_idx] = "layers with a sliding window or chunks"
        else:
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
    for token_ids, folder in zip(prompts, folders, strict=True):
        capture = begin_capture(model, token_ids, folder)
        with torch.inference_mode():
            layers(torch.tensor([list(token_ids)], device=device), use_cache=False)
        finish_capture(capture)
        yield capture


def prompt_tokens(model: Path, tokens: int | None, default: int) -> int:
    """Return the number of tokens of a captured prompt."""
    config = read_config(model)
    stretched = (config.get("rope_scaling") or config.get("rope_parameters") or {}).get("factor")
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or stretched:
        return default if tokens is None else tokens
    if tokens is None:
        return min(default, positions)
    if tokens > positions:
        raise ConfigurationError(
            f"--tokens: {unexpected(tokens, f'at most {positions}, max_position_embeddings of {model}')}"
        )
    return tokens


def begin_capture(model: Path, token_ids: Sequence[int], folder: Path) -> Capture:
    """Begin a capture, and replace any capture in the folder."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    (folder / "capture.json").unlink(missing_ok=True)
    return Capture(folder, model.name, ModelShape.from_folder(model), len(token_ids), {}, {})


def finish_capture(capture: Capture) -> None:
    """Mark a capture as complete by writing its ``capture.json``."""
    if not capture.scales:
        reasons = ", ".join(sorted(set(capture.left_out.values()))) or "no layer with attention"
        raise ConfigurationError(
            f"{capture.model}: given {reasons}, expected at least one layer with plain causal attention; serve the "
            "model without a profile"
        )
    # Written atomically, and last: an interrupted capture has no such file. No path is stored: the folder may be moved.
    write_json(capture.folder / "capture.json", dataclasses.asdict(capture) | {"folder": "."})


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


def begin_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that begin every prompt in the model's training."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


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
