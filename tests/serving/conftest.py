# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the plugin's tests, which need vLLM's CPU build and no server."""

import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.helpers.vllm_objects import make_model

    return make_model(tmp_path_factory.mktemp("models") / "default")


@pytest.fixture(scope="session")
def default_config(default_model: Any) -> Any:
    from tests.helpers.vllm_objects import make_config

    return make_config(default_model)


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 1, without setting up process groups, at a step of a request of the server's own level."""
    from vllm_sparse_backend.config.request_levels import SERVER_LEVEL
    from vllm_sparse_backend.serving import compat
    from vllm_sparse_backend.serving.worker import prompt_run
    from vllm_sparse_backend.serving.worker.rows import Requests, Step

    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 0)
    monkeypatch.setattr(prompt_run, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(Requests, "step", Step({"0": SERVER_LEVEL}, {"0": 1}))
    torch.manual_seed(0)


@pytest.fixture
def configured(default_config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function: settings → the configuration of a vLLM worker with them, without any layers yet."""
    from vllm_sparse_backend.serving.worker.owner import Worker

    workers = []

    def configure(**settings: Any) -> Any:
        default_config.compilation_config.static_forward_context.clear()
        monkeypatch.setattr(default_config, "additional_config", {"sparse_prefill": settings})
        workers.append(Worker(default_config))
        return default_config

    return configure


@pytest.fixture
def built(configured: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function: layer numbers, settings → the layers and their builder. Rows run sparse early by default."""
    from tests.helpers.vllm_objects import make_builder, make_layers

    def build(*numbers: int, **settings: Any) -> Any:
        method = {} if "profile" in settings else {"method": "dense"}
        config = configured(**({"min_tokens": 100, "min_query_tokens": 1} | method | settings))
        layers = make_layers(config, numbers)
        return layers, make_builder(config, layers)

    return build


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the level of each row, or its name, as if a runner were at a step with these rows."""
    from vllm_sparse_backend.config.request_levels import RequestLevel
    from vllm_sparse_backend.serving.worker.rows import Requests, Step

    def begin(rows: Sequence[str | RequestLevel]) -> None:
        levels = {
            str(i): level if isinstance(level, RequestLevel) else RequestLevel(level) for i, level in enumerate(rows)
        }
        step = Step(levels, dict.fromkeys(levels, 1))
        step.req_ids = lambda: list(levels)
        monkeypatch.setattr(Requests, "step", step)

    return begin


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Lines that the plugin logs. Once vLLM has set up logging, its logger does not pass lines on to pytest's
    handler."""
    from vllm_sparse_backend.identity import LOGGER

    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger(LOGGER), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.setLevel(level)
    logger.removeHandler(handler)
