# SPDX-License-Identifier: Apache-2.0
"""How an engine is chosen, for attention (``attention/engine.py``) and for selection (``selection/engine.py``) alike.

An engine says from what is known at start-up whether it can serve a layer (``refusal``). A trial at start-up then runs
it. The first engine that passes both is taken once, before the first step, and stays: an exception in a step surfaces.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch


class Candidate(Protocol):
    """What ``choose`` reads of an engine."""

    @property
    def name(self) -> str: ...

    @property
    def refusal(self) -> Callable[[Any], str | None]:
        """Why the engine cannot serve a layer of that spec, in words that end a sentence; None if it can."""


EngineT = TypeVar("EngineT", bound=Candidate)


class Choice(NamedTuple, Generic[EngineT]):
    engine: EngineT
    passed_over: dict[str, str]
    """Engines that come before it, by name, and why each was not taken."""


def choose(
    engines: Mapping[str, EngineT],
    spec: Any,
    forced: str | None = None,
    trial: Callable[[EngineT], str | None] | None = None,
    work: str = "attention",
) -> Choice[EngineT]:
    """The first engine that does not refuse ``spec`` and in whose ``trial`` nothing is found wrong.

    Args:
        engines: The candidates by name, the fastest first.
        spec: What is known of the layer; ``refusal`` of each engine takes it.
        forced: Name of the only engine to try; None tries all of them.
        trial: What is wrong with an engine's result, or None; without a trial no engine runs.
        work: What the engines do, for the error message.

    Returns:
        The engine, and why each one before it was not taken.

    Raises:
        ValueError: No engine is left (with the reason of each), or none has the name ``forced``.
    """
    passed_over: dict[str, str] = {}
    if forced is not None and forced not in engines:
        raise ValueError(f"no engine is named {forced!r}; there are {', '.join(engines)}")
    for engine in engines.values() if forced is None else (engines[forced],):
        reason = engine.refusal(spec)
        if reason is None and trial is not None:
            reason = trial(engine)
        if reason is None:
            return Choice(engine, passed_over)
        passed_over[engine.name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    raise ValueError(f"no engine can run {work}: {reasons}")


def capability_of(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; (0, 0) where it is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
