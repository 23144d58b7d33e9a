# SPDX-License-Identifier: Apache-2.0
"""What an operator can set, under the key ``sparse_prefill`` of vLLM's ``--additional-config``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vllm_sparse_backend.settings.crossover import AUTO, TokenCount
from vllm_sparse_backend.settings.errors import ConfigurationError, Section, looks_like, not_one_of, unexpected
from vllm_sparse_backend.settings.keys import DEVICE, DOCUMENTS, KEY, OPTION
from vllm_sparse_backend.settings.methods import make_method, method_names
from vllm_sparse_backend.settings.profile import EXACT, ON
from vllm_sparse_backend.settings.ranges import MOST_COUNT, Ranges
from vllm_sparse_kernels.methods.base import Method


class GuardConfig(Section):
    """The online guard: how often it looks, what it puts up with, for how long. ``docs/guard.md`` says how to choose.

    An error is that of one layer's output for up to 128 queries: ‖O − Õ‖₂ / ‖O‖₂ over the layer's heads on one rank.
    """

    rate: Annotated[StrictFloat, Field(ge=1e-6, le=1)] = 0.1
    """Share of the steps with sparse rows in which a layer is checked; one step in so many, as a whole number."""

    bound: Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)] = 0.3
    """An error above it counts against the layer."""

    patience: Annotated[StrictInt, Field(ge=1, le=MOST_COUNT)] = 3
    """So many checks in a row above ``bound``, and the layer runs dense."""

    recover: Annotated[StrictInt, Field(ge=1, le=MOST_COUNT)] = 10
    """So many checks in a row well below ``bound``, and it goes sparse again; each time it has to run dense anew, twice
    as many."""

    @property
    def period_steps(self) -> int:
        """One check of each layer in so many steps."""
        return max(round(1 / self.rate), 1)


def _to_name(given: object) -> object:
    """YAML reads ``on`` as true; requests themselves say 0 and 1."""
    return {0: EXACT, 1: ON}.get(given, given) if isinstance(given, (bool, int)) else given


def _without_duplicates(layers: object) -> object:
    """A list of layers may name one twice."""
    if isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers):
        return sorted(set(layers))
    return layers


Choice = Annotated[StrictStr, BeforeValidator(_to_name)]
"""``exact``, ``on`` for the server's own method or profile, or the name of one of its levels."""


class RequestsConfig(Section):
    """Which level requests get that ask for none, and which they may ask for. docs/requests.md says more."""

    default: Choice | None = None
    """Of requests that ask for none: ``on`` unless given; on a server that pools, ``exact``."""

    models: dict[StrictStr, Choice] = Field(default={})
    """The same by model, for servers with several names (``--served-model-name a b``)."""

    allow: tuple[Choice, ...] | None = None
    """What requests may ask for beside what they get anyway; ``p`` stands for every share. All unless given."""


class SparsePrefillConfig(Section):
    """One method for every head, or a profile that says which; and when not to go sparse."""

    profile: StrictStr | None = None
    """Name of a bundled profile, path of a YAML file, or ``auto``: the bundled one for the model that is served, the
    default method if there is none. Takes the place of ``method`` and ``params``."""

    method: StrictStr = "default"
    """A registered method, or a preset: ``default``, the fastest of what loses nothing measurable, ``minference``,
    vertical-slash with its authors' defaults, or ``streaming``, A-shape."""

    params: dict[str, Any] = Field(default={})
    """Fields of the method that differ from its defaults."""

    min_tokens: TokenCount = AUTO
    """The first positions of every row, which run dense. Where it is given, it goes before the profile's."""

    min_query_tokens: TokenCount = AUTO
    """A row with fewer new tokens past ``min_tokens`` runs dense. Where it is given, it goes before the profile's."""

    crossover: StrictStr | None = None
    """Path of a table of measurements that ``auto`` looks numbers up in, in place of the one that ships."""

    dense_layers: Annotated[Ranges, BeforeValidator(_without_duplicates)] = ()
    """Layers that always run dense, on top of the profile's: numbers, or ranges such as ``"0-3,7"``."""

    engine: Literal["auto", "hopper", "flash", "portable"] = AUTO
    """What attention runs on: the fastest engine that can, or the named one, without which the server stops."""

    guard: GuardConfig | None = None
    """Compare with dense attention now and then, and let layers that are far off run dense: off unless given."""

    switch: StrictBool = False
    """Let ``sparse-prefill switch`` make all new requests exact, and back, without a restart: whoever may post to the
    server's /v1 may then do so."""

    requests: RequestsConfig = RequestsConfig()
    """Who gets which level."""

    check_index: StrictBool = False
    """Check each layer's index in each step. It waits for the device every time: for debugging only."""

    metrics_interval_s: Annotated[StrictFloat, Field(gt=0, le=5, allow_inf_nan=False)] = 1.0
    """Seconds from one question to the workers, for readers of /metrics, to the next at least."""

    @field_validator("method")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in method_names():
            raise ValueError(not_one_of(name, method_names()))
        return name

    @field_validator("params")
    @classmethod
    def _accepted(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "method" in info.data and info.data.get("profile") is None:  # else the error lies there
            make_method(info.data["method"], params)
        return params

    @model_validator(mode="after")
    def _one_source(self) -> "SparsePrefillConfig":
        beside = [field for field in ("method", "params") if field in self.model_fields_set]
        if self.profile is not None and beside:
            raise ValueError(f"given profile {self.profile!r} and {beside[0]}, expected one of them")
        return self

    def uniform_method(self) -> Method:
        """The method of every head where no profile is given."""
        return make_method(self.method, self.params)


def load_config(additional_config: Mapping[str, Any] | None) -> SparsePrefillConfig:
    """The configuration in vLLM's ``additional_config``: its key ``sparse_prefill``, defaults where that is absent.

    A plain text there names the profile. Raises ``ConfigurationError`` that names every wrong field.
    """
    if additional_config is None:
        additional_config = {}
    if not isinstance(additional_config, Mapping):
        raise ConfigurationError(f"{OPTION}: {unexpected(additional_config, f'a mapping with the key {KEY!r}')}")
    given = additional_config.get(KEY, {})
    _refuse_slips(additional_config)
    if isinstance(given, str):
        given = {"profile": given}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{OPTION} {KEY}: {unexpected(given, 'a mapping, or the name or path of a profile')}")
    return SparsePrefillConfig.read(dict(given), f"{OPTION} ", KEY)


def _refuse_slips(additional_config: Mapping[str, Any]) -> None:
    """The key is the operator's only way in: settings beside it, or under a misspelt one, must not pass for none."""
    for key in map(str, additional_config):
        if key in SparsePrefillConfig.model_fields:
            raise ConfigurationError(f"{OPTION}: given key {key!r} at the top, expected it inside of {KEY!r}")
        if key not in (KEY, DOCUMENTS, DEVICE) and looks_like(key, KEY):
            raise ConfigurationError(f"{OPTION}: given key {key!r}, expected {KEY!r}")
