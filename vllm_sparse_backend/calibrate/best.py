"""Per head the cheapest of all methods whose output error holds the bound; dense where none does. (No paper has this.)

Every candidate is judged once with all heads of the layer on it, which gives every head's figures in one pass. What a
selection takes beside its heads is paid once for each kind of method in a layer (``costs.py``), so the choice is one
for the whole layer: of all sets of up to ``MOST_KINDS`` kinds and dense attention, the one in which heads with their
cheapest settings take least time together. If dense attention of the whole layer takes no longer, it is that.

Methods of a layer share an index whose blocks are as wide as all of them allow (``select/width.py``), and what one
keeps in narrower blocks is less than it was judged by. So the choice is judged as a whole, and what does not hold the
bound there is struck out, until all hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from vllm_sparse_backend.calibrate.costs import Costs, head_ms, kind_of
from vllm_sparse_backend.calibrate.measure import Bound, Figures, LayerJudge
from vllm_sparse_kernels.select.anchor_attention import AnchorAttention
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.select.dense import Dense
from vllm_sparse_kernels.select.flex_vertical_slash import FlexVerticalSlash
from vllm_sparse_kernels.select.minference import AShape, BlockSparse
from vllm_sparse_kernels.select.sale import Sale
from vllm_sparse_kernels.select.sparge_attn import SpargeAttn
from vllm_sparse_kernels.select.vertical_slash import VerticalSlash

MOST_KINDS = 3
"""Of sparse methods in a layer: each has a selection of its own."""

MOST_ROUNDS = 8
"""Of choices for a layer; heads that hold the bound in none of them are dense."""

LADDERS: tuple[tuple[Method, ...], ...] = (
    tuple(AShape(sink, local) for sink, local in ((64, 512), (128, 1024), (128, 2048), (1024, 4096))),
    tuple(
        VerticalSlash(v, s)
        for v, s in ((64, 512), (128, 1024), (256, 1024), (512, 2048), (1000, 2048), (1000, 4096), (1000, 6096))
    ),
    tuple(BlockSparse(top_blocks=n) for n in (8, 16, 32, 64, 128)),
    tuple(SpargeAttn(kept_mass=x, min_similarity=-1.0) for x in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)),
    tuple(SpargeAttn(kept_mass=x, min_similarity=0.3) for x in (0.5, 0.8, 0.95)),
    tuple(AnchorAttention(theta=x, step_tiles=step) for step in (4, 16) for x in (6.0, 9.0, 12.0)),
    tuple(AnchorAttention(theta=x, step_tiles=4, sample_tokens=16) for x in (6.0, 9.0)),
    tuple(FlexVerticalSlash(gamma=x) for x in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)),
    tuple(FlexVerticalSlash(gamma=x, estimating="spread") for x in (0.7, 0.9, 0.98)),
    tuple(Sale(tau=x) for x in (0.3, 0.1, 0.06, 0.03, 0.016, 0.008, 0.004)),
)
"""Each method's settings from cheap to all but lossless. SharePrefill is not among them: which pattern a head takes
over depends on other layers; alone it is flex_vertical_slash."""


def candidates() -> list[Method]:
    """All settings, each without and with means in place of what it drops."""
    plain = [method for ladder in LADDERS for method in ladder]
    return plain + [replace(method, block_means=True) for method in plain]


def search(judge: LayerJudge, bound: Bound, among: Sequence[Method] | None = None) -> list[Method]:
    """One method for each head of the layer; ``among``: ``candidates`` unless given."""
    figures = {method: judge.judge([method] * judge.num_heads) for method in among or candidates()}
    holding: list[dict[Method, Figures]] = [
        {method: of[head] for method, of in figures.items() if bound.holds(of[head])} for head in range(judge.num_heads)
    ]
    for last in (False,) * (MOST_ROUNDS - 1) + (True,):
        chosen = choose(holding, judge.costs)
        if all(isinstance(method, Dense) for method in chosen):
            break
        together = judge.judge(chosen)
        failing = [head for head, of in enumerate(together) if not bound.holds(of)]
        if not failing:
            break
        for head in failing:
            # Of heads that fail again and again nothing is left.
            holding[head] = {} if last else {m: of for m, of in holding[head].items() if m != chosen[head]}
    else:
        chosen = [method if holding[head] else Dense() for head, method in enumerate(chosen)]
    return chosen


def choose(holding: Sequence[Mapping[Method, Figures]], costs: Costs) -> list[Method]:
    """The methods that take the layer least time, of those that each head may have; every head may be dense."""
    dense, dense_ms = Dense(), head_ms(costs, Dense(), 1.0)
    cheapest = [_cheapest_of_kinds(may, costs) for may in holding]
    kinds = list(dict.fromkeys(kind for of in cheapest for kind in of))
    best_ms, best = costs.layer.dense_ms, [dense] * len(holding)
    for size in range(1, MOST_KINDS + 1):
        for chosen in combinations(kinds, size):
            total_ms = costs.layer.base_ms + sum(costs.of(kind).group_ms for kind in chosen)
            heads: list[Method] = []
            for of in cheapest:
                ms, method = min(((*of[kind],) for kind in chosen if kind in of), key=_ms, default=(dense_ms, dense))
                ms, method = (ms, method) if ms < dense_ms else (dense_ms, dense)
                total_ms += ms
                heads.append(method)
            if total_ms < best_ms:
                best_ms, best = total_ms, heads
    return best


def _ms(timed: tuple[float, Method]) -> float:
    return timed[0]


def _cheapest_of_kinds(may: Mapping[Method, Figures], costs: Costs) -> dict[Method, tuple[float, Method]]:
    """By kind the time of its cheapest setting, and that."""
    found: dict[Method, tuple[float, Method]] = {}
    for method, figures in may.items():
        timed = head_ms(costs, method, figures.density), method
        kind = kind_of(method)
        if kind not in found or timed[0] < found[kind][0]:
            found[kind] = timed
    return found
