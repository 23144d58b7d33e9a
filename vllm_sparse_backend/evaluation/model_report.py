# SPDX-License-Identifier: Apache-2.0
"""`eval report`: speed and accuracy of a model against stock vLLM, as a page to share.

Stock vLLM and then this backend start once for speed and once for the answers to all tasks. The folder keeps the speed
of all lengths together and each prompt's answers, so an interrupted run continues.
"""

from collections.abc import Sequence
from pathlib import Path

from vllm_sparse_backend.evaluation import answer_tables, serve_bench
from vllm_sparse_backend.evaluation.answer_run import FACT_TOKENS, SEED, AnswerWorkload, ask_all
from vllm_sparse_backend.evaluation.compared_servers import Contestant, resume
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import BenchError, CaseReport, options_of, write_json
from vllm_sparse_backend.evaluation.serve_bench import ServeWorkload
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


def answer_workload(lengths: Sequence[int], count: int, text: str) -> AnswerWorkload:
    """Return ``count`` prompts of each task and length."""
    shortest = min(lengths)
    if shortest < FACT_TOKENS:
        raise BenchError(f"--answer-lengths: given {shortest}, expected at least {FACT_TOKENS}, the room for a fact")
    return AnswerWorkload(tuple(lengths), count, min(MOST_FACTS, shortest // FACT_TOKENS), text, tuple(TASKS))


def make_report(
    folder: Path,
    device: str,
    servers: Sequence[Contestant],
    server_args: str,
    speed: ServeWorkload,
    questions: AnswerWorkload,
    progress: Progress,
) -> str:
    """Measure what is not in the folder, write the page and its JSON from all results, and return the page.

    The folder gets results of speed and of answers, ``report.json`` with all figures, and ``report.md``. Raises
    BenchError if its results have other options, a request failed or nothing ran sparse.
    """

    def read(name: str, workload: ServeWorkload | AnswerWorkload) -> CaseReport:
        """Return the results so far in a file of the folder."""
        report = CaseReport(name, device, folder / f"{name}.json")
        resume(report, options_of(workload, server_args=server_args, seed=SEED) | versions(), servers)
        return report

    # Files of other options are refused before a server starts.
    ttft, answers = read(TTFT, speed), read(ANSWERS, questions)
    if not ttft.cases:
        # Only a whole measurement is kept, so its cases are collected in a report without a file.
        measured = CaseReport(TTFT, device)
        serve_bench.compare_servers(servers, speed, measured, progress)
        _require_none(TTFT, [said for case in measured.cases for said in case["said"]])
        ttft.cases = measured.cases
        ttft.write()
    prompts = ask_all(servers, questions, answers, progress)
    _require_none(ANSWERS, answer_tables.failure_lines(prompts))

    rows = answer_tables.summaries(prompts, [server.label for server in servers])
    medians = [{key: value for key, value in case.items() if key != "answers"} for case in ttft.cases]
    options = {TTFT: ttft.options, ANSWERS: answers.options}
    write_json(folder / "report.json", {"options": options, TTFT: medians, ANSWERS: rows})
    settings = [server.what for server in servers[1:]]
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    page = "\n".join(
        [
            f"# {servers[0].model} on {device}\n",
            f"* Versions: {packages}.\n"
            f"* Settings: `{'`, `'.join(settings)}`.\n"
            f"* Arguments of both servers: `{server_args}`.\n"
            f"* Prompts: seed {SEED}, text {answers.options['text']} (SHA-256).\n",
            serve_bench.tables(ttft.cases),
            answer_tables.tables(rows),
        ]
    )
    write_text(folder / "report.md", page)
    return page


def _require_none(name: str, problems: Sequence[str]) -> None:
    if problems:
        raise BenchError("\n".join([f"{name}: not finished", *problems]))
