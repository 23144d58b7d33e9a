# SPDX-License-Identifier: Apache-2.0
"""Forecast of the layers that can prefill sparsely, from a model's config without loading the model.

``sparse-prefill doctor`` shows the forecast, and a server refuses a model at start-up if none of its layers
qualifies. The forecast may be too optimistic: each layer is checked again once vLLM has built it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, StrictFloat, StrictInt, StrictStr, model_validator

from vllm_sparse_backend.config.errors import Section, refusal
from vllm_sparse_backend.config.fallback import Fallback, LayerTraits, layer_fallback
from vllm_sparse_backend.config.model_shape import (
    Count,
    config_file,
    layer_kinds,
    read_config_json,
    text_part,
    usual_numbers,
)

WINDOWED_KINDS = {"sliding_attention", "local_attention", "chunked_attention"}
ALIBI_MODELS = {"bloom", "mpt"}
ENCODER_MODELS = {
    "albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "nomic_bert", "roberta",
    "xlm-roberta",
}  # fmt: skip

QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM, V_HEAD_DIM = 128, 64, 128
"""Head dimensions of DeepSeek-V2, V3 and R1, and of Kimi-K2: kernels for multi-head latent attention support no others.
"""


class _CheckedFields(Section):
    """Fields of a config's text part whose types matter here."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: Count
    num_attention_heads: StrictInt | None = None
    head_dim: StrictInt | None = None
    hidden_size: StrictInt | None = None
    sliding_window: StrictInt | None = None
    max_position_embeddings: StrictFloat | None = None
    model_type: StrictStr | None = None
    layer_types: list[StrictStr] | None = None

    @model_validator(mode="after")
    def _type_of_each_layer(self) -> Self:
        # There may be more, for the layers of a draft model.
        if self.layer_types and len(self.layer_types) < self.num_hidden_layers:
            raise ValueError(
                f"layer_types: given a list of length {len(self.layer_types)}, expected one entry for each of the "
                f"{self.num_hidden_layers} layers"
            )
        return self


def read_config(model: Path) -> dict[str, Any]:
    """Read the text part of a model's config, with the architecture's defaults if transformers knows it."""
    path = config_file(model)
    if not path.is_file():
        raise refusal("MODEL", str(model), "a model folder with a config.json in it")
    config = _with_defaults(path) or read_config_json(path)
    text = text_part(config, str(path))
    # transformers sets `architectures` of a text part to None even if the full config names the architecture.
    architectures = config.get("architectures") or text.get("architectures")
    fields = {"num_hidden_layers": None, **text, **usual_numbers(text), "architectures": architectures}
    _CheckedFields.read(fields, f"{path}: ")
    return fields


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return a model's positions by its text config; None if unknown.

    With other scalings of rotary embeddings than these two, the config has the scaled number.
    """
    positions = config.get("max_position_embeddings")
    if not positions:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) in ("linear", "dynamic"):
        positions *= scaling.get("factor", 1)
    return int(positions)


def _with_defaults(path: Path) -> dict[str, Any] | None:
    # A config.json may omit fields that its architecture fixes (Gemma's alternating windows); vLLM completes them.
    try:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception:  # transformers is missing or does not know the architecture: use the file alone
        return None


def layer_reasons(config: Mapping[str, Any], **limits: Any) -> list[Fallback | None]:
    """Check each layer of a model. ``limits`` are the fields of ``LayerTraits`` that do not depend on the model."""
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    default_kind = "sliding_attention" if window else "full_attention"
    kinds = layer_kinds(config) or [default_kind] * num_layers
    return [layer_fallback(_traits(config, layer, kind, limits)) for layer, kind in enumerate(kinds[:num_layers])]


def _traits(config: Mapping[str, Any], layer: int, kind: str, limits: Mapping[str, Any]) -> LayerTraits:
    model_type = config.get("model_type")
    is_encoder = model_type in ENCODER_MODELS or bool(config.get("is_encoder_decoder"))
    # Other kinds are Mamba, linear attention and layers without either; a hybrid layer has attention and Mamba.
    has_attention = kind == "hybrid" or ("attention" in kind and "linear" not in kind)
    head_dim = _head_dim_of_layer(config, layer, kind) or config.get("head_dim")
    if not head_dim:  # other fields have to be numbers only in this case
        head_dim = (config.get("hidden_size") or 0) // (config.get("num_attention_heads") or 1)
    return LayerTraits(
        head_dim=head_dim,
        attn_type="decoder" if has_attention and not is_encoder else "other",
        sliding_window=config.get("sliding_window") or 0 if kind in WINDOWED_KINDS else None,
        alibi=model_type in ALIBI_MODELS or bool(config.get("alibi")),
        softcap=config.get("attn_logit_softcapping"),
        is_mla=bool(config.get("kv_lora_rank")),
        **limits,
    )


def _head_dim_of_layer(config: Mapping[str, Any], layer: int, kind: str) -> int | None:
    """Return a layer's head_dim if it differs from the model's, as in Gemma 4's layers with full attention.

    transformers writes the differences per layer; older files have ``global_head_dim``.
    """
    by_layer = config.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        differences = by_layer.get(str(layer), by_layer.get(layer))
        head_dim = differences.get("head_dim") if isinstance(differences, Mapping) else None
    else:
        head_dim = config.get("global_head_dim") if kind == "full_attention" else None
    return head_dim if isinstance(head_dim, int) else None


def mla_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """List the reasons why a model with MLA cannot prefill sparsely."""
    if config.get("index_topk"):
        yield (
            f"the model selects keys itself (index_topk {config['index_topk']} in its config, as DeepSeek-V3.2), "
            "expected dense multi-head latent attention (DeepSeek-V3 and R1, Kimi-K2); serve it without this flag"
        )
    expected = {
        "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
    }
    dims = {name: config.get(name) for name in expected}
    if dims != expected:
        actual = ", ".join(f"{name} {value}" for name, value in dims.items())
        wanted = ", ".join(map(str, expected.values()))
        yield f"the model has {actual}, expected {wanted}: kernels exist for no others; serve it without this flag"
