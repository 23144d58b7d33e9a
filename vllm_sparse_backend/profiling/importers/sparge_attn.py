# SPDX-License-Identifier: Apache-2.0
"""What SpargeAttn's autotune saves: the state of its modules, as ``extract_sparse_attention_state_dict`` collects it.

A dictionary of tensors, one number for each head, called ``PATH.cdfthreshd``, ``PATH.simthreshd1``, ``PATH.pvthreshd``,
``PATH.is_sparse`` and ``PATH.simthreshd2``; the layer is the first number in PATH. Their units and ours:

* ``cdfthreshd`` is τ, ``kept_mass``; ``simthreshd1`` is θ, ``min_similarity``: as they are.
* ``pvthreshd`` is −λ · log₂ e, as their kernels compare scores in base 2: ``skip_margin`` = −pvthreshd · ln 2. They
  leave a skipped step out of the softmax's sum too, and so does the profile (``skip_whole_steps``).
* Heads with ``is_sparse`` false are dense.
* ``simthreshd2`` is used by none of their kernels, and must be there no more than ``is_sparse`` must.

Their kernels multiply in 8 bits. The profile does not ask for it: attention over what is kept is then exact to
rounding.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from vllm_sparse_backend.profiling.importers.places import each
from vllm_sparse_backend.profiling.importers.torch_file import rounded, table
from vllm_sparse_backend.settings.errors import not_one_of
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_kernels.methods.base import Method

TOOL = "SpargeAttn's"
FORM = "SpargeAttn's state, tensors called LAYER.cdfthreshd and so on"
NEEDED = ("cdfthreshd", "simthreshd1", "pvthreshd")
STATE = (*NEEDED, "is_sparse", "simthreshd2")
UNITS = "skip_margin = -pvthreshd * ln 2, from base 2 to natural units"

_NUMBER = re.compile(r"(?:^|\.)(\d{1,5})(?:\.|$)")


def fits(content: Any) -> bool:
    return isinstance(content, dict) and any(_field(name) in STATE for name in content)


def read(content: dict[Any, Any], shape: ModelShape) -> tuple[list[list[Method]], str]:
    state: list[dict[str, list[float]]] = [{} for _ in range(shape.num_layers)]
    for name, tensor in content.items():
        layer, field = _place(name, shape)
        if field in state[layer]:
            raise ValueError(f"{name:.80}: given, but layer {layer} has {field} already")
        state[layer][field] = table(tensor, (shape.num_heads,), f"{name:.80}")
    return each("layer", state, lambda fields: _layer(fields, shape.num_heads)), f"; {UNITS}"


def _field(name: object) -> str:
    return name.rpartition(".")[2] if isinstance(name, str) else ""


def _place(name: object, shape: ModelShape) -> tuple[int, str]:
    field = _field(name)
    if field not in STATE:
        raise ValueError(f"{name!r:.80}: {not_one_of(field, STATE)}")
    number = _NUMBER.search(str(name))
    if number is None or int(number[1]) >= shape.num_layers:
        raise ValueError(f"{name!r:.80}: expected a layer's number below {shape.num_layers} in it")
    return int(number[1]), field


def _layer(fields: dict[str, list[float]], num_heads: int) -> list[Method]:
    if missing := [field for field in NEEDED if field not in fields]:
        raise ValueError(f"{', '.join(missing)}: missing")
    sparse = fields.get("is_sparse", [1.0] * num_heads)
    return each("head", zip(sparse, *(fields[field] for field in NEEDED)), _method)


def _method(given: Sequence[float]) -> Method:
    sparse, mass, similarity, skip = given
    if not sparse:
        return make_method("dense", {})
    thresholds = {"kept_mass": rounded(mass), "min_similarity": rounded(similarity)}
    skipping = {"skip_margin": rounded(-skip * math.log(2)), "skip_whole_steps": True}
    try:
        return make_method("sparge_attn", thresholds | skipping)
    except ValueError as error:
        raise ValueError(f"given {dict(zip(NEEDED, map(rounded, given[1:])))}: {error}") from None
