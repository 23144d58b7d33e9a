# SPDX-License-Identifier: Apache-2.0
"""One small model, stock vLLM and this backend on it, started side by side and once: each start costs a minute."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.tiny import make_model
from tests.server import levels, scenario
from tests.server.scenario import Servers
from vllm_sparse_backend.measure.server import Server, sparse_args


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def servers(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    settings = levels.write(tmp_path_factory.mktemp("ours"), *levels.ALL)
    stock = Server(small_model, scenario.SERVER_ARGS, env={"VLLM_PLUGINS": "none"})
    ours = Server(small_model, (*sparse_args(settings), *scenario.SERVER_ARGS))
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, (stock, ours)))
        yield Servers(stock, ours, scenario.counted(ours))
