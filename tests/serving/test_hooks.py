# SPDX-License-Identifier: Apache-2.0
"""Functions of vLLM that the hooks fit. Missing functions are covered in test_plugin.py."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.serving import hooks


class Owner:
    def method(self, number: int) -> int:
        return number


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number: original(self, 2 * number)


def test_what_a_hook_does_not_fit_is_an_error() -> None:
    said = r"Owner\.method\(self, number: int\) -> int has no more, yet, expected it as in 0\.30 to 0\.33"
    with pytest.raises(ConfigurationError, match=rf"vLLM \d.*{said}"):
        hooks.put_around(Owner, "method", doubled, ("number", "more", "yet"))


def test_vllms_own_functions_fit_the_hooks() -> None:
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
        for owner in classes[hook.where]:
            hooks._required(owner, hook.function, getattr(owner, hook.function, None), hook.expects)
    for where in {hook.where for hook in hooks.HOOKS}:
        hooks._install(where)
