# SPDX-License-Identifier: Apache-2.0
"""Whose rows a step has: the level that each request of a worker's runner asked for, and the order of their rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_sparse_backend.serving import tallies
from vllm_sparse_backend.settings.plan import DEFAULT
from vllm_sparse_backend.settings.requests import REPORT, Mark


class Step:
    """The step that a worker's runner is at: the levels of its requests, and the order of the rows, once known."""

    def __init__(self, levels: Mapping[str, str]) -> None:
        self.levels = levels
        self.req_ids: Callable[[], Sequence[str]] = tuple

    def of_rows(self, num_rows: int) -> list[str]:
        """The level of each row, by padding rows ``default``."""
        if not self.levels:
            return [DEFAULT] * num_rows
        rows = [self.levels.get(req_id, DEFAULT) for req_id in self.req_ids()]
        if len(rows) > num_rows:
            raise RuntimeError(
                f"sparse-prefill: a batch of {num_rows} rows is built in a step of {len(rows)} requests: nothing tells "
                "whose rows they are; please report it with the server's options"
            )
        return rows + [DEFAULT] * (num_rows - len(rows))


_step: Step | None = None


def levels_of_rows(num_rows: int) -> list[str]:
    """The level that each row of the batch at hand was asked to have."""
    return [DEFAULT] * num_rows if _step is None else _step.of_rows(num_rows)


def ids_of_rows() -> Sequence[str]:
    """The request of each row of the batch at hand, as the engine names it; none where nobody told."""
    return () if _step is None else _step.req_ids()


def name_rows(req_ids: Callable[[], Sequence[str]]) -> None:
    """Tell the step at hand, if there is one, where to ask for its rows' requests when metadata is built."""
    if _step is not None:
        _step.req_ids = req_ids


@contextmanager
def at_step(runner: Any, scheduler_output: Any) -> Iterator[None]:
    """Keep the runner's record of levels, and make it known while the step runs."""
    global _step
    levels: dict[str, str] = runner.__dict__.setdefault("sparse_prefill_levels", {})
    for req_id in scheduler_output.finished_req_ids:
        levels.pop(req_id, None)
        tallies.end(req_id)
    for new in scheduler_output.scheduled_new_reqs:
        extra_args = getattr(new.sampling_params, "extra_args", None) or {}
        mark = Mark.of(extra_args)
        if extra_args.get(REPORT):
            tallies.begin(new.req_id, DEFAULT if mark is None else mark.level)
        if mark is None or mark.level == DEFAULT:  # the latter has a salt alone
            levels.pop(new.req_id, None)
        else:
            levels[new.req_id] = mark.level
    before, _step = _step, Step(levels)
    try:
        yield
    finally:
        _step = before
