# SPDX-License-Identifier: Apache-2.0
"""Servers of a small model, which several files share, because a start takes half a minute: stock vLLM, this backend,
and vLLM's own backend next to this package."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Servers
from tests.helpers.servers import Server
from tests.helpers.tiny_models import make_adapter, make_model
from vllm_sparse_backend.config.keys import KEY
from vllm_sparse_backend.evaluation.vllm_server import has_cuda, sparse_args

WORKER_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Variable that decides whether an engine on a CPU starts a worker process, as by default, or is its own worker."""

ENV: dict[str, str] = (
    {} if has_cuda() else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", WORKER_PROCESS: "0"}
)
"""Environment of servers. On a CPU, vLLM binds the workers of all servers to the same core, where they would wait for
each other, and a worker process takes a third of the start time for imports."""

CACHE_ARGS = ("--kv-cache-memory-bytes", str(512 << 20))
"""Room for 131,072 tokens of the small model."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Set ``ENV`` until a module's tests have ended; servers that it starts inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def servers(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Our server has a worker process, so calls between engine and worker are tested too."""
    settings = server_levels.write(tmp_path_factory.mktemp("ours"), *server_levels.ALL)
    args = (*scenario.SERVER_ARGS, *CACHE_ARGS)
    stock = Server(small_model, args, env=ENV | {"VLLM_PLUGINS": "none"})
    ours = Server(small_model, (*sparse_args(settings), *args), env=ENV | {WORKER_PROCESS: "1"})
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, (stock, ours)))
        yield Servers(stock, ours, scenario.counted(ours))


@pytest.fixture(scope="session")
def lora_args(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments for a server with an adapter, named "adapter"."""
    adapter = make_adapter(tmp_path_factory.mktemp("models") / "adapter")
    return ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}")


@pytest.fixture(scope="session")
def bystander(small_model: Path, lora_args: tuple[str, ...]) -> Iterator[Server]:
    """vLLM's own backend with this package installed, settings that nothing reads, and an adapter."""
    settings = {KEY: {"method": "dense", "min_tokens": server_levels.MIN_TOKENS}}
    args = (*scenario.SERVER_ARGS, *CACHE_ARGS, *lora_args, "--additional-config", json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_PLUGINS", raising=False)
        with Server(small_model, args, env=ENV) as server:
            yield server
