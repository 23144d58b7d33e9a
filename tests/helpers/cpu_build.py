# SPDX-License-Identifier: Apache-2.0
"""Imported by tests that make vLLM's own layers and run them: they are skipped where its CPU build is not."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs vLLM's CPU build", allow_module_level=True)
