# SPDX-License-Identifier: Apache-2.0
"""The files that a configuration names, read once, where the server starts.

Their texts travel to the server's other processes inside vLLM's ``additional_config``: a file that changes or goes
away after the start, or that another node does not have, makes no difference to them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_sparse_backend.settings import auto
from vllm_sparse_backend.settings.config import DOCUMENTS, OPTION, SparsePrefillConfig
from vllm_sparse_backend.settings.crossover import Crossover, crossover_file, load_crossover, parse_crossover
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import ANY_MODEL, Profile, bundled_profiles, parse_profile, profile_file
from vllm_sparse_backend.settings.strict_yaml import read_text


@dataclass(frozen=True)
class Documents:
    """Texts of the profile and of the crossover table, and what errors and logs call them."""

    asked: tuple[str | None, str | None]
    """``profile`` and ``crossover`` of the configuration that these were read for."""
    source: str
    profile: str | None = None
    """None where every head has the configuration's method."""
    profile_path: str = ""
    crossover: str | None = None
    """None for the table that ships."""

    @staticmethod
    def read(config: SparsePrefillConfig, shape: ModelShape) -> "Documents":
        """Raises ``ConfigurationError`` where a file cannot be read."""
        asked = (config.profile, config.crossover)
        crossover = None if config.crossover is None else read_text(crossover_file(config.crossover))
        if config.profile is None:
            return Documents(asked, f"method {config.method}", crossover=crossover)
        if config.profile != auto.AUTO:
            path, source = profile_file(config.profile, f"{OPTION} sparse_prefill.profile"), f"profile {config.profile}"
            return Documents(asked, source, read_text(path), str(path), crossover)
        choice = auto.choose(shape)
        if choice.name is None:
            return Documents(asked, f"method {config.method} (profile auto: {choice.why})", crossover=crossover)
        path, source = bundled_profiles()[choice.name], f"profile {choice.name} (auto: {choice.why})"
        return Documents(asked, source, read_text(path), str(path), crossover)

    @staticmethod
    def carried(additional_config: Mapping[str, Any], config: SparsePrefillConfig) -> "Documents | None":
        """Those that came along in ``additional_config``, if they were read for this configuration."""
        data = additional_config.get(DOCUMENTS)
        if data is None or tuple(data["asked"]) != (config.profile, config.crossover):
            return None
        return Documents(**{**data, "asked": tuple(data["asked"])})

    def data(self) -> dict[str, Any]:
        """As plain values, which every process takes."""
        return {**asdict(self), "asked": list(self.asked)}

    def parse_profile(self, config: SparsePrefillConfig) -> Profile:
        """The profile, or one that says the same as ``method`` and ``params``."""
        if self.profile is not None:
            return parse_profile(self.profile, self.profile_path)
        try:
            method = config.uniform_method()
        except ValueError as error:
            raise ConfigurationError(f"{OPTION} sparse_prefill.{error}") from None
        return Profile.model_validate({"format": 1, "model": ANY_MODEL, "default": method})

    def parse_crossover(self) -> Crossover:
        """The table that was asked for, or the one that ships."""
        return load_crossover() if self.crossover is None else parse_crossover(self.crossover, str(self.asked[1]))
