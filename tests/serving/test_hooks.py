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

    classes = {
        hooks.CORE_OBJECT: [EngineCore],
        hooks.WORKER_OBJECT_ON_CPU: [CPUWorker],
        hooks.RUNNER_OBJECT: [GPUModelRunner, NewerRunner],
        hooks.RUNNER_OBJECT_V2: [NewerRunner],
        hooks.RUNNER_OBJECT_ON_GPU: [GPUModelRunner, NewerRunner],
    }
    for hook in hooks.OBJECT_HOOKS:
        assert all(callable(getattr(owner, hook.function)) for owner in classes[hook.where])
    for where in {hook.where for hook in hooks.HOOKS}:
        hooks._install(where)
