# SPDX-License-Identifier: Apache-2.0
"""``SelectEngine``: the interface of the kernels that select keys.

Most methods have one engine, their ``select``. A method with faster kernels for certain GPUs lists them before it
(``Method.select_engines``). Engines differ only in speed and in rounding. Each layer's engine is chosen at start-up, by
``refusal`` and by a trial against the last engine of the list (``engine_trial.selection_failure``). It is never
replaced: an exception in a step, including out-of-memory, reaches the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.engine_choice import EngineChoice, choose_engine, gluon_refusal

PORTABLE = "portable"
"""Name of every method's last engine, which runs on every device that Triton supports."""


@dataclass(frozen=True)
class SelectSpec:
    """Properties of a layer's selection that are known before the first step.

    ``method`` is that of any head: all heads that are selected together have the same ``group_key``.
    """

    method: Any  # a Method
    device: torch.device
    head_dim: int


@dataclass(frozen=True)
class SelectEngine:
    """One way to run a method's selection.

    ``refusal`` returns why the engine cannot select for a layer, as the end of a sentence; None if it can.
    """

    name: str
    refusal: Callable[[SelectSpec], str | None]
    select: Callable[[Call], None]


def hopper_refusal(spec: SelectSpec) -> str | None:
    """Check whether a method's kernels in Gluon can select for a layer."""
    return gluon_refusal(spec.device)


def portable_refusal(spec: SelectSpec) -> str | None:
    """Check whether the GPU has enough shared memory for a method's portable kernels."""
    needed_bytes, limit_bytes = spec.method.least_shared_bytes(spec.head_dim), shared_bytes(spec.device)
    if needed_bytes <= limit_bytes:
        return None
    return (
        f"{spec.method} needs {needed_bytes} bytes of shared memory at head_dim {spec.head_dim}, the GPU has "
        f"{limit_bytes}"
    )


def choose_select_engine(spec: SelectSpec) -> EngineChoice[SelectEngine]:
    """Choose the engine that selects for a layer, without a trial. Raises ValueError if no engine can."""
    return choose_engine(spec.method.select_engines, spec, work="selection")
