# SPDX-License-Identifier: Apache-2.0
"""One small model, stock vLLM and this backend on it, started side by side and once: each start costs half a minute."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Servers
from tests.helpers.tiny_models import make_model
from vllm_sparse_backend.evaluation.vllm_server import Server, has_cuda, sparse_args

WORKER_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Variable for whether an engine on a CPU starts a process for its worker, as by default, or is its own worker."""

CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", WORKER_PROCESS: "0"}
"""Environment of servers on a CPU. vLLM binds the threads of each server to the same first core, where all servers of
this machine would wait for each other. And a worker's process takes a third of a start's time, for imports."""

CACHE_ARGS = ("--kv-cache-memory-bytes", str(512 << 20))
"""Room for 131,072 tokens of the small model."""


@pytest.fixture(scope="session", autouse=True)
def cpu_environment() -> Iterator[None]:
    """Servers inherit this process's environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENV.items():
            if not has_cuda():
                patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def servers(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Ours has a process for its worker, so that what goes between engine and worker is tested too."""
    settings = server_levels.write(tmp_path_factory.mktemp("ours"), *server_levels.ALL)
    args = (*scenario.SERVER_ARGS, *CACHE_ARGS)
    stock = Server(small_model, args, env={"VLLM_PLUGINS": "none"})
    ours = Server(small_model, (*sparse_args(settings), *args), env={WORKER_PROCESS: "1"})
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, (stock, ours)))
        yield Servers(stock, ours, scenario.counted(ours))
