# SPDX-License-Identifier: Apache-2.0
"""A judge of heads whose figures are functions of the method."""

import math
from collections.abc import Callable, Sequence

from vllm_sparse_backend.calibration.judge import HeadErrors, HeadResult
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

Curve = Callable[[Method], HeadResult]


class FakeJudge:
    """``curves[i]`` returns the figures of a method for head i; ``passes`` lists the methods of each pass so far."""

    def __init__(self, *curves: Curve) -> None:
        self.curves = curves
        self.num_heads = len(curves)
        self.passes: list[list[Method]] = []

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        assert len(methods) == self.num_heads
        self.passes.append(list(methods))
        return [curve(method) for curve, method in zip(self.curves, methods, strict=True)]

    def judged(self, head: int) -> dict[Method, HeadResult]:
        """Return the figures of all methods under which this head was judged."""
        return {methods[head]: self.curves[head](methods[head]) for methods in self.passes}


def figures(error: float, density: float, p99: float | None = None) -> HeadResult:
    """Return figures. By default p99 equals the mean, and the default method loses 0.1."""
    p99 = error if p99 is None else p99
    errors = HeadErrors(error=error, p99=p99, of_default=error / 0.1, absolute=4 * error)
    return HeadResult(seen=errors, unseen=errors, density=density)


def of(setting: Callable[[Method], float], error: Callable[[float], float], density: Callable[[float], float]) -> Curve:
    """Return a curve of error and density from a number of the method; dense loses nothing."""

    def curve(method: Method) -> HeadResult:
        if isinstance(method, Dense):
            return figures(0.0, 1.0)
        number = setting(method)
        return figures(error(number), density(number))

    return curve


def any_method(head: int, method: Method) -> bool:
    """Allow any method, as ``IsAllowed`` does in the first round."""
    return True


def most_passes(num_settings: int) -> int:
    """Return the maximum passes of a bisection."""
    return math.ceil(math.log2(num_settings + 1))
