# SPDX-License-Identifier: Apache-2.0
"""Processes that connect with each other, as the workers of several nodes do."""

import multiprocessing
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 600
PRELOADED = ["vllm.v1.worker.gpu_worker", "tests.helpers.vllm_objects"]
"""Modules whose imports take most of a process's time. One process imports them, and all others are its forks."""


def run_processes(target: Callable[..., None], number: int, *arguments: Any) -> None:
    """Call a function with its number and the arguments in new processes at the same time, and wait for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=target, args=(i, *arguments)) for i in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
        assert process.exitcode == 0
