# SPDX-License-Identifier: Apache-2.0
"""Which form a foreign file has, told by what stands in it."""

import json
from pathlib import Path
from typing import Any

from vllm_sparse_backend.profiling.importers import minference, share_prefill
from vllm_sparse_backend.profiling.outside import readable
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Profile, Provenance

FORMS: tuple[Any, ...] = (minference, share_prefill)
"""Each a module that says what the form is called (``FORM``) and of which tool it is (``TOOL``), how to tell it
(``fits``), and what a file of it says (``read``): the methods of each layer's heads, from its content and the model's
shape, and a note. What is wrong is a ValueError or ConfigurationError with the place in the file."""


def import_profile(path: str | Path, model: str | Path) -> Profile:
    """The profile that says the same as a foreign file, for the model in this folder (or its config.json).

    Such files do not name their model. Raises ``ConfigurationError`` naming file and place where the file is malformed
    or of no known form, or the two do not fit each other.
    """
    path = Path(path)
    shape = ModelShape.from_folder(Path(model))
    with readable(path, "content", "expected JSON of MInference or SharePrefill"):
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    form = next((form for form in FORMS if form.fits(content)), None)
    if form is None:
        expected = "; or ".join(form.FORM for form in FORMS)
        given = f"{len(content)} entries" if isinstance(content, dict | list) else "one value"
        raise ConfigurationError(f"{path}: given {given} of type {type(content).__name__}, expected {expected}")
    try:
        methods, note = form.read(content, shape)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    level = Level.of_heads(methods, Provenance(source=f"imported from {form.TOOL} {path.name}{note}"))
    return Profile(format=1, model=shape, **{name: getattr(level, name) for name in Level.model_fields})


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(mapping := dict(pairs)) != len(pairs):
        raise ValueError("an object has a key twice")
    return mapping
