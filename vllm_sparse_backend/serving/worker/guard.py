# SPDX-License-Identifier: Apache-2.0
"""The online guard: what does sparse attention lose on the prompts that come in, layer by layer?

One in so many steps with sparse rows of a level a layer is checked: up to 128 queries of one such row are computed by
the dense backend too, over all keys, and the two outputs are compared. A layer that is too far off several times
runs dense from then on for rows of that level, and at once where its output is no number, which is no loss but a fault.
It still is checked, its sparse output computed for that alone: so that it has recovered is measured as well.

* **Which queries**: any 128 neighbours among the level's sparse ones in the step, not always a row's last. Methods that
  estimate from a chunk's last queries are at their best there.
* **When**: one step out of every ``period_steps``, which one a hash of the period and the layer says. So neither can
  the prompts' chunks fall in step with it, nor is a layer left out by chance; and tensor-parallel ranks, which see the
  same steps, check the same queries.
* **Whose**: a request that sets its own p is checked only where that p is at least the server's own. Those that set a
  smaller one ask for larger errors, and their rows say nothing about a layer. Where the layer is held dense, it is
  dense for them too.
* **Ranks judge by themselves**, each its own heads. One may run a layer dense that others run sparsely: no head reads
  another's, so every rank's output is right, and what ranks exchange after attention is what it always is.
* **Nothing waits for the device**: sums are copied to the host on their own, and judged in a later step.
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
"""Queries of a check: FlashAttention's own tile, so fewer of them would take as long."""

RECOVERY_SHARE = 0.8
"""Of the bound: what an error has to stay under for a layer to go sparse again."""

MOST_DOUBLINGS = 6
"""Of the checks that it takes. A layer at the bound would come and go for ever."""

LATELY = 10
"""Checks whose mean error is exported."""


Place = tuple[int, str]
"""A layer, and the level of rows."""


class Check(NamedTuple):
    """Sums of one check, [2, num_heads]: of squared differences, and of squared dense outputs."""

    place: Place
    sums: HostCopy


@dataclass
class LayerState:
    is_dense: bool = False
    trips: int = 0
    errors: list[float] = field(default_factory=list)
    """Of the last checks in a row that speak for a change."""
    lately: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))


class Guard:
    """Of one worker. ``held``: where it has rows run dense until further notice."""

    def __init__(self, settings: GuardConfig, recorder: Recorder, rank: int = 0) -> None:
        self.settings, self.recorder = settings, recorder
        self.held: frozenset[Place] = frozenset()
        self._where = f" (tensor-parallel rank {rank})" if rank else ""
        self._states: dict[Place, LayerState] = {}
        self._checks: deque[Check] = deque()
        if rank == 0:
            logger.info(
                "sparse-prefill: the guard checks each layer once in %d steps with sparse rows of a level; a layer "
                "with an error above %g in %d checks in a row runs dense at that level",
                settings.period_steps, settings.bound, settings.patience,
            )  # fmt: skip

    def layers_due(self, layers: Iterable[int], step: int) -> frozenset[int]:
        """Layers to check in the step of that number, of those that have sparse rows of a level."""
        period, place = divmod(step, self.settings.period_steps)
        return frozenset(layer for layer in layers if mixed(period, layer) % self.settings.period_steps == place)

    def compare(self, place: Place, sparse: torch.Tensor, dense: torch.Tensor) -> None:
        """Start a check: a layer's output for the same queries, [num_tokens, num_heads, head_dim] each."""
        exact = dense.float()
        sums = torch.stack([(sparse.float() - exact).square().sum((0, 2)), exact.square().sum((0, 2))])
        self._checks.append(Check(place, HostCopy(sums)))

    def judge_arrived(self) -> None:
        """Draw conclusions from what has arrived; on the host, between steps."""
        while self._checks and self._checks[0].sums.arrived():
            place, sums = self._checks[0].place, self._checks.popleft().sums.host
            self.recorder.count("guard_checks", labels_of(place))
            # Where the dense output is no number either, what came into the layer was none: no fault of this one.
            if bool(sums[1].isfinite().all()):
                self._judge(place, *relative_errors(sums))

    def _judge(self, place: Place, error: float, heads: list[float]) -> None:
        state = self._states.setdefault(place, LayerState())
        bound = self.settings.bound * (RECOVERY_SHARE if state.is_dense else 1)
        is_good = error <= bound  # NaN is not
        state.errors = [*state.errors, error] if is_good is state.is_dense else []
        is_fault = not math.isfinite(error) and not state.is_dense
        if is_fault or len(state.errors) >= self._needed(state):
            furthest = max(range(len(heads)), key=lambda head: (math.isnan(heads[head]), heads[head]))
            self._change(place, state, f"head {furthest} had {heads[furthest]:.2f} in the last")
        # What is no number counts as 1, as if nothing were left.
        state.lately.append(error if math.isfinite(error) else 1.0)
        labels = labels_of(place)
        self.recorder.gauge("guard_error", labels, sum(state.lately) / len(state.lately))
        self.recorder.gauge("guard_dense", labels, float(state.is_dense))

    def _needed(self, state: LayerState) -> int:
        if not state.is_dense:
            return self.settings.patience
        return self.settings.recover << min(state.trips - 1, MOST_DOUBLINGS)

    def _change(self, place: Place, state: LayerState, of_head: str) -> None:
        """From sparse to dense, or back."""
        errors = f"{len(state.errors)} checks in a row, bound {self.settings.bound:g}, errors " + ", ".join(
            f"{error:.3f}" for error in state.errors[-3:]
        )
        state.is_dense, state.errors = not state.is_dense, []
        if state.is_dense:
            state.trips += 1
            self.recorder.count("guard_trips", labels_of(place))
            self.held |= {place}
            logger.warning(
                "sparse-prefill: layer %d runs dense from now on at level %s%s: %s (%s; %s)", *place, self._where,
                Fallback.GUARD.explain, errors, of_head,
            )  # fmt: skip
        else:
            self.held -= {place}
            logger.warning("sparse-prefill: layer %d goes sparse again at level %s%s (%s)", *place, self._where, errors)


def labels_of(place: Place) -> dict[str, object]:
    return dict(zip(LAYER_LEVEL, place, strict=True))


def relative_errors(sums: torch.Tensor) -> tuple[float, list[float]]:
    """‖O − Õ‖₂ / ‖O‖₂ of all heads together, and of each. sums [2, num_heads], on the host."""
    off, of = sums.double().tolist()
    return _ratio(sum(off), sum(of)), [_ratio(*head) for head in zip(off, of, strict=True)]


def _ratio(off: float, of: float) -> float:
    if of == 0:
        return 0.0 if off == 0 else math.inf
    return math.sqrt(off / of)


def pick_queries(step: int, slabs: Sequence[Slab]) -> slice:
    """Tokens to check in the step of that number: up to 128 that end where a tile does, any tile alike likely."""
    tiles = [(slab.rows, tile) for slab in slabs for tile in slab.rows.tile_list]
    rows, tile = tiles[mixed(step) % len(tiles)]
    end = tile.token + tile.length_tokens
    return slice(max(rows.tokens[tile.row], end - PROBE_TOKENS), end)


def mixed(*numbers: int) -> int:
    """A hash of integers, the same in every process."""
    return zlib.crc32(repr(numbers).encode())
