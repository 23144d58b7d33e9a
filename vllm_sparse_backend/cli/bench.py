# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill bench`: speed on this machine, compared with dense attention and stock vLLM."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_backend.cli import common
from vllm_sparse_backend.cli.commands import add_command
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.evaluation.report import CaseReport, table_of

bench = common.group("Measure speed against dense attention and stock vLLM.")


@dataclass(frozen=True, kw_only=True)
class Serve(common.ServerOptions):
    """Measure TTFT and TPOT against stock vLLM.

    All servers get the same prompts, one request at a time. Failed requests are reported, not counted, and make the
    exit code 1. For throughput under load, use `vllm bench serve` on either server.
    """

    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Prompt tokens; NEW+CACHED adds a cached prefix. Default: 1K to 131K."),
    ] = None
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each answer.", min=2)] = 64
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Requests for each length; long lengths get fewer.", min=1)
    ] = 21

    def run(self) -> None:
        """Measure, and print tables."""
        with common.failures(), bar("connecting") as progress:
            from vllm_sparse_backend.evaluation import serve_bench
            from vllm_sparse_backend.evaluation.vllm_server import NOT_FASTER_ON_CPU, has_cuda
            from vllm_sparse_backend.prompts.texts import read_prompt_text

            text = read_prompt_text(self.text) if self.text else None
            lengths = common.serve_lengths(self.lengths, serve_bench.LENGTHS, self.output_tokens, self.model)
            workload = serve_bench.ServeWorkload(lengths, self.output_tokens, self.repeats, text)
            servers = self.contestants(workload.longest)
            report = self.report("serve")
            serve_bench.compare_servers(servers, workload, report, progress)
        common.say(serve_bench.tables(report.cases))
        for case in report.cases:
            for said in case["said"]:
                common.say(f"failed: {case['label']}, {case['case']}: {said}")
        if any(case["failures"] for case in report.cases):
            raise typer.Exit(1)
        if self.model is not None and not has_cuda():
            common.say(NOT_FASTER_ON_CPU)


add_command(bench, Serve, "Example: sparse-prefill bench serve MODEL --settings mine.yaml --lengths 8192,200+32768")


@bench.command(epilog="Example: sparse-prefill bench crossover MODEL --out mine.json")
def crossover(
    model: common.Model,
    settings: common.SparseSettings = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Table to write, or to merge into.", callback=common.output)
    ] = Path("crossover.json"),
    longest: Annotated[int, typer.Option(metavar="N", help="Longest prompt to measure, in tokens.", min=1)] = 131072,
    server_args: common.ServerArgs = "",
    json_path: common.Json = None,
) -> None:
    """Measure from which lengths sparse prefill is faster.

    The result is the table that `auto` uses. For each of --settings, starts a server of MODEL, and compares TTFT of
    sparse and exact requests with several numbers of new and of cached tokens.
    """
    with common.failures(f"{out} holds the measurements so far."), bar("crossover") as progress:
        from vllm_sparse_backend.config.model_check import max_positions, read_config
        from vllm_sparse_backend.evaluation import crossover_bench
        from vllm_sparse_backend.serving.compat import device_name

        crossover_bench.read_table(out)  # fails before measuring if the file is not a table
        if (most := max_positions(read_config(model))) is not None:
            longest = min(longest, most - 1)
        crossovers = [
            crossover_bench.Crossover(model, configuration, longest, server_args)
            for configuration in common.settings_of(settings, model)
        ]
        report = CaseReport("crossover", device_name(), json_path)
        for measured in crossovers:
            engine, cells = measured.measure(progress)
            lengths = crossover_bench.fit_lengths(cells)
            entry = measured.entry(report.device, engine, lengths, report.command)
            crossover_bench.replace_entry(out, entry)
            cases = [cell.case(lengths) for cell in cells]
            for case in cases:
                report.add_case(case)
            common.say(table_of(f"{measured.settings}, {report.device}", crossover_bench.COLUMNS, cases))
            common.say(
                table_of(f"in {out}; empty: never faster", crossover_bench.LENGTHS_COLUMNS, [entry.model_dump()])
            )
