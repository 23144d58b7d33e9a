# SPDX-License-Identifier: Apache-2.0
"""Choice of an engine for attention (``attention/engine.py``) or selection (``selection/engine.py``).

An engine reports at start-up whether it can serve a layer (``refusal``), and a trial then runs it. The first engine
that passes both is used from the first step on. It is never replaced: an exception in a step reaches the caller.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from vllm_sparse_kernels.cards import HOPPER_CAPABILITY

try:
    import_module("vllm_sparse_kernels.gluon_compat")
except (ImportError, AttributeError) as error:  # this Triton's Gluon lacks a name
    MISSING_GLUON: str | None = str(error)
else:
    MISSING_GLUON = None
"""Why this Triton cannot run the Gluon kernels for Hopper, or None. Their modules are then not imported."""

EngineT = TypeVar("EngineT", bound=Any)
"""``AttendEngine`` or ``SelectEngine``."""


class EngineChoice(NamedTuple, Generic[EngineT]):
    """The result of ``choose_engine``.

    Attributes:
        engine: The chosen engine.
        passed_over: Names of the faster engines that were not chosen, each with the reason.
    """

    engine: EngineT
    passed_over: dict[str, str]


def choose_engine(
    engines: Iterable[EngineT],
    spec: Any,
    trial: Callable[[EngineT], str | None] = lambda engine: None,
    work: str = "attention",
) -> EngineChoice[EngineT]:
    """Choose the first engine that accepts the layer and passes the trial.

    Args:
        engines: The candidates, fastest first.
        spec: Properties of the layer, for each engine's ``refusal``.
        trial: Runs an engine and returns why its result is wrong, or None if it is correct. By default, no engine runs.
        work: What the engines compute, for the error message.

    Raises:
        ValueError: No engine can serve the layer.
    """
    passed_over: dict[str, str] = {}
    for engine in engines:
        reason = engine.refusal(spec) or trial(engine)
        if reason is None:
            return EngineChoice(engine, passed_over)
        passed_over[engine.name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    raise ValueError(f"no engine can run {work}: {reasons}")


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device.

    The meta device, on which memory is counted, stands for this process's GPU, or for a Hopper GPU without one.
    """
    if device.type == "cuda":
        return _capability(device.index)
    if device.type == "meta":
        return _capability(None) if torch.cuda.is_available() else HOPPER_CAPABILITY
    return 0, 0


@lru_cache(maxsize=64)
def _capability(index: int | None) -> tuple[int, int]:
    """Return the compute capability of a GPU, by default of this process's. Every layer of a step calls this."""
    return torch.cuda.get_device_capability(index)


def gluon_refusal(device: torch.device) -> str | None:
    """Check whether the Gluon kernels for Hopper can run."""
    if capability_of(device) != HOPPER_CAPABILITY:
        return "it is for GPUs of compute capability 9.0 (H100, H200)"
    if MISSING_GLUON is not None:
        return f"it needs Triton 3.6 to 3.9, whose Gluon has all names ({MISSING_GLUON})"
    return None
