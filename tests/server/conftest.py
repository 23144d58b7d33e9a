# SPDX-License-Identifier: Apache-2.0
"""One small model, stock vLLM and this backend on it, started side by side and once: each start costs a minute."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Servers
from tests.helpers.tiny_models import make_model
from vllm_sparse_backend.evaluation.vllm_server import Server, sparse_args


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def servers(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    settings = server_levels.write(tmp_path_factory.mktemp("ours"), *server_levels.ALL)
    stock = Server(small_model, scenario.SERVER_ARGS, env={"VLLM_PLUGINS": "none"})
    ours = Server(small_model, (*sparse_args(settings), *scenario.SERVER_ARGS))
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, (stock, ours)))
        yield Servers(stock, ours, scenario.counted(ours))
