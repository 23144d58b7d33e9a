# SPDX-License-Identifier: Apache-2.0
"""``profile: auto``: the choice of a bundled profile for the served model.

A profile fits a model by architecture and shape, which several models may share. Among the profiles that fit, the
profile with the model's name (``ModelShape.names``) is chosen. If no profile has the name, a fitting profile is chosen
only if all fitting profiles were made for the same model, because the served model may be a fine-tune of it. The choice
always comes with its reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import bundled_profiles, load_profile

AUTO = "auto"


@dataclass(frozen=True)
class ProfileChoice:
    """The result of ``choose_profile``."""

    name: str | None
    why: str


def choose_profile(shape: ModelShape, bundled: Mapping[str, Path] | None = None) -> ProfileChoice:
    """Choose the bundled profile for a model.

    If several profiles are for the same model, profiles for the served rope_theta and profiles by this tool come first.
    """
    loaded = {name: load_profile(path) for name, path in (bundled or bundled_profiles()).items()}
    fitting = {
        name: profile for name, profile in loaded.items() if profile.model and not profile.model.differences(shape)
    }
    if not fitting:
        return ProfileChoice(None, f"no bundled profile is for {shape}")
    named = {
        name: profile for name, profile in fitting.items() if profile.model and _called(profile.model) & _called(shape)
    }
    same_theta = {
        name: profile
        for name, profile in fitting.items()
        if profile.model and profile.model.rope_theta == shape.rope_theta
    }
    candidates = named or same_theta or fitting
    models = sorted({" or ".join(profile.model.names) for profile in candidates.values() if profile.model})
    called = ", ".join(shape.names) or "a model without a name"
    if not named and len(models) > 1:
        return ProfileChoice(
            None, f"{called} has the shape of {' and of '.join(models)}: set profile to the name of a profile"
        )
    name = min(candidates, key=lambda name: (candidates[name].provenance.tool_version is None, name))
    others = f"; others that fit: {', '.join(sorted(set(fitting) - {name}))}" if len(fitting) > 1 else ""
    if named:
        return ProfileChoice(name, f"it was made for {called}{others}")
    why = f"it was made for {models[0] or 'a model of this shape'}, and {called} has its shape: check its answers"
    return ProfileChoice(name, why + others)


def _called(shape: ModelShape) -> set[str]:
    """Return the names in lower case, without their owners."""
    return {name.rpartition("/")[2].lower() for name in shape.names}
