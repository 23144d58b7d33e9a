# SPDX-License-Identifier: Apache-2.0
"""Which form a foreign file has, told by what stands in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_sparse_backend.profiling.importers import minference, sale, share_prefill, sparge_attn, torch_file
from vllm_sparse_backend.settings import strict_yaml
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Profile


class Form(NamedTuple):
    """A form of files: what it is called, how to tell it, and how to read it."""

    name: str
    fits: Callable[[Any], bool]
    level: Callable[[Any, ModelShape, str], Level]
    """From what is in the file, the model's shape and the file's name to what it says; that name starts its errors."""


JSON_FORMS = (
    Form("MInference's patterns, a list of one object for each layer", minference.fits, minference.level),
    Form(
        "SharePrefill's clusters, an object with clusters and shared_clusters", share_prefill.fits, share_prefill.level
    ),
)
TORCH_FORMS = (
    Form("SpargeAttn's state, tensors called LAYER.cdfthreshd and so on", sparge_attn.fits, sparge_attn.level),
    Form("SALE's thresholds, one tensor [layers, heads]", sale.fits, sale.level),
)
FORMS = (*JSON_FORMS, *TORCH_FORMS)


def import_profile(path: str | Path, model: str | Path) -> Profile:
    """The profile that says the same as a foreign file, for the model in this folder (or its config.json).

    Such files do not name their model. Raises ``ConfigurationError`` naming file and place where the file is malformed
    or of no known form, or the two do not fit each other.
    """
    path = Path(path)
    shape = ModelShape.from_folder(Path(model))
    content, forms = _read(path)
    form = next((form for form in forms if form.fits(content)), None)
    if form is None:
        expected = "; or ".join(form.name for form in FORMS)
        given = f"{len(content)} entries" if isinstance(content, dict | list) else "one value"
        raise ConfigurationError(f"{path}: given {given} of type {type(content).__name__}, expected {expected}")
    level = form.level(content, shape, str(path))
    return Profile(format=1, model=shape, **{name: getattr(level, name) for name in Level.model_fields})


def _read(path: Path) -> tuple[Any, tuple[Form, ...]]:
    if torch_file.is_one(path):
        return torch_file.read(path), TORCH_FORMS
    if torch_file.is_old(path):
        raise ConfigurationError(
            f"{path}: given a pickle, as torch.save wrote them before torch 1.6, expected a zip archive, as it writes "
            "now; save it again with a recent torch"
        )
    try:
        return json.loads(strict_yaml.read_text(path), object_pairs_hook=_unique_keys), JSON_FORMS
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: neither JSON nor what torch.save writes: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(mapping := dict(pairs)) != len(pairs):
        raise ValueError("an object has a key twice")
    return mapping
