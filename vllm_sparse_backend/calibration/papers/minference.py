# SPDX-License-Identifier: Apache-2.0
"""MInference's pattern for each head (arXiv:2407.02490, section 3.2, Algorithm 1; appendix C.2 and table 7).

The candidates of table 7 (an A-shape, four vertical-slashes and a block-sparse pattern) are first resized in steps to
the cost of the A-shape with 1,024 and 4,096 tokens. Each head then gets the candidate with the least output error.

Choices that the paper leaves open, and differences from it:

* Cost is time on this device, as on a server: selection and attention of the first layer that can run sparse, if all
  its heads run the candidate (``costs.py``). The paper counts the work of its kernels, and ignores selection.
* A step changes the larger of a candidate's two numbers by 50 tokens, so its character does not change. A step of
  block-sparse is a block of 64 keys, because the paper's step of 50 would be 50 blocks, or 3,200 keys.
* A candidate is left out if its smallest setting costs too much, or if it keeps everything at this cost. Algorithm 1
  would not terminate with it.
* The search takes the candidate with the least error among those that meet ``bound`` and leave out at least a tenth of
  the head's pairs (scattered slashes may keep all pairs). If there is none, the head runs dense.
* Beyond the paper, there are several budgets, multiples of the paper's cost. Each head takes the smallest budget at
  which a candidate meets the bound. Budgets as expensive as dense attention are left out.

Heads with the same pattern may have different numbers within one launch.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, replace
from statistics import fmean

from vllm_sparse_backend.calibration.costs import Costs
from vllm_sparse_backend.calibration.judge import CapturedLayer
from vllm_sparse_backend.calibration.search import LEAST_SPARSITY
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash

TARGET = AShape(sink_tokens=1024, local_tokens=4096)
"""The candidate whose cost is the paper's budget t."""

CANDIDATES = (
    TARGET,
    VerticalSlash(vertical_tokens=30, slash_tokens=2048),
    VerticalSlash(vertical_tokens=100, slash_tokens=1800),
    VerticalSlash(vertical_tokens=500, slash_tokens=1500),
    VerticalSlash(vertical_tokens=3000, slash_tokens=200),
    BlockSparse(top_blocks=100),
)
"""Candidates of the paper's table 7."""

STEP, MOST_STEPS = 50, 4096
BUDGETS = (0.5, 1.0, 2.0, 4.0)
"""Budgets as multiples of the paper's cost. The paper has only 1."""


def search_spaces(judge: CapturedLayer, costs: Costs) -> Iterator[tuple[Method, ...]]:
    """Yield candidates of equal cost for each budget, resized in at most twelve passes per candidate."""
    dense_ms = _layer_ms(judge, costs, Dense())
    for budget in BUDGETS:
        aim = budget * _layer_ms(judge, costs, TARGET)
        if aim < (1 - LEAST_SPARSITY) * dense_ms:
            fitted = (
                # A window's cost grows in steps of a block, so the search would find a smaller window of equal cost.
                TARGET if (candidate, budget) == (TARGET, 1) else _fitted(judge, costs, candidate, aim)
                for candidate in CANDIDATES
            )
            yield tuple(filter(None, fitted))


def resized(candidate: Method, steps: int) -> Method:
    """Resize a candidate (the paper's ChangeSpace)."""
    # Table 7 varies each candidate's largest number.
    number, field = max((number, field) for field, number in asdict(candidate).items())
    step = 1 if isinstance(candidate, BlockSparse) else STEP
    return replace(candidate, **{field: steps * step + number % step})


def _fitted(judge: CapturedLayer, costs: Costs, candidate: Method, aim: float) -> Method | None:
    """Return the candidate at the size whose cost is closest to ``aim`` ms; None if none fits or it keeps all."""

    def taken(steps: int) -> float:
        return _layer_ms(judge, costs, resized(candidate, steps))

    over = 1 + bisect_left(range(1, MOST_STEPS), aim, key=taken)
    if over == 1:
        return None
    steps = min(over - 1, over, key=lambda steps: abs(taken(steps) - aim))
    fitted = resized(candidate, steps)
    density = fmean(_densities(judge, fitted))
    return fitted if 1 - density >= LEAST_SPARSITY else None


def _layer_ms(judge: CapturedLayer, costs: Costs, method: Method) -> float:
    """Return the time of a layer with this method on all heads."""
    shared = costs.of(method).group_ms + costs.base_ms
    return shared + sum(costs.head_ms(method, density) for density in _densities(judge, method))


def _densities(judge: CapturedLayer, method: Method) -> list[float]:
    return [result.density for result in judge.judge([method] * judge.num_heads)]
