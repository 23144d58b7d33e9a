# SPDX-License-Identifier: Apache-2.0
"""What the first process of a server reads and decides for all of its processes.

It travels inside vLLM's ``additional_config``. A file that changes later, or that is missing on another node, therefore
has no effect, and all processes resolve the settings to the same values on any device.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_sparse_backend.config.crossover_table import CrossoverTable, crossover_file, load_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.config.keys import CARRIED, SETTINGS
from vllm_sparse_backend.config.profile import ANY_MODEL, Profile, parse_profile, profile_file
from vllm_sparse_backend.config.settings import SparsePrefillConfig


@dataclass(frozen=True)
class Carried:
    """The texts of named files, the device of the first process, and whether the server finds streaming heads."""

    source: str
    """The method or profile, for errors and logs."""
    device: str
    """Name of the device for which ``auto`` is resolved."""
    profile: str | None = None
    crossover: str | None = None
    finds_streaming_heads: bool | None = None
    """None before the first process decides."""

    @staticmethod
    def read(config: SparsePrefillConfig, device: str = "") -> "Carried":
        """Read the files that a configuration names."""
        source, profile, crossover = f"method {config.method}", None, None
        if config.crossover is not None:
            crossover = read_text(crossover_file(config.crossover, f"{SETTINGS}.crossover"))
        if config.profile is not None:
            source = f"profile {config.profile}"
            profile = read_text(profile_file(config.profile, f"{SETTINGS}.profile"))
        return Carried(source, device, profile, crossover)

    @staticmethod
    def of(additional_config: Mapping[str, Any] | None) -> "Carried | None":
        """Return what another process of the server put into ``additional_config``."""
        data = (additional_config or {}).get(CARRIED)
        return None if data is None else Carried(**data)

    def into(self, additional_config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return ``additional_config`` with this."""
        return {**(additional_config or {}), CARRIED: asdict(self)}

    def profile_for(self, config: SparsePrefillConfig) -> Profile:
        """Parse the profile, or build one from ``method`` and ``params``."""
        if self.profile is not None:
            return parse_profile(self.profile, self.source)
        try:
            method = config.uniform_method()
        except ValueError as error:  # another package's method has invalid defaults
            raise ConfigurationError(f"{SETTINGS}.{error}") from None
        return Profile.model_validate({"format": 1, "model": ANY_MODEL, "default": method})

    def table_for(self, config: SparsePrefillConfig) -> CrossoverTable:
        """Parse the crossover table."""
        if self.crossover is None:
            return load_crossover()
        return CrossoverTable.read(self.crossover, f"crossover {config.crossover}: ")


def finds_streaming_heads(additional_config: Mapping[str, Any] | None) -> bool:
    """Return whether the server finds streaming heads."""
    carried = Carried.of(additional_config)
    return carried is not None and bool(carried.finds_streaming_heads)
