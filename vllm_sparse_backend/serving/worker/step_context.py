# SPDX-License-Identifier: Apache-2.0
"""Maps the rows of a step to requests, their levels and their prompts' lengths.

Each worker has one ``RunnerRequests``. The hooks around its runner fill it in, and the metadata builders read it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_sparse_backend.config.keys import REQUESTS
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel, level_in
from vllm_sparse_backend.serving import compat


class Step:
    """The current step of a worker's runner."""

    def __init__(self, levels: Mapping[str, RequestLevel], scheduled: Mapping[str, int], runner: Any = None) -> None:
        self.levels, self.scheduled, self.runner = levels, scheduled, runner
        self.req_ids: Callable[[], Sequence[str]] = tuple

    def rows(self, common: Any) -> Sequence[str | None]:
        """Return the request of each row of a batch."""
        numbers = common.req_idx
        if numbers is None:
            return self.req_ids()
        ids = (self.runner.req_states.index_to_req_id.get(int(number)) for number in numbers)
        return [req_id if req_id in self.scheduled else None for req_id in ids]


class RunnerRequests:
    """The requests of one runner, and its current step."""

    step: Step | None = None

    def __init__(self) -> None:
        self._levels: dict[str, RequestLevel] = {}
        self._prompt_lens: dict[str, int] = {}

    def levels_of_rows(self, common: Any) -> list[RequestLevel] | None:
        """Return the level of each row of a batch."""
        num_rows, step = common.num_reqs, self.step
        if step is None or not step.levels.keys() & step.scheduled.keys():
            return [SERVER_LEVEL] * num_rows
        rows = self.ids_of_rows(common)
        if not rows:
            return None
        levels = [step.levels.get(req_id or "", SERVER_LEVEL) for req_id in rows]
        return levels + [SERVER_LEVEL] * (num_rows - len(rows))

    def prompt_lens_of_rows(self, common: Any) -> list[int] | None:
        """Return the length of the prompt of each row's request."""
        if self.step is None:
            return [0] * common.num_reqs
        rows = self.ids_of_rows(common)
        if not rows:
            return None
        lengths = [self._prompt_lens.get(req_id or "", 0) for req_id in rows]
        return lengths + [0] * (common.num_reqs - len(rows))

    def ids_of_rows(self, common: Any) -> Sequence[str | None]:
        """Return the request of each row of a batch."""
        if self.step is None:
            return ()
        rows = self.step.rows(common)
        return rows if len(rows) <= common.num_reqs else ()

    def name_rows(self, req_ids: Callable[[], Sequence[str]]) -> None:
        """Set the function that gives the current step, if any, the requests of its rows."""
        if self.step is not None:
            self.step.req_ids = req_ids

    @contextmanager
    def at_step(self, scheduler_output: Any, runner: Any) -> Iterator[None]:
        """Update the levels and prompts of requests, and let builders access the step while it runs."""
        for req_id in scheduler_output.finished_req_ids:
            self._levels.pop(req_id, None)
            self._prompt_lens.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._prompt_lens[new.req_id] = compat.prompt_length(new)
            level = level_in(getattr(new.sampling_params, "extra_args", None))
            if level == SERVER_LEVEL:
                self._levels.pop(new.req_id, None)
            else:
                self._levels[new.req_id] = level
        outer_step = self.step
        self.step = Step(self._levels, scheduler_output.num_scheduled_tokens, runner)
        try:
            yield
        finally:
            self.step = outer_step


def requests_of(runner: Any) -> RunnerRequests | None:
    """Return the requests of a runner."""
    requests: RunnerRequests | None = vars(runner).get(REQUESTS)
    if requests is None:
        from vllm_sparse_backend.serving.worker.model_layers import adopted_worker

        worker = adopted_worker(runner.vllm_config)
        if worker is None:
            return None
        requests = worker.requests
        vars(runner)[REQUESTS] = requests
    return requests
