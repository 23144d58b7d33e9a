# SPDX-License-Identifier: Apache-2.0
"""`eval report`: speed and accuracy of a model against stock vLLM, in parts, as a page to share.

Each part starts stock vLLM and then this backend. A finished part is a file, so an interrupted run continues with the
next part.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_sparse_backend.evaluation import answer_tables, serve_bench
from vllm_sparse_backend.evaluation.answer_run import FACT_TOKENS, SEED, AnswerWorkload, ask_all
from vllm_sparse_backend.evaluation.compared_servers import Contestant, started
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import BenchError, Report, options_of, read_results, versions, write_json
from vllm_sparse_backend.evaluation.serve_bench import Length, ServeWorkload
from vllm_sparse_backend.evaluation.tasks import TASKS
from vllm_sparse_backend.evaluation.vllm_server import Settings

TTFT = "ttft"
PARTS = (TTFT, *TASKS)
"""Speed, and answers to each task."""

LENGTHS, ANSWER_LENGTHS = (8192, 32_768, 65_536, 131_000), (16_384, 65_536)
REPEATS, OUTPUT_TOKENS = 5, 64
MOST_FACTS = 24
MEMORY_ARGS = "--gpu-memory-utilization 0.8"
"""Leaves memory for the log-probabilities of a step's tokens, which vLLM does not reserve: 6 GB for 8,192 tokens and a
vocabulary of 128,000."""


@dataclass(frozen=True)
class ModelReport:
    """A report in a folder: a file of each finished part, ``report.json`` with all of them, and ``report.md``."""

    folder: Path
    model: Path
    settings: Sequence[Settings]
    lengths: tuple[int, ...]
    """Prompts whose TTFT is measured."""
    answer_lengths: tuple[int, ...]
    count: int
    """Prompts of each task and answer length."""
    text: str
    server_args: str
    device: str

    def workload(self, part: str) -> ServeWorkload | AnswerWorkload:
        """Return the requests of a part."""
        if part == TTFT:
            return ServeWorkload(tuple(map(Length, self.lengths)), OUTPUT_TOKENS, REPEATS, self.text)
        facts = min(MOST_FACTS, min(self.answer_lengths) // FACT_TOKENS)
        return AnswerWorkload(self.answer_lengths, self.count, facts, self.text, (part,))

    @cached_property
    def servers(self) -> list[Contestant]:
        """Stock vLLM, and this backend with each of the settings, with room for the longest prompt."""
        longest = max(self.workload(part).longest for part in PARTS) + 1
        return started(self.model, self.settings, longest, self.all_args)

    @property
    def all_args(self) -> str:
        return f"{MEMORY_ARGS} {self.server_args}".rstrip()

    def options(self, part: str) -> Mapping[str, Any]:
        """Return all that determines a part's result. A run that continues must have the same options."""
        _, *ours = self.servers
        about = {"settings": [server.what for server in ours], "server_args": self.all_args, "device": self.device}
        return options_of(self.workload(part), **about, **versions(), model=ours[0].model, seed=SEED)

    def finished(self) -> dict[str, dict[str, Any]]:
        """Return the finished parts. Raises BenchError if one was measured with other options."""
        return {part: read_results(self._path(part), self.options(part)) for part in PARTS if self._path(part).exists()}

    def steps(self, part: str) -> int:
        """Return the number of a part's requests to all servers."""
        workload = self.workload(part)
        requests = workload.steps if isinstance(workload, ServeWorkload) else len(workload.wanted)
        return requests * len(self.servers)

    def measure(self, part: str, report: Report, step: Callable[[], None]) -> None:
        """Measure a part, and write its file. Raises BenchError if a request failed or nothing ran sparse."""
        began = time.monotonic()
        workload = self.workload(part)
        if isinstance(workload, ServeWorkload):
            serve_bench.compare_servers(self.servers, workload, report, step)
            rows = [{key: value for key, value in case.items() if key != "answers"} for case in report.cases]
            problems = [said for case in report.cases for said in case["said"]]
        else:
            report.on_case = lambda case: step()
            ask_all(self.servers, workload, report)
            rows = answer_tables.summaries(report.cases, [server.label for server in self.servers])
            problems = answer_tables.failure_lines(report.cases)
        if problems:
            raise BenchError("\n".join([f"{part}: not finished", *problems]))
        seconds = round(time.monotonic() - began)
        write_json(self._path(part), {"options": self.options(part), "seconds": seconds, "rows": rows})

    def write(self) -> str:
        """Write the page and its JSON from all finished parts, and return the page."""
        results = self.finished()
        write_json(self.folder / "report.json", results)
        page = page_of(results)
        write_text(self.folder / "report.md", page)
        return page

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.json"


def page_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return finished parts as Markdown."""
    options = next(iter(results.values()))["options"]
    minutes = sum(result["seconds"] for result in results.values()) / 60
    packages = ", ".join(f"{name} {options[name]}" for name in versions())
    paragraphs = [
        f"# {options['model']} on {options['device']}\n",
        f"* Versions: {packages}.\n"
        f"* Settings: `{'`, `'.join(options['settings'])}`.\n"
        f"* Arguments of both servers: `{options['server_args']}`.\n"
        f"* Parts: {', '.join(results)}; {minutes:.0f} minutes.\n"
        f"* Prompts: seed {SEED}, text {options['text']} (SHA-256).\n",
    ]
    if TTFT in results:
        paragraphs.append(serve_bench.tables(results[TTFT]["rows"]))
    if rows := [row for part in TASKS if part in results for row in results[part]["rows"]]:
        paragraphs.append(answer_tables.tables(rows))
    return "\n".join(paragraphs)
