"""`sparse-prefill eval`: what sparse prefill loses, seen through servers."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_sparse_backend.cli.bench import Json, Results, _console, _failures, _ints

if TYPE_CHECKING:
    from vllm_sparse_backend.evaluate.asking import Asking, Contestant

evaluate = typer.Typer(
    help="Measure what sparse prefill loses: answers of stock vLLM and this backend to the same prompts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@evaluate.callback()
def group() -> None:
    pass


@evaluate.command()
def answers(
    model: Annotated[Path | None, typer.Argument(help="Model to serve; not needed where servers run.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            help="The sparse_prefill object as JSON, or a profile; may be repeated. By default nothing is set."
        ),
    ] = None,
    no_stock: Annotated[bool, typer.Option("--no-stock", help="Leave stock vLLM out.")] = False,
    url: Annotated[
        list[str] | None, typer.Option(help="A running server; may be repeated, the first is compared to.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Name of what runs at each --url, in their order.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, by comma.")] = "8192",
    prompts: Annotated[int, typer.Option(help="Prompts of each length.", min=1)] = 4,
    facts: Annotated[int, typer.Option(help="Facts in a prompt, each asked for once.", min=1, max=1000)] = 24,
    seed: Annotated[int, typer.Option(help="Of facts and places.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="Text file, or folder of *.py and *.md; simple prose unless given.")
    ] = None,
    fact: Annotated[str | None, typer.Option(help="Line that states a fact, with {name} and {value}.")] = None,
    question: Annotated[str | None, typer.Option(help="Line that asks for it and answers, with both.")] = None,
    first_token: Annotated[
        str | None, typer.Option(help="Text of the token that starts prompts, '' for none; by default the model's bos.")
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(help="Requests at a time; with more than one, chunks may differ from server to server.", min=1),
    ] = 1,
    server_args: Annotated[str, typer.Option(help="More arguments for all servers, as one text.")] = "",
    json_path: Json = None,
    results: Results = None,
) -> None:
    """Questions whose answers the prompt itself holds: which of them a prefill makes the model's first choice.

    Facts are spread over a text and asked for, with their answers, further on in the same prompt. An answer is right if
    each of its tokens has rank 1 in vLLM's prompt_logprobs. Questions at a prompt's end are answered by decoding, which
    is dense, and hide what prefill lost. Prompts are the same for all servers and begin apart, and vLLM takes nothing
    from its prefix cache for such requests. With --json FILE of an earlier run, what that holds is not asked again.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    with _failures():
        from vllm_sparse_backend.bench.report import BenchError, Report
        from vllm_sparse_backend.bench.serve import Settings, device_name
        from vllm_sparse_backend.evaluate import asking as part
        from vllm_sparse_backend.evaluate.answers import Templates

        if (model is None) == (not url):
            raise BenchError("eval answers: expected a MODEL to serve, or --url of running servers")
        if label and len(label) != len(url or ()):
            raise BenchError(f"--label: given {len(label)}, expected one for each of {len(url or ())} --url")
        default = Templates()
        asking = part.Asking.about(
            text, _ints(lengths), prompts, facts=facts, seed=seed, first_token=first_token,
            templates=Templates(fact or default.fact, question or default.question),
        )  # fmt: skip
        if model is not None:
            chosen = [Settings.parse(one) for one in settings or ["{}"]]
            contestants = part.started(model, chosen, not no_stock, asking.longest, server_args)
            name, device = contestants[0].model, device_name()
        else:
            names: list[str | None] = list(label) if label else [None] * len(url or ())
            contestants = [part.Contestant.running(one, at) for one, at in zip(names, url or ())]
            name, device = contestants[0].model, ", ".join(url or ())
        report = Report("answers", device, json_path, results)
        key = asking.key(name, server_args)
        part.resume(report, json_path, key, contestants)
        _ask(contestants, asking, key, report, concurrency)
        rows = part.summaries(report.cases, [one.label for one in contestants], asking.lengths)
        part.add_figures(report, rows, name)
        _show(rows, report.cases)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def _ask(contestants: Sequence["Contestant"], asking: "Asking", key: str, report: Any, concurrency: int) -> None:
    from vllm_sparse_backend.evaluate.asking import ask_all, right_answers

    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as progress:
        held = sum(
            case["part"] == "prompt" and case["label"] in [one.label for one in contestants] for case in report.cases
        )
        total = len(contestants) * len(asking.lengths) * asking.prompts
        task = progress.add_task("prompts", total=total, completed=held)

        def tell(case: dict[str, Any]) -> None:
            progress.advance(task)
            said = f"failed: {case['error']}"
            if case["error"] is None:
                said = f"{sum(right_answers(case))} of {len(case['answers'])} right, {case['seconds']:.1f} s"
            line = f"{case['label']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}: {said}"
            progress.console.print(escape(line), highlight=False, soft_wrap=True)

        ask_all(contestants, asking, key, report, concurrency, tell)


def _show(rows: list[dict[str, Any]], cases: Sequence[dict[str, Any]]) -> None:
    from vllm_sparse_backend.bench.report import table_of
    from vllm_sparse_backend.evaluate import asking as part

    console = _console()
    caption = "right: all tokens of the answer rank first; perplexity: of all tokens but answers'"
    # A hundredth of it matters, and three digits are too few for that.
    told = [row | {"perplexity": row["perplexity"] and f"{row['perplexity']:.4f}"} for row in rows]
    console.print(table_of("Answers inside the prompt", part.COLUMNS, told, caption))
    columns, by_distance = part.distance_columns(rows)
    console.print(table_of("Right answers by distance from the fact, in tokens", columns, by_distance))
    for case in cases:
        if case["part"] == "density" and case["density"] is None:
            why = (
                "no request ran sparse: prompts within min_tokens are dense (the server's log says how many those are)"
            )
            console.print(f"[red]{escape(case['label'])}: {why}[/]")
        if case.get("error"):
            where = f"{case['label']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}"
            console.print(f"[red]failed, and not counted[/] {escape(where)}: {escape(case['error'])}")


def add_to(app: typer.Typer) -> None:
    app.add_typer(evaluate, name="eval")
