# SPDX-License-Identifier: Apache-2.0
"""Layers of a model in order, each judged with the state that earlier layers pass to it (``Rows.state``).

Heads of some methods use results of heads in earlier layers. A layer's input state depends only on the methods of
earlier layers. Judging the layers in order, each as it will be served, therefore judges them jointly.

**Memory.** If heads depend on others, the state of each chunk of each prompt is stored twice, in addition to a layer's
own memory (``layer_judge.py``). For SharePrefill, the state has 4 bytes for each cluster and pair of a tile of queries
and a block of keys: 0.3 MB per cluster for a prompt of 32,768 tokens.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.layer_judge import CapturedLayer, RememberingJudge, State
from vllm_sparse_backend.config.method_parameters import parameters_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

ResultT = TypeVar("ResultT")


class LayerWalk:
    """The model up to the current layer, on the prompts or on the held-out prompts.

    ``others``: methods of heads in other layers, for methods that need them (``Method.sharing``). Outcomes are saved in
    the job's folder under a name that depends on which heads of earlier layers share, because nothing else affects a
    layer's input.
    """

    def __init__(self, job: Job, kind: str, others: Sequence[Method] = ()) -> None:
        self.job, self.kind, self.others = job, kind, tuple(others)
        self.chosen: list[list[Method]] = []
        """Chosen method of each layer so far and each head."""
        self._states: list[list[State]] = []
        self._passed = 0

    def judge(self) -> RememberingJudge:
        """Return the judge of the next layer."""
        layer = len(self.chosen)
        name = f"{self.kind}-layer-{layer:03}{self._handed_on()}.json"
        return RememberingJudge(layer, self.job.shape.num_heads, self.job.folder / name, self._read)

    def _handed_on(self) -> str:
        handed = [[_shared_parameters(method) for method in heads] for heads in self.chosen]
        if not any(map(any, handed)):
            return ""
        text = json.dumps([heads if any(heads) else None for heads in handed])
        return f"-after-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _read(self) -> CapturedLayer:
        while self._passed < len(self.chosen):
            methods = self.chosen[self._passed]
            if any(map(needs_others, methods)):
                self._states = self._layer(self._passed).after(methods)
            self._passed += 1
        return self._layer(len(self.chosen))

    def _layer(self, layer: int) -> CapturedLayer:
        job = self.job
        captures, device = job.captures[self.kind], torch.device(job.device)
        engines = job.card.engines if job.card else None
        return CapturedLayer(captures, layer, job.served, device, engines, self._states, self.others)


def walk_layers(
    job: Job,
    kind: str,
    others: Sequence[Method],
    choose: Callable[[RememberingJudge], tuple[Sequence[Method], ResultT | None]],
) -> tuple[list[list[Method]], list[ResultT | None]]:
    """Choose methods for all layers in order; layers that never run sparse are dense."""
    flow = LayerWalk(job, kind, others)
    results: list[ResultT | None] = []
    job.progress.begin("layers", len(job.layers))
    for layer in range(job.shape.num_layers):
        if layer not in job.layers:
            flow.chosen.append([Dense()] * job.shape.num_heads)
            results.append(None)
            continue
        judge = flow.judge()
        methods, of_layer = choose(judge)
        judge.save()
        flow.chosen.append(list(methods))
        results.append(of_layer)
        job.progress.step()
    return flow.chosen, results


def needs_others(method: Method) -> bool:
    """Return whether a head's selection depends on other heads."""
    return method.unshared != method


def _shared_parameters(method: Method) -> dict[str, Any] | None:
    """Return the parameters of a head that affect later layers; SharePrefill's γ does not."""
    return parameters_of(method.sharing) if needs_others(method) else None


def first_layer_judge(job: Job) -> RememberingJudge:
    """Return the judge of the first layer that can run sparse, on the prompts."""
    flow = LayerWalk(job, "prompts")
    flow.chosen = [[Dense()] * job.shape.num_heads] * job.layers[0]
    return flow.judge()
