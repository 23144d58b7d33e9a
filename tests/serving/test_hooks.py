# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that the hooks wrap exist."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm_sparse_backend.serving import hooks


def test_vllm_has_the_functions_of_the_hooks() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as NewerRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    methods = {
        "preprocess_add_request": [EngineCore],
        "determine_available_memory": [CPUWorker],
        "execute_model": [GPUModelRunner, NewerRunner],
        "prepare_attn": [NewerRunner],
        "profile_run": [GPUModelRunner, NewerRunner],
    }
    for name, owners in methods.items():
        assert all(callable(getattr(owner, name)) for owner in owners)
    for where in {hook.where for hook in hooks.HOOKS}:
        hooks._install(where)
