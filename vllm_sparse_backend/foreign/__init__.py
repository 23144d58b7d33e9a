# SPDX-License-Identifier: Apache-2.0
"""Profiles from files that other tools saved: one module for each form, none of which executes what it reads."""

from vllm_sparse_backend.foreign.detect import FORMS, import_profile

__all__ = ["FORMS", "import_profile"]
