# SPDX-License-Identifier: Apache-2.0
"""The online guard: measures the error of sparse attention on live prompts, layer by layer, and acts on it.

In one of every ``period_steps`` steps with sparse rows of a level, a layer is checked: the dense backend also computes
up to 128 queries of one such row, over all keys, and the two outputs are compared. If the error is too large in several
consecutive checks, the layer falls back to dense attention for rows of that level. It falls back immediately if its
output has NaN or infinity, because that is a fault rather than a loss of accuracy. The layer is still checked while it
is held dense. Its sparse output is then computed for the check only, to measure its recovery.

* **Queries**: any 128 consecutive sparse queries of the level in the step, not always a row's last queries.
  Methods that estimate from a chunk's last queries are most accurate there.
* **Steps**: one of every ``period_steps``, chosen by a hash of the period and the layer. Checks therefore do not
  synchronise with the chunks of prompts, and no layer is left out by chance. Tensor-parallel ranks see the same steps
  and check the same queries.
* **Requests**: a request that sets its own p is checked only if that p is at least the server's own. A request with a
  smaller p accepts larger errors, and its rows say nothing about the layer. A layer that is held dense is also dense
  for these requests.
* **Ranks**: each rank judges its own heads. One rank may run a layer dense while another runs it sparse. No head reads
  another head, so the output of every rank is correct, and the exchange between ranks after attention does not change.
* **No synchronisation**: sums are copied to the host asynchronously and judged in a later step.
"""

import logging
import math
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.metrics import LAYER_LEVEL
from vllm_sparse_backend.config.settings import GuardConfig
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.worker.counters import HostCopy, Recorder
from vllm_sparse_backend.serving.worker.step import Slab
from vllm_sparse_kernels import TILE_TOKENS

logger = logging.getLogger(LOGGER)

PROBE_TOKENS = TILE_TOKENS
"""Maximum number of queries of a check: one tile of FlashAttention. Fewer queries would take as long."""

RECOVERY_SHARE = 0.8
"""Share of ``bound`` below which an error counts towards recovery."""

MOST_DOUBLINGS = 6
"""Maximum number of doublings of ``recover``. Without doubling, a layer near the bound would keep switching."""

RECENT_CHECKS = 10
"""Number of checks whose mean error is exported."""

Place = tuple[int, str]
"""Number of a layer, and name of a level."""


class PendingCheck(NamedTuple):
    """One check whose result is being copied to the host."""

    place: Place
    sums: HostCopy
    """[2, num_heads] float32: sums of squared differences, and of squared dense outputs."""


@dataclass
class LayerState:
    """The guard's state of a layer at a level.

    Attributes:
        is_dense: Whether the guard holds it dense.
        trips: Number of times it fell back to dense.
        errors: Errors of the latest consecutive checks that favour a change.
        recent_errors: Errors of the latest ``RECENT_CHECKS`` checks.
    """

    is_dense: bool = False
    trips: int = 0
    errors: list[float] = field(default_factory=list)
    recent_errors: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_CHECKS))


class Guard:
    """The guard of one worker.

    Args:
        settings: The settings.
        recorder: Counts of the worker.
        rank: Tensor-parallel rank.

    Attributes:
        held: Layers and levels that currently run dense.
    """

    def __init__(self, settings: GuardConfig, recorder: Recorder, rank: int = 0) -> None:
        self.settings, self.recorder = settings, recorder
        self.held: frozenset[Place] = frozenset()
        self._where = f" (tensor-parallel rank {rank})" if rank else ""
        self._states: dict[Place, LayerState] = {}
        self._checks: deque[PendingCheck] = deque()
        if rank == 0:
            logger.info(
                "sparse-prefill: the guard checks each layer once in %d steps with sparse rows of a level; a layer "
                "with an error above %g in %d consecutive checks runs dense at that level",
                settings.period_steps, settings.bound, settings.patience,
            )  # fmt: skip

    def layers_due(self, layers: Iterable[int], step: int) -> frozenset[int]:
        """Return the layers to check in a step.

        Args:
            layers: Layers that run sparse at the level.
            step: Number of the step among those with sparse rows of the level.

        Returns:
            The layers to check.
        """
        period, place = divmod(step, self.settings.period_steps)
        return frozenset(layer for layer in layers if stable_hash(period, layer) % self.settings.period_steps == place)

    def compare(self, place: Place, sparse: torch.Tensor, dense: torch.Tensor) -> None:
        """Start a check. Does not wait for the device.

        Args:
            place: The layer and the level.
            sparse: [num_tokens, num_heads, head_dim], output of sparse attention.
            dense: Output of dense attention for the same queries, of the same shape.
        """
        exact = dense.float()
        sums = torch.stack([(sparse.float() - exact).square().sum((0, 2)), exact.square().sum((0, 2))])
        self._checks.append(PendingCheck(place, HostCopy(sums)))

    def judge_arrived(self) -> None:
        """Judge the checks whose results have arrived. Runs on the host, between steps."""
        while self._checks and self._checks[0].sums.arrived():
            place, copy = self._checks.popleft()
            sums = copy.host
            self.recorder.count("guard_checks", place_labels(place))
            # A dense output that is not finite comes from the layer's input. It is not a fault of this layer.
            if bool(sums[1].isfinite().all()):
                self._judge(place, *relative_errors(sums))

    def _judge(self, place: Place, error: float, head_errors: list[float]) -> None:
        """Update the state of a layer with the errors of a check: of all heads together, and of each head."""
        state = self._states.setdefault(place, LayerState())
        bound = self.settings.bound * (RECOVERY_SHARE if state.is_dense else 1)
        is_good = error <= bound  # False for NaN
        state.errors = [*state.errors, error] if is_good is state.is_dense else []
        is_fault = not math.isfinite(error) and not state.is_dense
        if is_fault or len(state.errors) >= self._needed(state):
            furthest = max(range(len(head_errors)), key=lambda head: (math.isnan(head_errors[head]), head_errors[head]))
            self._change(place, state, f"head {furthest} had {head_errors[furthest]:.2f} in the last")
        # An error that is not finite is exported as 1, which is the error of an all-zero output.
        state.recent_errors.append(error if math.isfinite(error) else 1.0)
        labels = place_labels(place)
        self.recorder.gauge("guard_error", labels, sum(state.recent_errors) / len(state.recent_errors))
        self.recorder.gauge("guard_dense", labels, float(state.is_dense))

    def _needed(self, state: LayerState) -> int:
        """Return the number of consecutive checks that change the state."""
        if not state.is_dense:
            return self.settings.patience
        return self.settings.recover << min(state.trips - 1, MOST_DOUBLINGS)

    def _change(self, place: Place, state: LayerState, head_note: str) -> None:
        """Force a layer dense at a level, or let it run sparse again."""
        latest = ", ".join(f"{error:.3f}" for error in state.errors[-3:])
        errors = f"{len(state.errors)} checks in a row, bound {self.settings.bound:g}, errors {latest}"
        state.is_dense = not state.is_dense
        state.errors = []
        if state.is_dense:
            state.trips += 1
            self.recorder.count("guard_trips", place_labels(place))
            self.held |= {place}
            logger.warning(
                "sparse-prefill: layer %d runs dense from now on at level %s%s: %s (%s; %s)", *place, self._where,
                Fallback.GUARD.explain, errors, head_note,
            )  # fmt: skip
        else:
            self.held -= {place}
            logger.warning("sparse-prefill: layer %d runs sparse again at level %s%s (%s)", *place, self._where, errors)


def place_labels(place: Place) -> dict[str, object]:
    """Return the metric labels of a layer at a level.

    Args:
        place: The layer and the level.

    Returns:
        Values by the label's name.
    """
    return dict(zip(LAYER_LEVEL, place, strict=True))


def relative_errors(sums: torch.Tensor) -> tuple[float, list[float]]:
    """Return the relative errors ‖O − Õ‖₂ / ‖O‖₂ of a check.

    Args:
        sums: [2, num_heads] float32 on the host, sums of squared differences and of squared dense outputs.

    Returns:
        The error of all heads together, and the error of every head.
    """
    squared_errors, squared_norms = sums.double().tolist()
    total = _root_ratio(sum(squared_errors), sum(squared_norms))
    return total, [_root_ratio(*head) for head in zip(squared_errors, squared_norms, strict=True)]


def _root_ratio(squared_error: float, squared_norm: float) -> float:
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_norm)


def pick_queries(step: int, slabs: Sequence[Slab]) -> slice:
    """Return the queries to check in a step: at most ``PROBE_TOKENS``, ending where a tile ends.

    Args:
        step: Number of the step among those with sparse rows of the level.
        slabs: The level's sparse rows.

    Returns:
        The tokens of the batch. Every tile is equally likely.
    """
    tiles = [(slab.rows, tile) for slab in slabs for tile in slab.rows.tile_list]
    rows, tile = tiles[stable_hash(step) % len(tiles)]
    end = tile.token + tile.length_tokens
    return slice(max(rows.tokens[tile.row], end - PROBE_TOKENS), end)


def stable_hash(*numbers: int) -> int:
    """Return a hash of integers that is the same in every process.

    Args:
        *numbers: The integers.

    Returns:
        A hash of 32 bits.
    """
    return zlib.crc32(repr(numbers).encode())
