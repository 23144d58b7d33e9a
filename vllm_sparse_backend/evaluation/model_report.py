# SPDX-License-Identifier: Apache-2.0
"""`eval report`: speed and accuracy of a model against stock vLLM, in parts, as a page to share.

Stock vLLM and then this backend start once for speed and once for the answers of all tasks. Speed and each answer are
kept, so an interrupted run continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vllm_sparse_backend.evaluation import answer_tables, serve_bench
from vllm_sparse_backend.evaluation.answer_run import FACT_TOKENS, SEED, AnswerWorkload, ask_all
from vllm_sparse_backend.evaluation.compared_servers import Contestant, Settings, resume, servers_to_start
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import BenchError, Progress, Report, options_of, versions, write_json
from vllm_sparse_backend.evaluation.serve_bench import Length, ServeWorkload
from vllm_sparse_backend.evaluation.tasks import TASKS

TTFT, ANSWERS = "ttft", "answers"
"""Names of the files of results."""
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
    """A report in a folder: results of speed and of answers, ``report.json`` with all figures, and ``report.md``."""

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
    parts: Sequence[str] = PARTS

    @property
    def speed(self) -> ServeWorkload:
        """The requests of ``ttft``."""
        return ServeWorkload(tuple(map(Length, self.lengths)), OUTPUT_TOKENS, REPEATS, self.text)

    @property
    def questions(self) -> AnswerWorkload:
        """The requests of all other parts."""
        facts = min(MOST_FACTS, min(self.answer_lengths) // FACT_TOKENS)
        tasks = tuple(part for part in self.parts if part != TTFT)
        return AnswerWorkload(self.answer_lengths, self.count, facts, self.text, tasks)

    @cached_property
    def servers(self) -> list[Contestant]:
        """Stock vLLM, and this backend with each of the settings, with room for the longest prompt."""
        longest = max(self.speed.longest, self.questions.longest)
        return servers_to_start(self.model, self.settings, longest, self.all_args)

    @property
    def all_args(self) -> str:
        return f"{MEMORY_ARGS} {self.server_args}".rstrip()

    def results(self, part: str) -> Report:
        """Return a part's results so far, in its file. Raises BenchError if they were measured with other options."""
        options = options_of(self.speed if part == TTFT else self.questions, server_args=self.all_args, seed=SEED)
        options.pop("tasks", None)  # prompts of a task do not depend on the other tasks
        report = Report(part, self.device, self.folder / f"{part}.json")
        resume(report, options | versions(), self.servers)
        return report

    def measure(self, progress: Progress) -> None:
        """Measure what the folder lacks. Raises BenchError if a request failed or nothing ran sparse."""
        speed, answers = self.results(TTFT), self.results(ANSWERS)
        if TTFT in self.parts and not speed.cases:
            # Speed is kept only as a whole, so its cases are collected in a report without a file.
            report = Report(TTFT, self.device)
            serve_bench.compare_servers(self.servers, self.speed, report, progress)
            self._require(TTFT, [said for case in report.cases for said in case["said"]])
            speed.cases = report.cases
            speed.write()
        ask_all(self.servers, self.questions, answers, progress)
        self._require(ANSWERS, answer_tables.failure_lines(answers.cases))

    def _require(self, part: str, problems: Sequence[str]) -> None:
        if problems:
            raise BenchError("\n".join([f"{part}: not finished", *problems]))

    def write(self) -> str:
        """Write the page and its JSON from all results, and return the page."""
        speed, answers = self.results(TTFT), self.results(ANSWERS)
        labels = [server.label for server in self.servers]
        rows = answer_tables.summaries(answers.cases, labels)
        about = speed.options if speed.cases else answers.options
        write_json(self.folder / "report.json", {"options": about, "ttft": speed.cases, "answers": rows})
        settings = [server.what for server in self.servers[1:]]
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        paragraphs = [
            f"# {self.servers[0].model} on {self.device}\n",
            f"* Versions: {packages}.\n"
            f"* Settings: `{'`, `'.join(settings)}`.\n"
            f"* Arguments of both servers: `{self.all_args}`.\n"
            f"* Prompts: seed {SEED}, text {about['text']} (SHA-256).\n",
        ]
        if speed.cases:
            paragraphs.append(serve_bench.tables(speed.cases))
        if rows:
            paragraphs.append(answer_tables.tables(rows))
        page = "\n".join(paragraphs)
        write_text(self.folder / "report.md", page)
        return page
