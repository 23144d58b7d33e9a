# SPDX-License-Identifier: Apache-2.0
"""Where our counts meet vLLM: a method of its workers that hands them out, and its server's /metrics, which show them.

vLLM lets ``collective_rpc`` call any method of a worker by name, and endpoint plugins see its server's app and engine
client. It loads endpoint plugins from an entry point only where VLLM_PLUGINS names them, as they may open routes to
strangers. Ours opens none, it adds lines to a page that is there; so it comes with the backend, and needs no variable.
"""

import functools
import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from vllm_sparse_backend.plugin import LOGGER
from vllm_sparse_backend.serving.metrics_page import MetricsMiddleware, MetricsPage

logger = logging.getLogger(LOGGER)

METHOD = "sparse_prefill_samples"
"""The worker's method that the server calls."""

FOR_NO_REQUEST = (
    "determine_available_memory",
    "compile_or_warm_up_model",
    "elastic_ep_execute",
    "execute_dummy_batch",
)
"""Calls to a worker that run the model for no request. What these count is not counted.

The last is what ranks without requests do beside busy ones. Steps for requests come by other ways, and not by the same
one from every executor.
"""


def install() -> str | None:
    """Hook into the worker and the server, in whichever of their processes this is; why not, where vLLM has changed."""
    try:
        import vllm.plugins as plugins
        from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

        load = plugins.load_endpoint_plugins
    except (ImportError, AttributeError) as error:
        return f"no counters on /metrics: {type(error).__name__}: {error}; expected vLLM 0.26 to 0.33"
    setattr(WorkerBase, METHOD, worker_samples)
    if not hasattr(load, "sparse_prefill"):
        plugins.load_endpoint_plugins = _with_ours(load)
        for name in FOR_NO_REQUEST:
            setattr(WorkerWrapperBase, name, _uncounted(name, getattr(WorkerWrapperBase, name, None)))
    return None


def worker_samples(worker: Any, start: bool = True) -> dict[str, Any]:
    """What this worker counted, for ``MetricsPage``: samples, and whether newer ones are on their way.

    Of things that msgpack knows, as it passes between processes. start: see ``Recorder.samples``.
    """
    from vllm_sparse_backend.serving import compat, compilations
    from vllm_sparse_backend.serving.layers import model_layers

    impls = [impl for _, impl in model_layers(worker.vllm_config).values()]
    recorder = next((impl.recorder for impl in impls if impl.recorder is not None), None)
    samples, behind = ([], False) if recorder is None else recorder.samples(start)
    samples = list(samples)
    memory = next((impl.memory for impl in impls if impl.memory is not None), None)
    if memory is not None:
        samples += [
            ("arena_bytes", [], memory.room.num_bytes),
            ("arena_peak_bytes", [], memory.arena.peak_bytes),
            ("arena_overflows", [], memory.arena.overflows),
        ]
        if memory.arena.device.type == "cuda":
            samples.append(("device_bytes", [], torch.cuda.memory_reserved(memory.arena.device)))
    if compat.tensor_parallel(worker.vllm_config)[0] == 0:
        names = [impl.attention_name for impl in impls]
        samples += [("layers", [name], names.count(name)) for name in dict.fromkeys(names)]
    samples += [("compilations", [when], count) for when, count in compilations.counts().items()]
    return {"rank": worker.rank, "behind": behind, "samples": samples}


class MetricsEndpoint:
    """An endpoint plugin as vLLM defines it, of each app that a server process builds."""

    name = "sparse_prefill"
    required_tasks = None

    def __init__(self) -> None:
        self.page = MetricsPage(METHOD)

    def attach_router(self, app: Any) -> None:
        app.add_middleware(MetricsMiddleware, page=self.page)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        from vllm_sparse_backend.plugin import is_ours
        from vllm_sparse_backend.settings.config import load_config

        config = getattr(engine_client, "vllm_config", None)
        if config is not None and is_ours(config.attention_config.backend):
            self.page.open(engine_client, load_config(config.additional_config).metrics_interval_s)


def _with_ours(load: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(load)
    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[Any]:
        return [*load(*args, **kwargs), MetricsEndpoint()]

    load_endpoint_plugins.sparse_prefill = True  # type: ignore[attr-defined]
    return load_endpoint_plugins


def _uncounted(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """A method of the wrapper around every worker, through which all calls by name go."""

    def method(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_sparse_backend.serving.stats import not_counting

        with not_counting():
            if original is not None:
                return original(wrapper, *args, **kwargs)
            return getattr(wrapper.worker, name)(*args, **kwargs)

    method.__name__ = name
    return method
