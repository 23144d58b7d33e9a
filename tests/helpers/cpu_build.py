# SPDX-License-Identifier: Apache-2.0
"""Import this in tests that make and run vLLM's layers: they are skipped without vLLM's CPU build."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs vLLM's CPU build", allow_module_level=True)
