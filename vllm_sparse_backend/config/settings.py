# SPDX-License-Identifier: Apache-2.0
"""The settings under the key ``sparse_prefill`` of vLLM's ``--additional-config``.

The text under each field is its only description: ``python -m benchmarks.settings_tables`` writes it into the tables of
README.md, docs/settings.md, docs/requests_reference.md and docs/streaming_heads.md.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vllm_sparse_backend.config.crossover_table import AUTO, TokenCount
from vllm_sparse_backend.config.errors import ConfigurationError, Section, looks_like, not_one_of, refusal
from vllm_sparse_backend.config.keys import CARRIED, KEY, OPTION, SETTINGS
from vllm_sparse_backend.config.method_parameters import make_method, method_names
from vllm_sparse_backend.config.profile import EXACT, ON
from vllm_sparse_backend.config.ranges import Ranges
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

SCORING_METHOD = "top_p"
"""The method that streaming heads replace."""


def _to_level(value: object) -> object:
    """Also accept 0, 1, false and true: YAML reads ``on`` as true, and requests use 0 and 1."""
    return {0: EXACT, 1: ON}.get(value, value) if isinstance(value, (bool, int)) else value


LevelChoice = Annotated[StrictStr, BeforeValidator(_to_level)]
"""``exact``, ``on`` for the server's own method or profile, or the name of one of its profile's levels."""


class RequestsConfig(Section):
    """The default level of requests, and the levels that they may choose (docs/requests.md)."""

    default: Annotated[LevelChoice, BeforeValidator(lambda level: ON if level is None else level)] = ON
    """Level of requests that do not choose a level: `exact`, `on` (the server's method or profile), or a level."""

    allow: tuple[LevelChoice, ...] | None = None
    """Levels that requests may choose in addition to their default: `exact`, `on`, names of levels, and `p` for any
    number between 0 and 1. `[]` allows none. The default allows all."""


class SparsePrefillConfig(Section):
    """All settings of the backend. Every field has a default, so that the empty mapping is a valid configuration."""

    profile: Annotated[StrictStr, Field(min_length=1)] | None = None
    """Name of a bundled profile, or path of a YAML file. Excludes `method` and `params`. See profiles/README.md."""

    method: StrictStr = "default"
    """Selection method of all heads: a method or one of the presets `default`, `minference` and `streaming`."""

    params: dict[str, Any] = Field(default={})
    """Parameters of the method that differ from its defaults. See docs/settings.md#methods."""

    min_tokens: TokenCount = AUTO
    """Number of leading positions of every request that are computed densely, as in stock vLLM. `auto` is the measured
    crossover. Takes precedence over the profile."""

    min_query_tokens: TokenCount = AUTO
    """Minimum number of new tokens past `min_tokens` for a request to run sparse in a step. `auto` is the measured
    crossover. Takes precedence over the profile."""

    crossover: StrictStr | None = None
    """Path of a table of measured crossovers, as written by `sparse-prefill bench crossover`, instead of the bundled
    table."""

    dense_layers: Ranges = ()
    """Layers that always run dense, in addition to the profile's: numbers, or ranges such as `"0-3,7"`."""

    engine: Literal["auto", "hopper", "flash", "portable"] = AUTO
    """Attention kernel. `auto` is the fastest kernel that works. If a named kernel does not work, the server stops."""

    streaming_heads: Literal["auto", True, False] = AUTO
    """Finds streaming heads at start-up, by running the model on a generated prompt, and does not score their keys.
    With `auto`, servers that cannot find them do without; with `true`, they stop instead. Only for `top_p`. See
    docs/streaming_heads.md."""

    requests: RequestsConfig = RequestsConfig()
    """Default level for requests, and the levels that requests may choose. See docs/requests_reference.md#a-policy."""

    check_index: StrictBool = False
    """Validates the selected keys of every layer in every step. Synchronises with the device: for debugging only."""

    @field_validator("method")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in method_names():
            raise ValueError(not_one_of(name, method_names()))
        return name

    @field_validator("params")
    @classmethod
    def _accepted(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        method_is_valid = "method" in info.data
        if method_is_valid and info.data.get("profile") is None:  # otherwise another field reports the error
            make_method(info.data["method"], params)
        return params

    @model_validator(mode="after")
    def _consistent(self) -> "SparsePrefillConfig":
        conflicts = [field for field in ("method", "params") if field in self.model_fields_set]
        if self.profile is not None and conflicts:
            raise ValueError(f"given both profile {self.profile!r} and {conflicts[0]}, expected only one of them")
        if self.streaming_heads is True and (why := self.not_for_streaming()) is not None:
            raise ValueError(why)
        return self

    def not_for_streaming(self) -> str | None:
        """Return why streaming heads would save nothing with this profile or method."""
        if self.profile is not None:
            return (
                f"given both profile {self.profile!r} and streaming_heads, expected only one of them: a profile "
                "already has a method for each head"
            )
        method = self.uniform_method()
        if name_of(method) != SCORING_METHOD:
            return (
                f"streaming_heads: given with method {self.method!r}, expected {SCORING_METHOD} or default, the method "
                "whose scoring streaming heads save; leave one of them out"
            )
        if method.share_kept == 1:
            return (
                "streaming_heads: given with kept_mass 1, which keeps every key, expected less; leave one of them out"
            )
        return None

    def uniform_method(self) -> Method:
        """Build the method of every head, for a configuration without a profile."""
        return make_method(self.method, self.params)


def load_config(additional_config: Mapping[str, Any] | None) -> SparsePrefillConfig:
    """Read the settings from vLLM's ``additional_config``."""
    if additional_config is None:
        additional_config = {}
    if not isinstance(additional_config, Mapping):
        raise refusal(OPTION, additional_config, f"a mapping with the key {KEY!r}")
    settings = additional_config.get(KEY, {})
    _refuse_misplaced_keys(additional_config)
    if isinstance(settings, str):
        settings = {"profile": settings}
    if not isinstance(settings, Mapping):
        raise refusal(SETTINGS, settings, "a mapping, or the name or path of a profile")
    return SparsePrefillConfig.read(dict(settings), f"{OPTION} ", KEY)


def _refuse_misplaced_keys(additional_config: Mapping[str, Any]) -> None:
    """Refuse settings next to the key, and a misspelt key. vLLM would ignore both."""
    for key in map(str, additional_config):
        if key in SparsePrefillConfig.model_fields:
            raise ConfigurationError(f"{OPTION}: given key {key!r} at the top level, expected it under {KEY!r}")
        if key not in (KEY, CARRIED) and looks_like(key, KEY):
            raise ConfigurationError(f"{OPTION}: given key {key!r}, expected {KEY!r}")
