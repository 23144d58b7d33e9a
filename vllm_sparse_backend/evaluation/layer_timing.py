# SPDX-License-Identifier: Apache-2.0
"""A chunk's way through the layers of a prompt, as a server has it: what is timed beside dense attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_sparse_backend.evaluation.attention_prompts import Prompt
from vllm_sparse_kernels import AttendOptions, SparseIndex, layer as layers
from vllm_sparse_kernels.attention import AttendSpec, Engine, choose
from vllm_sparse_kernels.engine_trial import Batch, expected_attention, failure
from vllm_sparse_kernels.layer import LayerPlan


@dataclass
class TimedLayer:
    """One layer's part of a pass: its chunk, what selects, and where results go."""

    batch: Batch
    served: layers.Layer
    index: SparseIndex
    out: torch.Tensor

    @staticmethod
    def of(batch: Batch, groups: LayerPlan, engine: str) -> "TimedLayer":
        """``engine``: the name of the one that will attend."""
        served = layers.Layer.of(groups, batch.cache.head_dim, batch.q.device, engine)
        return TimedLayer(batch, served, served.index(batch.rows), batch.empty_out())

    @property
    def options(self) -> AttendOptions | None:
        return self.served.options

    def select(self) -> None:
        with self.index.workspace.frame():
            self.served.select(self.batch.q, self.batch.cache, self.index, self.batch.scale)

    def attend(self, engine: Engine) -> None:
        batch = self.batch
        served = replace(self.served, engine=engine, by_kernels=True)  # whatever the device: this engine is judged
        served.attend(batch.q, batch.cache, self.index, self.out, batch.scale)

    def run(self, engine: Engine) -> None:
        self.select()
        self.attend(engine)

    @property
    def spec(self) -> AttendSpec:
        return AttendSpec.of(self.batch.cache, self.index, self.options)

    def engine(self, table: Mapping[str, Engine]) -> Engine:
        """The one that a server takes for this layer."""
        return choose(table, self.spec).engine

    def refusal(self, engine: Engine) -> str | None:
        """Why an engine cannot attend over this layer's index."""
        return engine.refusal(self.spec)

    def wrong(self, engine: Engine) -> str | None:
        """What is wrong with an engine's attention over what was selected, as a server would find out at its start.

        With options a result is an approximation that was asked for: it may hold no NaN.
        """
        exact = expected_attention(self.batch, self.index) if self.options is None else None
        return failure(engine, self.batch, self.index, self.options, exact)


def layers_of(
    prompts: Sequence[Prompt], plan: Sequence[LayerPlan | None], context_len: int, query_len: int, engine: str
) -> list[TimedLayer]:
    """The chunk in each layer, all with the same rows: it is one step. ``plan``: of each layer, none of them dense."""
    rows = prompts[0].chunk(context_len, query_len).rows
    chunks = [replace(prompt.chunk(context_len, query_len), rows=rows) for prompt in prompts]
    return [
        TimedLayer.of(chunk, groups, engine) for chunk, groups in zip(chunks, plan, strict=True) if groups is not None
    ]


def new_step(layers: Sequence[TimedLayer]) -> Callable[[], None]:
    """What makes the next pass a new step: nothing is kept from the last one."""
    state = layers[0].batch.rows.state
    return state.clear
