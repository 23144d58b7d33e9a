# SPDX-License-Identifier: Apache-2.0
"""Files of MInference's offline search: minference/configs/*.json in its authors' repository, as of August 2025.

A list with one object for each layer, ``{"HEAD": [pattern, a, b, score]}``, heads counted over the whole model:

* ``vertical_and_slash``: keep the ``a`` heaviest columns (tokens) and the ``b`` heaviest diagonals;
* ``stream_llm``: keep the first ``a`` tokens (sink) and a window of ``b`` tokens (local);
* ``block_sparse``: the authors' code keeps 100 blocks of 64 keys for each block of queries that it computes at a time,
  whatever ``a`` and ``b`` say (in their search ``a`` was a ratio, not a count), and so does the profile;
* ``score`` is the search's own measure, which changed between its versions: recall in some files, a count of differing
  outputs in others. It is not kept.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of, unexpected
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Provenance
from vllm_sparse_kernels.methods.base import Method

FORM = "MInference's patterns, a list of one object for each layer"
PATTERNS: dict[str, Callable[[int, int], Method]] = {
    "vertical_and_slash": lambda a, b: make_method("vertical_slash", {"vertical_tokens": a, "slash_tokens": b}),
    "stream_llm": lambda a, b: make_method("a_shape", {"sink_tokens": a, "local_tokens": b}),
    "block_sparse": lambda a, b: make_method("block_sparse", {"top_blocks": 100}),
}


def fits(content: Any) -> bool:
    return isinstance(content, list)


def level(layers: list[Any], shape: ModelShape, source: str) -> Level:
    if len(layers) != shape.num_layers:
        raise ConfigurationError(
            f"{source}: given {len(layers)} layers, expected a list of {shape.num_layers} for {shape}"
        )
    methods = [_layer(heads, shape, f"{source}: layer {layer}") for layer, heads in enumerate(layers)]
    return Level.of_heads(methods, Provenance(source=f"imported from MInference's {Path(source).name}"))


def _layer(heads: object, shape: ModelShape, where: str) -> list[Method]:
    if not isinstance(heads, dict) or set(heads) != {str(head) for head in range(shape.num_heads)}:
        given = f"heads {', '.join(heads) or 'none'}" if isinstance(heads, dict) else f"{heads!r:.80}"
        expected = f"an object with the heads 0 to {shape.num_heads - 1} for {shape}"
        raise ConfigurationError(f"{where}: given {given:.80}, expected {expected}")
    return [_method(heads[str(head)], f"{where}, head {head}") for head in range(shape.num_heads)]


def _method(entry: object, where: str) -> Method:
    match entry:
        case [str(pattern), int(a), int(b), int() | float()]:
            if pattern not in PATTERNS:
                raise ConfigurationError(f"{where}: pattern: {not_one_of(pattern, PATTERNS)}")
        case _:
            raise ConfigurationError(f"{where}: {unexpected(entry, '[pattern, integer, integer, score]')}")
    try:
        return PATTERNS[pattern](a, b)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from None
