# SPDX-License-Identifier: Apache-2.0
"""Whose rows a step has: the level of each request of a worker's runner, and the order of the requests' rows.

One ``RunnerRequests`` for each worker. The hooks around its runner fill it in, and the metadata builders read it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, Mark, RequestLevel
from vllm_sparse_backend.serving.worker import request_tallies

REQUESTS = "sparse_prefill_requests"
"""Attribute of vLLM's runner that holds its ``RunnerRequests``."""


class Step:
    """The step that a worker's runner is at: its requests and their levels, and the order of the rows, once known.

    levels: of all requests of the runner that have another than the server's; scheduled: by request, its tokens in the
    step. A dummy run has tokens of nobody.
    """

    def __init__(self, levels: Mapping[str, RequestLevel], scheduled: Mapping[str, int], runner: Any = None) -> None:
        self.levels, self.scheduled, self.runner = levels, scheduled, runner
        self.req_ids: Callable[[], Sequence[str]] = tuple

    def rows(self, common: Any) -> Sequence[str | None]:
        """The request of each row of a batch's metadata, padding rows left out; none where nobody told."""
        numbers = getattr(common, "req_idx", None)
        if numbers is None:
            return self.req_ids()
        known = (self.runner.req_states.index_to_req_id.get(int(number)) for number in numbers)
        return [req_id if req_id in self.scheduled else None for req_id in known]


class RunnerRequests:
    """The requests of one runner, and the step that it is at.

    Args:
        names: the levels that this worker can run rows at. A mark that names another counts as none.
    """

    step: Step | None = None

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._levels: dict[str, RequestLevel] = {}

    def levels_of_rows(self, common: Any) -> list[RequestLevel] | None:
        """The level of each row of a batch's metadata; the server's for padding rows.

        Returns:
            None where requests of the step have other levels than the server's, and nothing tells which rows are
            theirs. What is exact for all of them is to run all rows dense.
        """
        num_rows, step = common.num_reqs, self.step
        if step is None or not step.levels.keys() & step.scheduled.keys():
            return [SERVER_LEVEL] * num_rows
        rows = self.ids_of_rows(common)
        if not rows:
            return None
        levels = [step.levels.get(req_id or "", SERVER_LEVEL) for req_id in rows]
        return levels + [SERVER_LEVEL] * (num_rows - len(rows))

    def ids_of_rows(self, common: Any) -> Sequence[str | None]:
        """The request of each row of a batch's metadata, as the engine names it; none where they are not told."""
        if self.step is None:
            return ()
        rows = self.step.rows(common)
        return rows if len(rows) <= common.num_reqs else ()

    def name_rows(self, req_ids: Callable[[], Sequence[str]]) -> None:
        """Tell the step at hand, if there is one, where to ask for its rows' requests when metadata is built."""
        if self.step is not None:
            self.step.req_ids = req_ids

    @contextmanager
    def at_step(self, scheduler_output: Any, runner: Any) -> Iterator[None]:
        """Keep the record of levels, and make it known to builders while the step runs."""
        for req_id in scheduler_output.finished_req_ids:
            self._levels.pop(req_id, None)
            request_tallies.end(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            extra_args = getattr(new.sampling_params, "extra_args", None) or {}
            level = self._level_of(extra_args)
            if (ticket := request_tallies.ticket_in(extra_args)) is not None:
                request_tallies.begin(new.req_id, level.name, ticket)
            if level == SERVER_LEVEL:
                self._levels.pop(new.req_id, None)
            else:
                self._levels[new.req_id] = level
        before, self.step = self.step, Step(self._levels, scheduler_output.num_scheduled_tokens, runner)
        try:
            yield
        finally:
            self.step = before

    def _level_of(self, extra_args: Mapping[str, Any]) -> RequestLevel:
        mark = Mark.read(extra_args)
        return SERVER_LEVEL if mark is None or mark.level not in self._names else mark.request_level


def requests_of(runner: Any) -> RunnerRequests | None:
    """The requests of vLLM's runner, which its layers' worker keeps; None where it has no layer that goes sparse."""
    known: RunnerRequests | None = vars(runner).get(REQUESTS)
    if known is None:
        from vllm_sparse_backend.serving.worker.model_layers import adopted_worker

        worker = adopted_worker(runner.vllm_config)
        if worker is None:
            return None
        known = vars(runner)[REQUESTS] = worker.requests
    return known
