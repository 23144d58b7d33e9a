# SPDX-License-Identifier: Apache-2.0
"""Profiles for servers of Llama-3.1-8B's shape: many methods to choose from by request, or one for each head.

    python -m benchmarks.levels FILE             a level for each method, at its defaults
    python -m benchmarks.levels FILE --varied    a method or parameters of its own for every head of every layer

    sparse-prefill bench serve /tmp/llama-8b-shape --server-args "--load-format dummy" \\
        --settings FILE --level a_shape --level sale
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.shape import SHAPE
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Profile, load_profile
from vllm_sparse_kernels.methods.base import Method

IMPORTED = "minference-llama-3.1-8b-instruct-per-head"

LEVELS: dict[str, dict[str, Any]] = {
    "a_shape": {"method": "a_shape"},
    "dense": {"method": "dense"},
    "sale": {"method": "sale"},
    # Random weights make all of 131,072 keys' weights about 1/131,072: none passes the default, all of them this.
    "sale-keeps-all": {"method": "sale", "tau": 1e-7},
    "sparge_attn": {"method": "sparge_attn"},
    "flex_vertical_slash": {"method": "flex_vertical_slash"},
    "anchor_attention": {"method": "anchor_attention"},
    "share_prefill": {"method": "share_prefill", "cluster": 0},
    "minference": {"method": "vertical_slash"},
}

VARIED: tuple[tuple[str, str, float, float], ...] = (
    ("a_shape", "local_tokens", 512, 8),
    ("vertical_slash", "vertical_tokens", 200, 8),
    ("block_sparse", "top_blocks", 16, 1),
    ("flex_vertical_slash", "gamma", 0.8, 0.001),
    ("anchor_attention", "theta", 9.0, 0.01),
    ("sparge_attn", "kept_mass", 0.85, 0.001),
    ("sale", "tau", 0.004, 0.001),
    ("vertical_slash", "slash_tokens", 800, 16),
)
"""Methods in turn: a parameter, its least value, and by how much it rises from a head with that method to the next."""


def levels_profile() -> Profile:
    """A level for each method; ``auto`` says from where on each is sparse, as on a server of its own."""
    names = [name for name in LEVELS if name != "a_shape"]
    levels = {name: {"default": LEVELS[name]} for name in names}
    profile = Profile.model_validate(
        {"format": 1, "model": "any", "level": "a_shape", "default": LEVELS["a_shape"], "levels": levels}
    )
    imported = load_profile(IMPORTED)
    per_head = Level(default=imported.default, layers=imported.layers, dense_layers=imported.dense_layers)
    return profile.model_copy(
        update={"model": imported.model, "levels": {**profile.levels, "per-head-llama-3.1-8b": per_head}}
    )


def varied_profile() -> Profile:
    """No two heads of the model alike. Rows of a few tokens are sparse too: what a step can need is what is tried."""
    shape = ModelShape.from_config(SHAPE | {"num_hidden_layers": 32})
    heads = [
        [varied_method(layer * shape.num_heads + head) for head in range(shape.num_heads)]
        for layer in range(shape.num_layers)
    ]
    level = Level.of_heads(heads)
    return Profile(
        format=1, model=shape, default=level.default, layers=level.layers, min_tokens=4096, min_query_tokens=16
    )


def varied_method(number: int) -> Method:
    """Of the head of that number, counted over all layers."""
    # Each layer has its methods at other heads, as there is one head more than its number of groups of methods.
    turn, place = divmod(number, len(VARIED))
    method, field, least, step = VARIED[(place + turn // 4) % len(VARIED)]
    value = least + turn * step
    return make_method(method, {field: int(value) if isinstance(least, int) else round(value, 6)})


def main(
    file: Annotated[Path, typer.Argument(help="Profile to write.")],
    varied: Annotated[bool, typer.Option("--varied", help="A method or parameters of its own for every head.")] = False,
) -> None:
    file.write_text((varied_profile() if varied else levels_profile()).to_yaml(compact=True), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    typer.run(main)
