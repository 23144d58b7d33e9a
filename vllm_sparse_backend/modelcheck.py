"""Which layers of a model folder can prefill sparsely, read from its config.json without loading the model.

This is a forecast for people. What counts is what vLLM hands each layer when it is built: the backend asks there again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_sparse_backend.reasons import Fallback

# Kinds of layers that configs list in `layer_types`; a kind that is not here is no attention over all keys.
FULL_ATTENTION = {"full_attention", "attention", "global_attention"}
WINDOWED = {"sliding_attention", "local_attention", "chunked_attention"}
SINK_MODELS = {"gpt_oss", "mimo_v2_flash"}
ALIBI_MODELS = {"bloom", "mpt"}
DECODER_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class ModelFolderError(ValueError):
    """The folder holds no config.json that describes a decoder."""


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config with the defaults of its architecture where transformers knows it; text part only."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelFolderError(f"MODEL: given {folder}, expected a model folder with a config.json in it")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelFolderError(f"{path}: not JSON: {error}") from error
    config = _with_defaults(folder) or config
    text = config.get("text_config") or config
    if not isinstance(text.get("num_hidden_layers"), int):
        raise ModelFolderError(f"{path}: num_hidden_layers: given {text.get('num_hidden_layers')!r}, expected a number")
    return {"architectures": config.get("architectures"), **text}


def _with_defaults(folder: Path) -> dict[str, Any] | None:
    # A config.json may leave out what its architecture fixes (Gemma's alternating windows): vLLM sees the filled one.
    try:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except Exception:  # not installed, or an architecture it does not know: the file itself must do
        return None


def layer_reasons(config: Mapping[str, Any]) -> list[Fallback | None]:
    """Per layer why it can't go sparse, None where it can."""
    num_layers = config["num_hidden_layers"]
    if (reason := _model_reason(config)) is not None:
        return [reason] * num_layers
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types")
    if not kinds:
        return [Fallback.SLIDING_WINDOW if window else None] * num_layers
    return [_kind_reason(kind) for kind in kinds[:num_layers]]


def _kind_reason(kind: str) -> Fallback | None:
    if kind in FULL_ATTENTION:
        return None
    return Fallback.SLIDING_WINDOW if kind in WINDOWED else Fallback.NOT_DECODER


def _model_reason(config: Mapping[str, Any]) -> Fallback | None:
    """A reason that holds for every layer of the model."""
    model_type = config.get("model_type", "")
    architectures = config.get("architectures") or ["ForCausalLM"]
    if config.get("is_encoder_decoder") or not any(name.endswith(DECODER_HEADS) for name in architectures):
        return Fallback.NOT_DECODER
    if config.get("kv_lora_rank"):
        return Fallback.MLA
    if config.get("attn_logit_softcapping"):
        return Fallback.SOFTCAP
    if model_type in SINK_MODELS:
        return Fallback.SINKS
    if model_type in ALIBI_MODELS or config.get("alibi"):
        return Fallback.ALIBI
    return None
