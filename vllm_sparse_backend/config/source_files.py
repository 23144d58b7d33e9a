# SPDX-License-Identifier: Apache-2.0
"""The files that a configuration names. The server reads them once, where it starts.

Their texts travel to the server's other processes inside vLLM's ``additional_config``. A file that changes later, or
that is missing on another node, therefore has no effect.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_sparse_backend.config import auto_profile
from vllm_sparse_backend.config.crossover_table import Crossover, crossover_file, load_crossover, parse_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import ANY_MODEL, Profile, bundled_profiles, parse_profile, profile_file
from vllm_sparse_backend.config.settings import DOCUMENTS, OPTION, SparsePrefillConfig


@dataclass(frozen=True)
class Documents:
    """Texts of the profile and of the crossover table, with their names for errors and logs."""

    settings: tuple[str | None, str | None]
    source: str
    profile: str | None = None
    profile_path: str = ""
    crossover: str | None = None

    @staticmethod
    def read(config: SparsePrefillConfig, shape: ModelShape) -> "Documents":
        """Read the files that a configuration names."""
        settings = (config.profile, config.crossover)
        crossover = None
        if config.crossover is not None:
            crossover = read_text(crossover_file(config.crossover, f"{OPTION} sparse_prefill.crossover"))
        if config.profile is None:
            return Documents(settings, f"method {config.method}", crossover=crossover)
        if config.profile != auto_profile.AUTO:
            path = profile_file(config.profile, f"{OPTION} sparse_prefill.profile")
            return Documents(settings, f"profile {config.profile}", read_text(path), str(path), crossover)
        choice = auto_profile.choose_profile(shape)
        if choice.name is None:
            source = f"method {config.method} (profile auto: {choice.why})"
            return Documents(settings, source, crossover=crossover)
        path = bundled_profiles()[choice.name]
        source = f"profile {choice.name} (auto: {choice.why})"
        return Documents(settings, source, read_text(path), str(path), crossover)

    @staticmethod
    def carried(additional_config: Mapping[str, Any], config: SparsePrefillConfig) -> "Documents | None":
        """Return the texts that another process of the server put into ``additional_config``."""
        data = additional_config.get(DOCUMENTS)
        if data is None or tuple(data["settings"]) != (config.profile, config.crossover):
            return None
        return Documents(**{**data, "settings": tuple(data["settings"])})

    def data(self) -> dict[str, Any]:
        """Convert the texts to plain values, which vLLM can pass to any process."""
        return {**asdict(self), "settings": list(self.settings)}

    def parse_profile(self, config: SparsePrefillConfig) -> Profile:
        """Parse the profile, or build one from ``method`` and ``params``."""
        if self.profile is not None:
            return parse_profile(self.profile, self.profile_path)
        try:
            method = config.uniform_method()
        except ValueError as error:
            raise ConfigurationError(f"{OPTION} sparse_prefill.{error}") from None
        return Profile.model_validate({"format": 1, "model": ANY_MODEL, "default": method})

    def parse_crossover(self) -> Crossover:
        """Parse the crossover table."""
        if self.crossover is None:
            return load_crossover()
        _, crossover_path = self.settings
        return parse_crossover(self.crossover, str(crossover_path))
