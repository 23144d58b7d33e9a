# SPDX-License-Identifier: Apache-2.0
"""``profile: auto``: the bundled profile for the model that is served, or none.

A profile fits by architecture and shape. Several models may share these, so among profiles that fit one is taken by
what the model is called (``ModelShape.names``); only where all that fit were made for one model is that model's taken
for another, such as its fine-tunes. What was taken, and why, is said either way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Profile, bundled_profiles, load_profile

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """``name`` and ``profile`` are None where none was taken; ``why`` says which way it went."""

    name: str | None
    profile: Profile | None
    why: str


def choose(shape: ModelShape, bundled: Mapping[str, Path] | None = None) -> Choice:
    """The bundled profile for a model of that shape and those names.

    Of profiles for the same model, those that were calibrated for the served rope_theta and by this tool go first.
    """
    loaded = {name: load_profile(path) for name, path in (bundled or bundled_profiles()).items()}
    fitting = {name: one for name, one in loaded.items() if one.model and not one.model.differences(shape)}
    if not fitting:
        return Choice(None, None, f"no bundled profile is for {shape}")
    named = {name: one for name, one in fitting.items() if one.model and _called(one.model) & _called(shape)}
    same_theta = {name: one for name, one in fitting.items() if one.model and one.model.rope_theta == shape.rope_theta}
    candidates = named or same_theta or fitting
    models = sorted({" or ".join(one.model.names) for one in candidates.values() if one.model})
    called = ", ".join(shape.names) or "a model without a name"
    if not named and len(models) > 1:
        return Choice(
            None, None, f"{called} has the shape of {' and of '.join(models)}: name the profile that you want"
        )
    name = min(candidates, key=lambda one: (candidates[one].provenance.tool_version is None, one))
    others = f"; others that fit: {', '.join(sorted(set(fitting) - {name}))}" if len(fitting) > 1 else ""
    if named:
        return Choice(name, loaded[name], f"it was made for {called}{others}")
    why = f"it was made for {models[0] or 'a model of this shape'}, and {called} has its shape: check its answers"
    return Choice(name, loaded[name], why + others)


def _called(shape: ModelShape) -> set[str]:
    """Names without their owners, in small letters."""
    return {name.rpartition("/")[2].lower() for name in shape.names}
