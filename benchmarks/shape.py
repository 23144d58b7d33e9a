# SPDX-License-Identifier: Apache-2.0
"""Writes a model folder of Llama-3.1-8B's shape without weights, for `vllm serve --load-format dummy`.

    python -m benchmarks.shape FOLDER [--layers 32] [--positions 135168] [--sinks]

Random weights make attention nearly uniform. Methods that depend on attention then keep nearly everything, and show
their cost if nothing can be left out. A-shape's density does not depend on weights.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.helpers.tiny_models import CONFIG, write_tokenizer
from vllm_sparse_backend.config.model_shape import ModelShape

SHAPE: dict[str, Any] = CONFIG | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}

SINKS = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_sinks": True}
SINKS |= {"attention_multiplier": SHAPE["head_dim"] ** -0.5}
"""The same with a learnt sink for each head: vLLM's Granite is a Llama with optional sinks."""


def make_shape(folder: Path, layers: int, positions: int, sinks: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPE | {"num_hidden_layers": layers, "max_position_embeddings": positions} | (SINKS if sinks else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder)
    _name_all_tokens(folder / "tokenizer.json", SHAPE["vocab_size"])
    return folder


def _name_all_tokens(file: Path, vocab_size: int) -> None:
    """Give each token a text, because a model with random weights may answer with any token.

    After a token without text, vLLM decodes the whole prompt again with every token until one has text. This takes 15
    to 25 ms per token after 131,072 tokens, more than the model.
    """
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words |= {f"Ġ{number}": number for number in range(len(words), vocab_size)}  # no merge produces them
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def kv_bytes(model: Path, tokens: int) -> int:
    """Return the bytes of 16-bit keys and values of all layers."""
    shape = ModelShape.from_folder(model)
    return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * tokens


def main(
    folder: Annotated[Path, typer.Argument(help="Model folder to create.")],
    layers: Annotated[int, typer.Option(help="Layers; with 8, a million tokens fit on a card.")] = 32,
    positions: Annotated[int, typer.Option(help="Longest sequence.")] = 135168,
    sinks: Annotated[bool, typer.Option(help="With a learnt sink for each head.")] = False,
) -> None:
    print(make_shape(folder, layers, positions, sinks))


if __name__ == "__main__":
    typer.run(main)
