# SPDX-License-Identifier: Apache-2.0
"""`eval report`: speed and accuracy of a model against stock vLLM, as a page to share.

Stock vLLM and then this backend start once for speed and once for the answers to all tasks. The folder keeps the speed
of all lengths together and each prompt's answers, so an interrupted run continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_sparse_backend.evaluation import answer_tables, serve_bench
from vllm_sparse_backend.evaluation.answer_run import ask_all
from vllm_sparse_backend.evaluation.answer_scores import read_cases
from vllm_sparse_backend.evaluation.answer_workload import FACT_TOKENS, SEED, AnswerWorkload
from vllm_sparse_backend.evaluation.compared_servers import Contestant, Settings, resume, servers_to_start
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import BenchError, Report, options_of, write_json
from vllm_sparse_backend.evaluation.serve_bench import Length, ServeWorkload
from vllm_sparse_backend.evaluation.tasks import TASKS
from vllm_sparse_backend.identity import versions
from vllm_sparse_backend.progress import Progress

TTFT, ANSWERS = "ttft", "answers"
"""Names of the two files of results."""

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
    """Arguments of all servers."""
    device: str

    @property
    def answer_workload(self) -> AnswerWorkload:
        """The prompts of all tasks."""
        shortest = min(self.answer_lengths)
        if shortest < FACT_TOKENS:
            raise BenchError(
                f"--answer-lengths: given {shortest}, expected at least {FACT_TOKENS}, the room for a fact"
            )
        facts = min(MOST_FACTS, shortest // FACT_TOKENS)
        return AnswerWorkload(self.answer_lengths, self.count, facts, self.text, tuple(TASKS))

    def make(self, progress: Progress) -> str:
        """Measure what is not in the folder, write the page and its JSON from all results, and return the page.

        Raises BenchError if the folder's results have other options, a request failed or nothing ran sparse.
        """
        speed = ServeWorkload(tuple(map(Length, self.lengths)), OUTPUT_TOKENS, REPEATS, self.text)
        questions = self.answer_workload
        longest = max(speed.longest, questions.longest)
        servers = servers_to_start(self.model, self.settings, longest, self.server_args)
        # Files of other options are refused before a server starts.
        ttft = self._read(TTFT, speed, servers)
        answers = self._read(ANSWERS, questions, servers)
        if not ttft.cases:
            # Only a whole measurement is kept, so its cases are collected in a report without a file.
            measured = Report(TTFT, self.device)
            serve_bench.compare_servers(servers, speed, measured, progress)
            _require_none(TTFT, [said for case in measured.cases for said in case["said"]])
            ttft.cases = measured.cases
            ttft.write()
        ask_all(servers, questions, answers, progress)
        prompts = read_cases(answers.cases)
        _require_none(ANSWERS, answer_tables.failure_lines(prompts))

        rows = answer_tables.summaries(prompts, [server.label for server in servers])
        medians = [{key: value for key, value in case.items() if key != "answers"} for case in ttft.cases]
        options = {TTFT: ttft.options, ANSWERS: answers.options}
        write_json(self.folder / "report.json", {"options": options, TTFT: medians, ANSWERS: rows})
        settings = [server.what for server in servers[1:]]
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        page = "\n".join(
            [
                f"# {servers[0].model} on {self.device}\n",
                f"* Versions: {packages}.\n"
                f"* Settings: `{'`, `'.join(settings)}`.\n"
                f"* Arguments of both servers: `{self.server_args}`.\n"
                f"* Prompts: seed {SEED}, text {answers.options['text']} (SHA-256).\n",
                serve_bench.tables(ttft.cases),
                answer_tables.tables(rows),
            ]
        )
        write_text(self.folder / "report.md", page)
        return page

    def _read(self, name: str, workload: ServeWorkload | AnswerWorkload, servers: Sequence[Contestant]) -> Report:
        """Return the results so far in a file of the folder. Raises BenchError if they have other options."""
        report = Report(name, self.device, self.folder / f"{name}.json")
        resume(report, options_of(workload, server_args=self.server_args, seed=SEED) | versions(), servers)
        return report


def _require_none(name: str, problems: Sequence[str]) -> None:
    if problems:
        raise BenchError("\n".join([f"{name}: not finished", *problems]))
