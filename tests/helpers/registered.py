# SPDX-License-Identifier: Apache-2.0
"""The changes that registration and a configuration make to vLLM, in a separate process: prints names as a JSON list
per stage.

    python -m tests.helpers.registered FOLDER

FOLDER: the folder for a model's config.json. Stages: after ``register``; and with a configuration of another backend.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_sparse_backend.plugin import register

MODULES = (
    "vllm.config", "vllm.engine.arg_utils", "vllm.platforms.cpu", "vllm.platforms.interface", "vllm.plugins",
    "vllm.plugins.endpoint_plugins.interface", "vllm.v1.attention.backends.registry", "vllm.v1.attention.selector",
    "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_manager", "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched.scheduler", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.engine.core_client",
    "vllm.v1.engine.input_processor", "vllm.v1.engine.llm_engine", "vllm.v1.executor.abstract",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.worker_base",
)  # fmt: skip
"""Imported first, with all of their imports."""


def functions() -> Iterator[tuple[str, Any]]:
    """Return all functions of vLLM's loaded modules and classes, by name."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "vllm" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if inspect.isfunction(value):
                yield f"{name}.{attribute}", value
            elif inspect.isclass(value) and value.__module__ == name:
                for member, part in list(vars(value).items()):
                    if callable(part) or isinstance(part, staticmethod | classmethod | property):
                        yield f"{name}.{attribute}.{member}", part


def altered(before: dict[str, Any]) -> list[str]:
    return sorted(name for name, value in functions() if name in before and before[name] is not value)


def main(folder: Path) -> None:
    for name in MODULES:
        importlib.import_module(name)
    before = dict(functions())
    register()
    stages = [altered(before)]

    from tests.helpers.vllm_objects import make_config, make_model

    model = make_model(folder)
    before |= {name: value for name, value in functions() if name not in before}
    make_config(model, {"method": "dense"}, None)
    stages.append(altered(before))
    for stage in stages:
        print(json.dumps(stage))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
