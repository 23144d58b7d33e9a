# SPDX-License-Identifier: Apache-2.0
"""Nodes with other settings: two processes, with gloo between them, compare their settings before a model loads."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.full

LENGTHS = {"min_tokens": 100, "min_query_tokens": 1}
SETTINGS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "equal": ({}, {}),
    "streaming heads": ({}, {"streaming_heads": False}),
    "required": ({}, {"streaming_heads": True}),
    "lengths": ({}, {"min_tokens": 4096}),
    "method": ({"streaming_heads": False}, {"method": "a_shape", "streaming_heads": False}),
    "version": ({}, {}),
    "error": ({}, {}),
    "absent": ({}, {}),
}
"""By case, the settings of both ranks."""


def break_second(case: str, agreement: Any) -> None:
    """Change the second process as the case says."""
    if case == "version":
        agreement.package_version = lambda package: "9.9.9"
    elif case == "error":
        agreement.resolve = lambda *arguments: 1 / 0


def run_rank(rank: int, folder: Path, name: str) -> None:
    """Connect with the other process, as a worker does, and compare the settings of each case."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    from tests.helpers.vllm_objects import make_config, make_model
    from vllm_sparse_backend.config.carried import finds_streaming_heads
    from vllm_sparse_backend.config.keys import KEY
    from vllm_sparse_backend.serving.resolution import carry_settings, carry_streaming
    from vllm_sparse_backend.serving.worker import agreement

    real = dict(vars(agreement))
    os.environ["VLLM_DIST_IDENT"] = name
    model = make_model(folder / f"model-{rank}")

    def configure(settings: Mapping[str, Any]) -> Any:
        config: Any = make_config(model, LENGTHS)
        parallel = config.parallel_config
        parallel.pipeline_parallel_size, parallel.rank, parallel.world_size = 2, rank, 2
        finds_heads = settings.get("streaming_heads", True)
        config.additional_config = {KEY: {**LENGTHS, **settings}}
        carry_settings(config)
        carry_streaming(config, finds_heads)
        return config

    results: dict[str, Any] = {}
    for case, settings in SETTINGS.items():
        config = configure(settings[rank])
        if rank:
            break_second(case, agreement)
        agreement.TIMEOUT_S = 5.0 if case == "absent" else 60.0
        start, message = time.monotonic(), ""
        try:
            with set_current_vllm_config(config):
                if not results:
                    init_worker_distributed_environment(config, rank, f"file://{folder}/{name}", rank, "gloo")
                if case != "absent" or not rank:
                    agreement.agree(config)
        except Exception as error:
            message = str(error)
        finally:
            vars(agreement).update(real)
        results[case] = [message, finds_streaming_heads(config.additional_config), time.monotonic() - start]
    (folder / f"{rank}.json").write_text(json.dumps(results))
    if rank:
        time.sleep(10)  # the other rank waits for this one
    os._exit(0)  # on a normal exit, gloo can abort a process whose peer has already ended


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, bool, float]]]:
    """By rank and case: the error, whether the rank finds streaming heads, and the seconds that it waited."""
    folder, name = tmp_path_factory.mktemp("ranks"), f"store-{uuid4().hex}"  # of the shared memory too
    run_processes(run_rank, 2, folder, name)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("streaming heads", ("streaming_heads: False, found: False", "auto, found: True")),
        ("required", ("streaming_heads: True, found: True", "auto, found: True as rank 0")),
        ("lengths", ("level on with engine any other: rows of more than 4096 tokens", "rows of more than 100 tokens")),
        ("method", ("method: method a_shape", "method: method default")),
        ("version", ("version of this package: 9.9.9",)),
        ("error", ("rank 1 cannot resolve its settings: ZeroDivisionError",)),
    ],
)
def test_nodes_that_disagree_stop_and_name_both_sides(results: Any, case: str, parts: tuple[str, ...]) -> None:
    for rank in range(2):
        message, _, seconds = results[rank][case]
        for part in ("rank 1", *parts):
            assert part in message, message
        assert seconds < 60


def test_nodes_that_agree_start(results: Any) -> None:
    assert [results[rank]["equal"][:2] for rank in range(2)] == [["", True]] * 2


def test_a_rank_that_does_not_compare_is_named(results: Any) -> None:
    """Such a node runs another backend, or an earlier version of this package."""
    message, _, seconds = results[0]["absent"]
    assert "not all workers compared their settings within 5 s" in message
    assert "1" in message.partition("(")[2]
    assert seconds < 20
