# SPDX-License-Identifier: Apache-2.0
"""The online guard: measures the error of sparse attention on live prompts, layer by layer, and acts on it.

In one of every ``period_steps`` steps with sparse rows of a level, a layer is checked: the dense backend also computes
up to 128 queries of one such row, over all keys, and the two outputs are compared. If the error is too large in several
consecutive checks, the layer falls back to dense attention for rows of that level. It falls back immediately if its
output has NaN or infinity, because that is a fault rather than a loss of accuracy. The layer is still checked while it
is held dense. Its sparse output is then computed for the check only, to measure its recovery.

A check measures two errors. The error of the whole output hardly changes if a single query of a head loses the key that
it looks up, so the peak error is the largest error of any query in any head (``squared_peaks``).

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
"""Number of checks whose mean error and largest peak error are exported."""

Place = tuple[int, str]
"""Number of a layer, and name of a level."""


class PendingCheck(NamedTuple):
    """One check whose result is being copied to the host."""

    place: Place
    sums: HostCopy
    """[3, num_heads] float32: sums of squared differences, and of squared dense outputs; ``squared_peaks``."""


class CheckErrors(NamedTuple):
    """The errors of a check."""

    total: float
    """Relative error of all heads together."""
    peak: float
    """Largest error of a query in any head."""
    heads: list[float]
    """Relative error of each head."""
    peaks: list[float]
    """Largest error of a query in each head."""


@dataclass
class LayerState:
    """The guard's state of a layer at a level."""

    is_dense: bool = False
    trips: int = 0
    checks: list[CheckErrors] = field(default_factory=list)
    recent_errors: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_CHECKS))
    recent_peaks: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_CHECKS))


class Guard:
    """The guard of one worker."""

    def __init__(self, settings: GuardConfig, recorder: Recorder, rank: int = 0) -> None:
        self.settings, self.recorder = settings, recorder
        self.held: frozenset[Place] = frozenset()
        self._where = f" (tensor-parallel rank {rank})" if rank else ""
        self._states: dict[Place, LayerState] = {}
        self._checks: deque[PendingCheck] = deque()
        if rank == 0:
            peak = "" if settings.peak_bound is None else f" or a peak error above {settings.peak_bound:g}"
            logger.info(
                "sparse-prefill: the guard checks each layer once in %d steps with sparse rows of a level; a layer "
                "with an error above %g%s in %d consecutive checks runs dense at that level",
                settings.period_steps, settings.bound, peak, settings.patience,
            )  # fmt: skip

    def layers_due(self, layers: Iterable[int], step: int) -> frozenset[int]:
        """Return the layers to check in a step."""
        period, place = divmod(step, self.settings.period_steps)
        return frozenset(layer for layer in layers if stable_hash(period, layer) % self.settings.period_steps == place)

    def compare(self, place: Place, sparse: torch.Tensor, dense: torch.Tensor) -> None:
        """Start a check. Does not wait for the device."""
        exact = dense.float()
        squared_errors, squared_norms = (sparse.float() - exact).square(), exact.square()
        peaks = squared_peaks(squared_errors.sum(2), squared_norms.sum(2))
        sums = torch.stack([squared_errors.sum((0, 2)), squared_norms.sum((0, 2)), peaks])
        self._checks.append(PendingCheck(place, HostCopy(sums)))

    def judge_arrived(self) -> None:
        """Judge the checks whose results have arrived. Runs on the host, between steps."""
        while self._checks and self._checks[0].sums.arrived():
            place, copy = self._checks.popleft()
            sums = copy.host
            self.recorder.count("guard_checks", place_labels(place))
            # A dense output that is not finite comes from the layer's input. It is not a fault of this layer.
            if bool(sums[1].isfinite().all()):
                self._judge(place, relative_errors(sums))

    def _judge(self, place: Place, check: CheckErrors) -> None:
        """Update the state of a layer with the errors of a check."""
        state = self._states.setdefault(place, LayerState())
        is_good = self._is_within_bounds(check, RECOVERY_SHARE if state.is_dense else 1.0)
        state.checks = [*state.checks, check] if is_good is state.is_dense else []
        is_fault = not math.isfinite(check.total) and not state.is_dense
        if is_fault or len(state.checks) >= self._needed(state):
            self._change(place, state)
        # An error that is not finite is exported as 1, which is the error of an all-zero output.
        state.recent_errors.append(check.total if math.isfinite(check.total) else 1.0)
        state.recent_peaks.append(check.peak if math.isfinite(check.peak) else 1.0)
        labels = place_labels(place)
        self.recorder.gauge("guard_error", labels, sum(state.recent_errors) / len(state.recent_errors))
        self.recorder.gauge("guard_peak_error", labels, max(state.recent_peaks))
        self.recorder.gauge("guard_dense", labels, float(state.is_dense))

    def _is_within_bounds(self, check: CheckErrors, share: float) -> bool:
        """Return whether a check's errors are at most this share of their bounds; False for NaN."""
        if self.settings.peak_bound is not None and not check.peak <= share * self.settings.peak_bound:
            return False
        return check.total <= share * self.settings.bound

    def _needed(self, state: LayerState) -> int:
        """Return the number of consecutive checks that change the state."""
        if not state.is_dense:
            return self.settings.patience
        return self.settings.recover << min(state.trips - 1, MOST_DOUBLINGS)

    def _change(self, place: Place, state: LayerState) -> None:
        """Force a layer dense at a level, or let it run sparse again."""
        last = state.checks[-1]
        latest_errors = ", ".join(f"{check.total:.3f}" for check in state.checks[-3:])
        errors = f"{len(state.checks)} checks in a row, bound {self.settings.bound:g}, errors {latest_errors}"
        if self.settings.peak_bound is not None:
            latest_peaks = ", ".join(f"{check.peak:.3f}" for check in state.checks[-3:])
            errors += f", peak bound {self.settings.peak_bound:g}, peak errors {latest_peaks}"
        worst_head, peak_head = _worst_head(last.heads), _worst_head(last.peaks)
        head_note = (
            f"in the last check, the error of head {worst_head} was {last.heads[worst_head]:.2f}, and that of a query "
            f"of head {peak_head} was {last.peaks[peak_head]:.2f}"
        )
        state.is_dense = not state.is_dense
        state.checks = []
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
    """Return the metric labels of a layer at a level."""
    return dict(zip(LAYER_LEVEL, place, strict=True))


def squared_peaks(squared_errors: torch.Tensor, squared_norms: torch.Tensor) -> torch.Tensor:
    """Return the square of the largest error of a query, head by head. Does not wait for the device.

    The error of query i in head h is ‖o − õ‖₂ / max(‖o‖₂, r). r is the root mean square of ‖o‖₂ over all queries and
    heads of the check. A query that loses the key that it looks up has an error of about 1 or more. Heads that attend
    to many keys have small outputs, whose own relative errors are large although no lookup is lost; r keeps their
    errors small, as in the sum over heads that follows attention.
    """
    sizes = torch.maximum(squared_norms, squared_norms.mean())
    return (squared_errors / sizes).masked_fill(squared_errors == 0, 0.0).amax(0)  # 0 / 0 is no error


def relative_errors(sums: torch.Tensor) -> CheckErrors:
    """Return the errors of a check: ‖O − Õ‖₂ / ‖O‖₂ of its output, and the largest of a query (``squared_peaks``)."""
    squared_errors, squared_norms, peaks = sums.double().tolist()
    total = _root_ratio(sum(squared_errors), sum(squared_norms))
    head_errors = [_root_ratio(*head) for head in zip(squared_errors, squared_norms, strict=True)]
    head_peaks = [math.sqrt(peak) for peak in peaks]
    return CheckErrors(total, head_peaks[_worst_head(head_peaks)], head_errors, head_peaks)


def _worst_head(errors: Sequence[float]) -> int:
    """Return the head with the largest error, or a head whose error is NaN if there is one."""
    return max(range(len(errors)), key=lambda head: (math.isnan(errors[head]), errors[head]))


def _root_ratio(squared_error: float, squared_norm: float) -> float:
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_norm)


def pick_queries(step: int, slabs: Sequence[Slab]) -> slice:
    """Return the queries to check in a step: at most ``PROBE_TOKENS``, ending where a tile ends."""
    tiles = [(slab.rows, tile) for slab in slabs for tile in slab.rows.tile_list]
    rows, tile = tiles[stable_hash(step) % len(tiles)]
    end = tile.token + tile.length_tokens
    return slice(max(rows.query_starts[tile.row], end - PROBE_TOKENS), end)


def stable_hash(*numbers: int) -> int:
    """Return a hash of integers that is the same in every process."""
    return zlib.crc32(repr(numbers).encode())
