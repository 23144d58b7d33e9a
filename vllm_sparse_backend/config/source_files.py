# SPDX-License-Identifier: Apache-2.0
"""The files that a configuration names. The server reads them once, where it starts.

Their texts travel to the server's other processes inside vLLM's ``additional_config``. A file that changes later, or
that is missing on another node, therefore has no effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_sparse_backend.config.crossover_table import Crossover, crossover_file, load_crossover, parse_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.config.profile import ANY_MODEL, Profile, parse_profile, profile_file
from vllm_sparse_backend.config.settings import DOCUMENTS, OPTION, SparsePrefillConfig


@dataclass(frozen=True)
class Documents:
    """Texts of the profile and of the crossover table, with their names for errors and logs."""

    source: str
    profile: str | None = None
    profile_path: str = ""
    crossover: str | None = None
    crossover_path: str = ""

    @staticmethod
    def read(config: SparsePrefillConfig) -> "Documents":
        """Read the files that a configuration names."""
        documents = Documents(f"method {config.method}")
        if config.crossover is not None:
            path = crossover_file(config.crossover, f"{OPTION} sparse_prefill.crossover")
            documents = replace(documents, crossover=read_text(path), crossover_path=config.crossover)
        if config.profile is not None:
            path = profile_file(config.profile, f"{OPTION} sparse_prefill.profile")
            source = f"profile {config.profile}"
            documents = replace(documents, source=source, profile=read_text(path), profile_path=str(path))
        return documents

    @staticmethod
    def carried(additional_config: Mapping[str, Any] | None) -> "Documents | None":
        """Return the texts that another process of the server put into ``additional_config``."""
        data = (additional_config or {}).get(DOCUMENTS)
        return None if data is None else Documents(**data)

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
        return parse_crossover(self.crossover, self.crossover_path)
