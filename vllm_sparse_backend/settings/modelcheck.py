# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model can prefill sparsely, read from its config without loading it.

A forecast, for `sparse-prefill doctor` and for refusing early where no layer could. It errs on the side of yes: each
layer is asked again when vLLM has built it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictFloat, StrictInt, StrictStr, ValidationError, model_validator

from vllm_sparse_backend.settings.errors import ConfigurationError, report, unexpected
from vllm_sparse_backend.settings.model_shape import Count, read_config_json, text_part, usual_numbers
from vllm_sparse_backend.settings.reasons import Fallback, layer_fallback

WINDOWED_KINDS = {"sliding_attention", "local_attention", "chunked_attention"}
ALIBI_MODELS = {"bloom", "mpt"}
ENCODER_MODELS = {
    *("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "nomic_bert"),
    *("roberta", "xlm-roberta"),
}


class _Stated(BaseModel):
    """Fields of a config's text part that are reckoned with. Others are looked at for whether they are there."""

    num_hidden_layers: Count
    num_attention_heads: StrictInt | None = None
    head_dim: StrictInt | None = None
    hidden_size: StrictInt | None = None
    sliding_window: StrictInt | None = None
    max_position_embeddings: StrictFloat | None = None
    model_type: StrictStr | None = None
    layer_types: list[StrictStr] | None = None

    @model_validator(mode="after")
    def _kind_of_each_layer(self) -> "_Stated":
        # There may be more, for the layers of a draft model.
        if self.layer_types and len(self.layer_types) < self.num_hidden_layers:
            given = f"layer_types: given {len(self.layer_types)} of them"
            raise ValueError(f"{given}, expected one for each of the {self.num_hidden_layers} layers")
        return self


def read_config(folder: Path) -> dict[str, Any]:
    """The text part of a model's config, with its architecture's defaults where transformers knows it.

    Numbers of layers and heads have the names that most models give them. Raises ConfigurationError where the folder
    has no config.json that describes layers.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"MODEL: {unexpected(str(folder), 'a model folder with a config.json in it')}")
    return read_config_file(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """The same of a config.json."""
    config = _with_defaults(path) or read_config_json(path)
    text = text_part(config, str(path))
    # transformers writes down that a text part names no architecture, where the whole model does.
    architectures = config.get("architectures") or text.get("architectures")
    found = {"num_hidden_layers": None, **text, **usual_numbers(text), "architectures": architectures}
    try:
        _Stated.model_validate(found)
    except ValidationError as error:
        raise report(error, _Stated, f"{path}: ") from None
    return found


def _with_defaults(path: Path) -> dict[str, Any] | None:
    # A config.json may leave out what its architecture fixes (Gemma's alternating windows): vLLM sees the filled one.
    try:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception:  # not installed, or an architecture it does not know: the file itself must do
        return None


def layer_reasons(config: Mapping[str, Any]) -> list[Fallback | None]:
    """Per layer why it can't go sparse, None where it can. The dtype is taken to be one that can."""
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    default_kind = "sliding_attention" if window else "full_attention"
    kinds = config.get("layer_types") or [default_kind] * num_layers
    return [_layer_reason(config, kind) for kind in kinds[:num_layers]]


def _layer_reason(config: Mapping[str, Any], kind: str) -> Fallback | None:
    model_type = config.get("model_type")
    encoder = model_type in ENCODER_MODELS or bool(config.get("is_encoder_decoder"))
    attends = "attention" in kind and "linear" not in kind  # the rest are Mamba's and their like
    return layer_fallback(
        head_dim=config.get("head_dim") or (config.get("hidden_size") or 0) // (config.get("num_attention_heads") or 1),
        dtype="bfloat16",
        attn_type="decoder" if attends and not encoder else "other",
        sliding_window=config.get("sliding_window") or 0 if kind in WINDOWED_KINDS else None,
        alibi=model_type in ALIBI_MODELS or bool(config.get("alibi")),
        softcap=config.get("attn_logit_softcapping"),
        is_mla=bool(config.get("kv_lora_rank")),
    )
