# SPDX-License-Identifier: Apache-2.0
"""The settings that ``profile best`` chooses from, and those of them that can be the cheapest for a head.

They are the ladders of all methods (``MethodSpec.ladder``), and two more kinds of ``top_p``:

* ``channels`` "low_rank", for a head_dim at which it differs from "half". Selection takes less time, and keeps about as
  many pairs at the same p.
* A ``floor``. It takes more time, and keeps more pairs at the same p. It pays for a head in which a sparser setting
  loses single queries, such as lookups: the floor adds blocks for these queries only, but a larger p adds
  blocks for all queries. Every query is scored, because a floor holds for scored queries only.

Every judgement runs selection and attention on all prompts. A variant of ``top_p`` is therefore judged after its
cheaper variants, and for each head only with settings that are sparser than theirs within the bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm_sparse_backend.calibration.head_costs import Costs, kind_of, selection_ms
from vllm_sparse_backend.calibration.search import ladder_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.top_p.method import TopP

FLOOR = 0.5
"""Floor of the candidates with a floor: every query keeps at least half of its estimated attention."""


def candidates_of(names: Sequence[str], head_dim: int) -> list[Method]:
    """List the settings of some methods."""
    settings: list[Method] = []
    for name in names:
        ladder = ladder_of(name)
        settings += ladder
        settings += _variants([setting for setting in ladder if isinstance(setting, TopP)], head_dim)
    return settings


def _variants(ladder: Sequence[TopP], head_dim: int) -> list[TopP]:
    """Return the settings of further kinds of ``top_p``.

    Settings with a floor are sparser than the default. The default is within every bound that is relative to its own
    error, and costs less than the same setting with a floor.
    """
    has_low_rank = TopP(channels="low_rank").is_low_rank(head_dim)
    low_rank = [replace(setting, channels="low_rank") for setting in ladder] if has_low_rank else []
    floored = [
        replace(setting, floor=FLOOR, queries="all") for setting in low_rank or ladder if _is_sparser(setting, TopP())
    ]
    return [*low_rank, *floored]


def kinds_in_order(settings: Iterable[Method], costs: Costs, num_heads: int) -> list[Method]:
    """List the kinds of some settings in the order in which they are judged."""
    sparsest: dict[Method, Method] = {}
    for setting in settings:
        sparsest.setdefault(kind_of(setting), setting)

    def order(kind: Method) -> tuple[bool, bool, float]:
        if not isinstance(kind, TopP):
            return False, False, 0.0
        has_floor = kind.floor > 0
        # The sparser the setting, the more queries need the floor: the sparsest setting's time bounds the others'.
        return True, has_floor, selection_ms(costs, sparsest[kind] if has_floor else kind, num_heads)

    return sorted(sparsest, key=order)


def can_be_cheapest(setting: Method, within_bound: Iterable[Method], costs: Costs, num_heads: int) -> bool:
    """Return whether a setting may cost a head less than the settings that are already known to be within the bound."""
    if not isinstance(setting, TopP):
        return True
    setting_ms = selection_ms(costs, setting, num_heads)
    return all(
        _is_sparser(setting, other)
        for other in within_bound
        if isinstance(other, TopP)
        and other.floor <= setting.floor
        and selection_ms(costs, other, num_heads) <= setting_ms
    )


def _is_sparser(setting: TopP, other: TopP) -> bool:
    """Return whether a setting precedes another setting of the ladder, regardless of their kinds."""
    return (setting.kept_mass, setting.most_share) < (other.kept_mass, other.most_share)
