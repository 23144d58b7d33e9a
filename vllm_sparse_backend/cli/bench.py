# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill bench`: speed on this machine, compared with dense attention and stock vLLM."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_sparse_backend.cli import common
from vllm_sparse_backend.cli.commands import add_command
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.config.layer_weights import LinearSizes
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.report import BenchError, Report, cell, table_of

if TYPE_CHECKING:
    from vllm_sparse_backend.evaluation.serve_bench import Length

bench = common.group("Measure speed against dense attention and stock vLLM.")


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Measure TTFT and TPOT against stock vLLM.

    All servers get the same prompts, one request at a time. Failed requests are reported, not counted, and make the
    exit code 1. For throughput under load, use `vllm bench serve` on either server.
    """

    model: common.ServedModel = None
    settings: common.SparseSettings = None
    level: common.Level = None
    url: common.Urls = None
    label: common.Labels = None
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Prompt tokens; NEW+CACHED adds a cached prefix. Default: 1K to 131K."),
    ] = None
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each answer.", min=2)] = 64
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Requests for each length; long lengths get fewer.", min=1)
    ] = 21
    text: common.Text = None
    server_args: common.ServerArgs = ""
    json_path: common.Json = None

    def run(self) -> None:
        """Measure, and print tables."""
        common.exit_on_sigterm()
        with common.failures(), bar("connecting") as progress:
            from vllm_sparse_backend.evaluation import serve_bench
            from vllm_sparse_backend.evaluation.compared_servers import contestants_from_options
            from vllm_sparse_backend.evaluation.prompt_texts import read_prompt_text
            from vllm_sparse_backend.evaluation.vllm_server import NOT_FASTER_ON_CPU, device_name, has_cuda

            levels = common.levels_of(self.level)
            lengths = self.lengths
            if lengths is None:
                lengths = ",".join(map(str, serve_bench.fitting(self.model, self.output_tokens)))
            text = read_prompt_text(self.text) if self.text else None
            workload = serve_bench.ServeWorkload(tuple(_lengths(lengths)), self.output_tokens, self.repeats, text)
            if len(self.url or ()) == 1 and len(levels) < 2:
                raise BenchError(
                    "--url: given one server, expected at least two, of which the first is the baseline, or two levels "
                    "of one server, each with --level"
                )
            servers = contestants_from_options(
                self.model, self.settings or (), levels, self.url or (), self.label or (), workload.longest,
                self.server_args,
            )  # fmt: skip
            report = Report("serve", ", ".join(self.url or ()) or device_name(), self.json_path)
            report.announce = progress.print
            report.on_case = lambda case: progress.print(serve_bench.describe_case(case))
            progress.begin("requests", workload.steps * len(servers))
            serve_bench.compare_servers(servers, workload, report, progress.step)
        _show_serve(report.cases)
        if self.model is not None and not has_cuda():
            common.say(NOT_FASTER_ON_CPU)


add_command(
    bench, Serve, name="serve", example="sparse-prefill bench serve MODEL --settings mine.yaml --lengths 8192,200+32768"
)


def _lengths(text: str) -> "list[Length]":
    """Parse a text such as ``8192,200+32768``: whole prompts, and new tokens after a cached prefix."""
    from vllm_sparse_backend.evaluation.serve_bench import Length

    parts = [part.split("+") for part in common.split(text)]
    if not parts or any(len(part) > 2 or not all(n.isdecimal() and int(n) for n in part) for part in parts):
        expected = "whole numbers above 0, or NEW+CACHED, separated by commas"
        raise BenchError(f"--lengths: given {text!r}, expected {expected}")
    return [Length(*map(int, part)) for part in parts]


def _show_serve(cases: Sequence[dict[str, Any]]) -> None:
    """Print tables and failed requests; exit with code 1 if a request failed."""
    from vllm_sparse_backend.evaluation import serve_bench as part

    for name in dict.fromkeys(case["label"] for case in cases):
        latencies = [case for case in cases if (case["label"], case["part"]) == (name, "latency")]
        if latencies:
            title = f"{name}, one request at a time; baseline: {latencies[0]['first']}"
            common.say(table_of(title, part.COLUMNS, latencies))
    for case in cases:
        for said in case.get("said", ()):
            common.say(f"failed: {case['label']}, {case['case']}: {said}")
    if any(case.get("failures") for case in cases):
        raise typer.Exit(1)


@bench.command(epilog="""Example: sparse-prefill bench crossover --settings '{"method": "sale"}' --out mine.json""")
def crossover(
    model: common.MaybeModel = None,
    settings: common.SparseSettings = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Table to write, or to merge into.", callback=common.output)
    ] = Path("crossover.json"),
    longest: Annotated[int, typer.Option(metavar="N", help="Longest prompt to measure, in tokens.", min=1)] = 131072,
    chunk: common.Chunk = 8192,
    json_path: common.Json = None,
) -> None:
    """Measure from which length each method is faster.

    The result is the table that `auto` uses. Measures all methods, or those of --settings, in layers as large as those
    of MODEL or of an 8B model. Needs a GPU with vLLM's FlashAttention. Checks each method's output against exact
    attention before timing it.
    """
    with common.failures(f"{out} holds the measurements so far."):
        from vllm_sparse_backend.evaluation import crossover_bench as part
        from vllm_sparse_backend.evaluation.attention_prompts import Heads
        from vllm_sparse_backend.evaluation.cuda_device import Card
        from vllm_sparse_backend.evaluation.vllm_server import Settings

        card, heads = Card(), Heads.of(model)
        shape = ModelShape.from_folder(model) if model else heads.model(part.LAYERS)
        methods = part.methods_of_settings([Settings.parse(text, model).values for text in settings or ()], shape)
        report = Report("crossover", card.name, json_path)
        linear = LinearSizes.of(model)
        rows = part.measure_crossovers(card, heads, linear, methods, longest, chunk, out, report)
        steps = len(methods) * len(card.engines)
        show(f"crossover, {card.name}, {heads}", part.COLUMNS, rows, steps, lambda row: "entry" in row)
        entries = [case["entry"] for case in report.cases if "entry" in case]
        common.say(table_of(f"in {out}; empty: never faster", part.ENTRY_COLUMNS, entries))


def show(
    title: str,
    columns: Mapping[str, str],
    rows: Iterable[dict[str, Any]],
    steps: int | None = None,
    is_step: Any = lambda row: True,
) -> None:
    """Print each row when it is measured, with a progress bar, and a table at the end."""

    shown = []
    with bar(title.split(",")[0], steps) as progress:
        for row in rows:
            shown.append(row)
            if is_step(row):
                progress.step()
            values = [f"{heading} {cell(row[key])}" for key, heading in columns.items() if row.get(key) is not None]
            progress.print(", ".join(values))
    common.say(table_of(title, columns, shown))
