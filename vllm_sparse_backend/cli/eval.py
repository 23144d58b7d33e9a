# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill eval`: accuracy of sparse prefill, measured through servers."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vllm_sparse_backend.cli import common
from vllm_sparse_backend.cli.commands import add_command
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.evaluation.report import table_of

evaluate = common.group("Measure accuracy against stock vLLM.")


@evaluate.callback()
def commands() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Answers(common.ServerOptions):
    """Score answers that are part of the prompt.

    An answer is right if each of its tokens has rank 1 in vLLM's prompt_logprobs. All servers get the same prompts.
    Failed requests are reported, not counted, and make the exit code 1. Results of an earlier run in --json FILE are
    kept and not measured again.
    """

    lengths: Annotated[str, typer.Option(metavar="N,...", help="Prompt lengths in tokens.")] = "8192"
    count: Annotated[int, typer.Option(metavar="N", help="Prompts of each length.", min=1)] = 4
    facts: Annotated[
        int, typer.Option(metavar="N", help="Facts in a prompt, with one question each.", min=1, max=1000)
    ] = 24

    def run(self) -> None:
        """Send the questions to all servers, and print a table."""
        common.exit_on_sigterm()
        is_kept = self.json_path is not None and self.json_path.name != common.STDOUT_FILE
        go_on = f"The same command resumes from {self.json_path}." if is_kept else ""
        with common.failures(go_on), bar("prompts") as progress:
            from vllm_sparse_backend.evaluation import answer_run as evaluation

            lengths = common.token_counts("--lengths", self.lengths)
            evaluation.require_room(lengths, self.facts)
            workload = evaluation.AnswerWorkload.from_text(self.text, lengths, self.count, self.facts)
            servers = self.contestants(workload.longest + 1)
            report = self.report("answers")
            key = workload.key(servers[0].model, self.server_args)
            evaluation.resume(report, self.json_path, key, servers)
            progress.begin("prompts", sum(map(len, evaluation.missing_requests(servers, workload, report).values())))

            def show_progress(case: dict[str, Any]) -> None:
                if case["part"] == "prompt":
                    progress.step()
                    place = f"{case['tokens']:,} tokens, prompt {case['prompt'] + 1}"
                    progress.print(f"{case['label']}, {place}: {evaluation.describe_case(case)}")

            report.announce = progress.print
            report.on_case = show_progress
            evaluation.ask_all(servers, workload, key, report)
            rows = evaluation.summaries(report.cases, [server.label for server in servers], workload.lengths)
            report.write(summary=rows)
        _show(rows, report.cases)


add_command(
    evaluate,
    Answers,
    name="answers",
    example="sparse-prefill eval answers MODEL --settings mine.yaml --lengths 32768 --json a.json",
)


def _show(rows: list[dict[str, Any]], cases: list[dict[str, Any]]) -> None:
    """Print a table and failed requests; exit with code 1 if a request failed."""
    from vllm_sparse_backend.evaluation import answer_run as part

    cells = list(map(part.cells_of, rows))
    common.say(table_of("Answers inside the prompt", part.COLUMNS, cells, "right: all tokens of the answer rank first"))
    if others := [row for row in cells if row["label"] != cells[0]["label"]]:
        title = f"Perplexity and next-token distributions, compared with {cells[0]['label']}"
        caption = "KL: nats, a lower bound. top-1: share of positions with the same most likely token."
        common.say(table_of(title, part.CHANGE_COLUMNS, others, caption))
    for line in part.failure_lines(cases):
        common.say(line)
    if any(case.get("error") for case in cases):
        raise typer.Exit(1)
