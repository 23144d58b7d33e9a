# SPDX-License-Identifier: Apache-2.0
"""Streaming heads of a model in two pipeline stages: two processes, with gloo between them."""

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.processes import run_processes

NEAR = ({1: {0, 3}}, {0: {1}})
"""By stage and layer of the stage, the heads near their queries."""


def run_stage(stage: int, folder: Path, name: str, problem: str | None) -> None:
    """Find the streaming heads of one stage, twice, and write what was found to ``folder``."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    from tests.helpers.streaming_model import PROMPT, SETTINGS, Model
    from tests.helpers.vllm_objects import make_config, make_layers, make_model
    from vllm_sparse_backend.serving import compat
    from vllm_sparse_backend.serving.resolution import carry_streaming
    from vllm_sparse_backend.serving.worker import streaming
    from vllm_sparse_backend.serving.worker.owner import Worker

    os.environ["VLLM_DIST_IDENT"] = name
    settings = {name: value for name, value in SETTINGS.items() if name != "streaming_heads"}  # problems are logged
    config: Any = make_config(make_model(folder / f"model-{stage}"), settings)
    carry_streaming(config, True)
    with set_current_vllm_config(config):
        init_distributed_environment(2, stage, f"file://{folder}/{name}", stage, "gloo")
        initialize_model_parallel(1, 2)
    config.parallel_config.pipeline_parallel_size, config.parallel_config.rank = 2, stage
    worker = Worker(config)
    streaming._prompt = lambda vllm_config: PROMPT
    layers = [] if problem == "no layers" and stage else make_layers(config, [2 * stage, 2 * stage + 1])
    model = Model(layers, NEAR[stage])
    if problem == "run" and not stage:
        model.layers = {0: None}
    for _ in range(2):
        streaming.find_streaming_heads(worker, lambda: model)
    heads = {number: sorted(of_layer) for number, of_layer in worker.streaming.by_layer.items()}
    (folder / f"result-{stage}.json").write_text(json.dumps([model.runs, heads, worker.streaming.fingerprint]))
    compat.gather_over_stages(None)
    os._exit(0)  # on a normal exit, gloo can abort a process whose peer has already ended


def run_both(folder: Path, problem: str | None = None) -> list[Any]:
    """Run both stages. Return how often each ran its part of the model, and its streaming heads by layer."""
    name = f"store-{uuid4().hex}"  # of the shared memory too
    run_processes(run_stage, 2, folder, name, problem)
    return [json.loads((folder / f"result-{stage}.json").read_text()) for stage in range(2)]


HEADS_BY_STAGE = [{"0": [], "1": [0, 3]}, {"2": [1], "3": []}]


@pytest.mark.full
def test_each_stage_finds_its_heads_in_one_run_of_the_whole_model(tmp_path: Path) -> None:
    first, second = run_both(tmp_path)
    assert [first[:2], second[:2]] == [[1, HEADS_BY_STAGE[0]], [1, HEADS_BY_STAGE[1]]]
    assert first[2] == second[2] != ""


@pytest.mark.full
@pytest.mark.parametrize(("problem", "runs"), [("no layers", (0, 0)), ("run", (1, 0))])
def test_no_stage_has_streaming_heads_if_a_stage_has_none(tmp_path: Path, problem: str, runs: tuple[int, int]) -> None:
    """The second stage neither waits for the output of a stage that failed, nor runs without it."""
    assert run_both(tmp_path, problem) == [[runs[0], {}, ""], [runs[1], {}, ""]]
