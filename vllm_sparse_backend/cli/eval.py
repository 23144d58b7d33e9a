# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill eval`: accuracy of sparse prefill, measured through servers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_backend.cli import common
from vllm_sparse_backend.cli.commands import add_command
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.evaluation.report import options_of

evaluate = common.group("Measure accuracy against stock vLLM.")


@dataclass(frozen=True, kw_only=True)
class Answers(common.ServerOptions):
    """Score answers that are part of the prompt.

    An answer is right if each of its tokens has rank 1 in vLLM's prompt_logprobs. All servers get the same prompts.
    Failed requests are reported, not counted, and make the exit code 1. Results of an earlier run in --json FILE are
    kept and not measured again.
    """

    lengths: Annotated[str, typer.Option(metavar="N,...", help="Prompt lengths in tokens.")] = "8192"
    count: Annotated[int, typer.Option(metavar="N", help="Prompts of each length.", min=1)] = 4
    tasks: Annotated[
        str,
        typer.Option(
            metavar="TASK,...",
            help="Tasks: facts, multi_key, multi_value, variables, common_words, frequent_words.",
        ),
    ] = "facts"
    facts: Annotated[
        int, typer.Option(metavar="N", help="Facts in a prompt, with one question each.", min=1, max=1000)
    ] = 24

    def run(self) -> None:
        """Send the questions to all servers, and print a table."""
        go_on = f"The same command resumes from {self.json_path}." if self.json_path else ""
        with common.failures(go_on), bar("prompts") as progress:
            from vllm_sparse_backend.evaluation import answer_run, answer_tables
            from vllm_sparse_backend.evaluation.compared_servers import resume
            from vllm_sparse_backend.evaluation.tasks import TASKS

            lengths = common.token_counts("--lengths", self.lengths)
            answer_run.require_room(lengths, self.facts)
            tasks = common.split(self.tasks)
            common.require_known("--tasks", tasks, TASKS)
            workload = answer_run.AnswerWorkload.from_text(self.text, lengths, self.count, self.facts, tasks)
            servers = self.contestants(workload.longest)
            report = self.report("answers")
            options = options_of(workload, server_args=self.server_args)
            del options["tasks"]  # prompts of a task do not depend on the other tasks
            resume(report, options, servers)
            prompts = answer_run.ask_all(servers, workload, report, progress)
            rows = answer_tables.summaries(prompts, [server.label for server in servers])
            report.write(summary=rows)
        common.say(answer_tables.tables(rows))
        for line in answer_tables.failure_lines(prompts):
            common.say(line)
        if any(prompt.error for prompt in prompts):
            raise typer.Exit(1)


add_command(
    evaluate, Answers, "Example: sparse-prefill eval answers MODEL --settings mine.yaml --lengths 32768 --json a.json"
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report a model's speed and accuracy against stock vLLM.

    Speed and each answer are kept in --out FOLDER, and not measured again. FOLDER/report.md has the tables, and
    FOLDER/report.json all figures.
    """

    model: common.Model
    settings: common.SparseSettings = None
    folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder of the report.", callback=common.output_folder)
    ] = Path("report")
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Prompt tokens for TTFT, as for bench serve. Default: 8K to 131K."),
    ] = None
    answer_lengths: Annotated[
        str | None, typer.Option(metavar="N,...", help="Prompt tokens for answers. Default: 16K and 65K.")
    ] = None
    count: Annotated[int, typer.Option(metavar="N", help="Prompts of each task and length.", min=1)] = 2
    text: common.Text = None
    server_args: common.ServerArgs = ""

    def run(self) -> None:
        """Measure what is not finished, and print the page."""
        with common.failures(f"The same command continues from {self.folder}."):
            from vllm_sparse_backend.evaluation import model_report
            from vllm_sparse_backend.evaluation.compared_servers import servers_to_start
            from vllm_sparse_backend.evaluation.serve_bench import ServeWorkload
            from vllm_sparse_backend.evaluation.vllm_server import device_name
            from vllm_sparse_backend.prompts.texts import project_text, read_prompt_text

            settings = common.settings_of(self.settings, self.model)
            output_tokens = model_report.OUTPUT_TOKENS
            lengths = common.serve_lengths(self.lengths, model_report.LENGTHS, output_tokens, self.model)
            answer_lengths = common.prompt_lengths(
                "--answer-lengths", self.answer_lengths, model_report.ANSWER_LENGTHS, output_tokens, self.model
            )
            text = read_prompt_text(self.text) if self.text else project_text()
            speed = ServeWorkload(lengths, output_tokens, model_report.REPEATS, text)
            questions = model_report.answer_workload(answer_lengths, self.count, text)
            args = f"{model_report.MEMORY_ARGS} {self.server_args}".rstrip()
            servers = servers_to_start(self.model, settings, max(speed.longest, questions.longest), args)
            with bar("report") as progress:
                page = model_report.make_report(self.folder, device_name(), servers, args, speed, questions, progress)
            common.say(page)


add_command(evaluate, Report, "Example: sparse-prefill eval report meta-llama/Llama-3.1-8B-Instruct")
