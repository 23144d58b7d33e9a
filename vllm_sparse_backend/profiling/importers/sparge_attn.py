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
from pathlib import Path
from typing import Any

from vllm_sparse_backend.profiling.importers.torch_file import rounded, table
from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Provenance
from vllm_sparse_kernels.methods.base import Method

FORM = "SpargeAttn's state, tensors called LAYER.cdfthreshd and so on"
NEEDED = ("cdfthreshd", "simthreshd1", "pvthreshd")
STATE = (*NEEDED, "is_sparse", "simthreshd2")
UNITS = "skip_margin = -pvthreshd * ln 2, from base 2 to natural units"

_NUMBER = re.compile(r"(?:^|\.)(\d{1,5})(?:\.|$)")


def fits(content: Any) -> bool:
    return isinstance(content, dict) and any(_field(name) in STATE for name in content)


def level(content: dict[Any, Any], shape: ModelShape, source: str) -> Level:
    state: dict[int, dict[str, list[float]]] = {layer: {} for layer in range(shape.num_layers)}
    for name, tensor in content.items():
        layer, field = _place(name, shape, source)
        if field in state[layer]:
            raise ConfigurationError(f"{source}: {name:.80}: given, but layer {layer} has {field} already")
        state[layer][field] = table(tensor, (shape.num_heads,), f"{source}: {name:.80}")
    methods = [_layer(fields, shape.num_heads, f"{source}: layer {layer}") for layer, fields in state.items()]
    return Level.of_heads(methods, Provenance(source=f"imported from SpargeAttn's {Path(source).name}; {UNITS}"))


def _field(name: object) -> str:
    return name.rpartition(".")[2] if isinstance(name, str) else ""


def _place(name: object, shape: ModelShape, source: str) -> tuple[int, str]:
    field = _field(name)
    if field not in STATE:
        raise ConfigurationError(f"{source}: {name!r:.80}: {not_one_of(field, STATE)}")
    number = _NUMBER.search(str(name))
    if number is None or int(number[1]) >= shape.num_layers:
        raise ConfigurationError(f"{source}: {name!r:.80}: expected a layer's number below {shape.num_layers} in it")
    return int(number[1]), field


def _layer(fields: dict[str, list[float]], num_heads: int, where: str) -> list[Method]:
    if missing := [field for field in NEEDED if field not in fields]:
        raise ConfigurationError(f"{where}: {', '.join(missing)}: missing")
    sparse = fields.get("is_sparse", [1.0] * num_heads)
    columns = zip(sparse, *(fields[field] for field in NEEDED))
    return [
        _method(*rest, where=f"{where}, head {head}") if on else make_method("dense", {})
        for head, (on, *rest) in enumerate(columns)
    ]


def _method(mass: float, similarity: float, skip: float, *, where: str) -> Method:
    thresholds = {"kept_mass": rounded(mass), "min_similarity": rounded(similarity)}
    skipping = {"skip_margin": rounded(-skip * math.log(2)), "skip_whole_steps": True}
    try:
        return make_method("sparge_attn", thresholds | skipping)
    except ValueError as error:
        given = ", ".join(f"{name} {number:g}" for name, number in zip(NEEDED, (mass, similarity, skip), strict=True))
        raise ConfigurationError(f"{where}: given {given}: {error}") from None
