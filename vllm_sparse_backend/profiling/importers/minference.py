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

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from vllm_sparse_backend.settings.errors import unexpected
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_kernels.methods.base import Method

Made = TypeVar("Made")

TOOL = "MInference's"
FORM = "MInference's patterns, a list of one object for each layer"
PATTERNS: dict[str, Callable[[int, int], Method]] = {
    "vertical_and_slash": lambda a, b: make_method("vertical_slash", {"vertical_tokens": a, "slash_tokens": b}),
    "stream_llm": lambda a, b: make_method("a_shape", {"sink_tokens": a, "local_tokens": b}),
    "block_sparse": lambda a, b: make_method("block_sparse", {"top_blocks": 100}),
}


def fits(content: Any) -> bool:
    return isinstance(content, list)


def read(layers: list[Any], shape: ModelShape) -> tuple[list[list[Method]], str]:
    if len(layers) != shape.num_layers:
        raise ValueError(f"given {len(layers)} layers, expected a list of {shape.num_layers} for {shape}")
    return _each("layer", layers, lambda heads: _each("head", _in_order(heads, shape), _method)), ""


def _in_order(heads: object, shape: ModelShape) -> list[object]:
    names = [str(head) for head in range(shape.num_heads)]
    if not isinstance(heads, dict) or set(heads) != set(names):
        given = f"heads {', '.join(heads) or 'none'}" if isinstance(heads, dict) else f"{heads!r:.80}"
        raise ValueError(f"given {given:.80}, expected an object with the heads 0 to {names[-1]} for {shape}")
    return [heads[name] for name in names]


def _method(entry: object) -> Method:
    match entry:
        case [str(pattern), int(a), int(b), int() | float()] if pattern in PATTERNS:
            return PATTERNS[pattern](a, b)
    raise ValueError(unexpected(entry, f"[{' or '.join(PATTERNS)}, integer, integer, score]"))


def _each(what: str, given: Iterable[object], make: Callable[[Any], Made]) -> list[Made]:
    """What ``make`` makes of each one; its ValueError says which of them it is."""
    made = []
    for number, one in enumerate(given):
        try:
            made.append(make(one))
        except ValueError as error:
            raise ValueError(f"{what} {number}: {error}") from None
    return made
