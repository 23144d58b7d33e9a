# SPDX-License-Identifier: Apache-2.0
"""Whose rows a step has: the level that each request of a worker's runner asked for, and the order of their rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_sparse_backend.serving import tallies
from vllm_sparse_backend.settings.plan import DEFAULT
from vllm_sparse_backend.settings.requests import Mark


class Step:
    """The step that a worker's runner is at: its requests and their levels, and the order of the rows, once known.

    levels: of all requests of the runner that have another than ``default``; scheduled: by request, its tokens in the
    step. A dummy run has tokens of nobody.
    """

    def __init__(self, levels: Mapping[str, str], scheduled: Mapping[str, int], runner: Any = None) -> None:
        self.levels, self.scheduled, self.runner = levels, scheduled, runner
        self.req_ids: Callable[[], Sequence[str]] = tuple

    def rows(self, common: Any) -> Sequence[str | None]:
        """The request of each row of a batch's metadata, padding rows left out; none where nobody told."""
        numbers = getattr(common, "req_idx", None)
        if numbers is None:
            return self.req_ids()
        known = (self.runner.req_states.index_to_req_id.get(int(number)) for number in numbers)
        return [req_id if req_id in self.scheduled else None for req_id in known]


_step: Step | None = None


def levels_of_rows(common: Any) -> list[str] | None:
    """The level that each row of a batch's metadata was asked to have; of padding rows ``default``.

    Returns:
        None where requests of the step have other levels than ``default``, and nothing tells which rows are theirs.
        What is exact for all of them is to run all rows dense.
    """
    num_rows = common.num_reqs
    if _step is None or not _step.levels.keys() & _step.scheduled.keys():
        return [DEFAULT] * num_rows
    rows = ids_of_rows(common)
    if not rows:
        return None
    return [_step.levels.get(req_id or "", DEFAULT) for req_id in rows] + [DEFAULT] * (num_rows - len(rows))


def ids_of_rows(common: Any) -> Sequence[str | None]:
    """The request of each row of a batch's metadata, as the engine names it; none where they are not told."""
    if _step is None:
        return ()
    rows = _step.rows(common)
    return rows if len(rows) <= common.num_reqs else ()


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
        if (ticket := tallies.ticket_in(extra_args)) is not None:
            tallies.begin(new.req_id, DEFAULT if mark is None else mark.level, ticket)
        if mark is None or mark.level == DEFAULT:  # the latter has a salt alone
            levels.pop(new.req_id, None)
        else:
            levels[new.req_id] = mark.level
    before, _step = _step, Step(levels, scheduler_output.num_scheduled_tokens, runner)
    try:
        yield
    finally:
        _step = before
