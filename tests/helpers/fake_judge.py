# SPDX-License-Identifier: Apache-2.0
"""A judge of heads whose figures are given as functions of the method."""

import math
from collections.abc import Callable, Sequence

from vllm_sparse_backend.calibration.head_errors import HeadResult
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

Curve = Callable[[Method], HeadResult]


class FakeJudge:
    """``curves[i]`` says what comes of a method of head i; ``passes`` are the methods of each pass so far."""

    layer = 0

    def __init__(self, *curves: Curve) -> None:
        self.curves = curves
        self.num_heads = len(curves)
        self.passes: list[list[Method]] = []

    def judge(self, methods: Sequence[Method]) -> list[HeadResult]:
        assert len(methods) == self.num_heads
        self.passes.append(list(methods))
        return [curve(method) for curve, method in zip(self.curves, methods, strict=True)]

    def judged(self, head: int) -> dict[Method, HeadResult]:
        """All that this head was judged under, and what came of it."""
        return {methods[head]: self.curves[head](methods[head]) for methods in self.passes}


def figures(error: float, density: float, p99: float | None = None) -> HeadResult:
    """Where not given, p99 is as the mean. The default loses 0.1."""
    p99 = error if p99 is None else p99
    return HeadResult(error=error, p99=p99, p999=p99, of_default=error / 0.1, absolute=4 * error, density=density)


def of(setting: Callable[[Method], float], error: Callable[[float], float], density: Callable[[float], float]) -> Curve:
    """Error and density by one number of a method; dense loses nothing."""

    def curve(method: Method) -> HeadResult:
        if isinstance(method, Dense):
            return figures(0.0, 1.0)
        number = setting(method)
        return figures(error(number), density(number))

    return curve


def any_method(head: int, method: Method) -> bool:
    """``IsAllowed`` of the first round."""
    return True


def most_passes(num_settings: int) -> int:
    """Of a bisection."""
    return math.ceil(math.log2(num_settings + 1))
