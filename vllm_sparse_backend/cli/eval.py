# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill eval`: what sparse prefill loses, seen through servers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vllm_sparse_backend.cli.common import (
    Json,
    Level,
    ServedModel,
    ServerArgs,
    SparseSettings,
    Text,
    bar,
    exit_on_sigterm,
    failures,
    level_of,
    refuse_without_model,
    token_counts,
    wide_console,
)

if TYPE_CHECKING:
    from vllm_sparse_backend.measure.asking import Asking
    from vllm_sparse_backend.measure.contestants import Contestant
    from vllm_sparse_backend.measure.report import Report

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
    model: ServedModel = None,
    settings: SparseSettings = None,
    level: Level = None,
    no_stock: Annotated[bool, typer.Option("--no-stock", help="Leave stock vLLM out.")] = False,
    url: Annotated[
        list[str] | None, typer.Option(help="A running server; repeat it: the first is compared to.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Names of the --url, in their order.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, by comma.")] = "8192",
    prompts: Annotated[int, typer.Option(help="Prompts of each length.", min=1)] = 4,
    facts: Annotated[int, typer.Option(help="Facts in a prompt, each asked for once.", min=1, max=1000)] = 24,
    seed: Annotated[int, typer.Option(help="Of facts and places.")] = 0,
    text: Text = None,
    fact: Annotated[str | None, typer.Option(help="Line that states a fact, with {name} and {value}.")] = None,
    question: Annotated[str | None, typer.Option(help="Line that asks for it and answers, with both.")] = None,
    first_token: Annotated[str | None, typer.Option(help="Text of prompts' first token, '' for none; the bos.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at a time; more than one may change chunks.", min=1)] = 1,
    server_args: ServerArgs = "",
    json_path: Json = None,
) -> None:
    """Questions whose answers the prompt itself holds: which of them a prefill makes the model's first choice.

    An answer is right if each of its tokens has rank 1 in vLLM's prompt_logprobs. Prompts are the same for all servers.
    A request that fails is reported, and never counted. What --json FILE of an earlier run holds is not asked again.
    """
    exit_on_sigterm()
    with failures():
        from vllm_sparse_backend.measure import asking as part
        from vllm_sparse_backend.measure.answers import Templates
        from vllm_sparse_backend.measure.report import Report
        from vllm_sparse_backend.measure.server import device_name

        default = Templates()
        asking = part.Asking.about(
            text, token_counts("--lengths", lengths), prompts, facts=facts, seed=seed, first_token=first_token,
            templates=Templates(fact or default.fact, question or default.question),
        )  # fmt: skip
        levels = [level_of(one) for one in level or ()]
        if model is None:
            refuse_without_model({"--settings": settings, "--no-stock": no_stock, "--server-args": server_args})
        contestants = _contestants(model, settings, levels, no_stock, url or (), label, asking.longest, server_args)
        report = Report("answers", ", ".join(url or ()) or device_name(), json_path)
        _ask(contestants, asking, asking.key(contestants[0].model, server_args), report, concurrency)
        _show(part.summaries(report.cases, [one.label for one in contestants], asking.lengths), report.cases)


def _contestants(
    model: Path | None, settings: Sequence[str] | None, levels: Sequence[int | str], no_stock: bool,
    urls: Sequence[str], label: Sequence[str] | None, longest: int, server_args: str,
) -> list["Contestant"]:  # fmt: skip
    from vllm_sparse_backend.measure.contestants import Contestant, started
    from vllm_sparse_backend.measure.report import BenchError
    from vllm_sparse_backend.measure.server import Settings

    if (model is None) == (not urls):
        raise BenchError("eval answers: expected a MODEL to serve, or --url of running servers")
    if label and len(label) != len(urls):
        raise BenchError(f"--label: given {len(label)}, expected one for each of {len(urls)} --url")
    if model is not None:
        chosen = [Settings.parse(one, model=model) for one in settings or ["{}"]]
        return started(model, chosen, not no_stock, longest, server_args, levels)
    names: Sequence[str | None] = label or [None] * len(urls)
    return [one for name, at in zip(names, urls) for one in Contestant.running(name, at, levels)]


def _ask(contestants: Sequence["Contestant"], asking: "Asking", key: str, report: "Report", concurrency: int) -> None:
    """What the report's file does not hold yet, under a bar."""
    from vllm_sparse_backend.measure.asking import right_answers
    from vllm_sparse_backend.measure.contestants import ask_all, held, resume

    resume(report, report.json_path, key, contestants)
    total, done = len(contestants) * len(asking.wanted), held(report.cases, contestants, asking)
    with bar("prompts", total, done) as (out, advance):

        def tell(case: dict[str, Any]) -> None:
            if case["part"] != "prompt":
                return
            advance()
            said = f"failed: {case['error']}"
            if case["error"] is None:
                said = f"{sum(right_answers(case))} of {len(case['answers'])} right, {case['seconds']:.1f} s"
            line = f"{case['label']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}: {said}"
            out.print(escape(line), highlight=False, soft_wrap=True)

        report.on_case = tell
        ask_all(contestants, asking, key, report, concurrency)


def _show(rows: list[dict[str, Any]], cases: Sequence[dict[str, Any]]) -> None:
    """A table, and what failed: a run with failures ends with 1."""
    from vllm_sparse_backend.measure import asking as part
    from vllm_sparse_backend.measure.contestants import failures
    from vllm_sparse_backend.measure.report import table_of

    console = wide_console()
    caption = "right: all tokens of the answer rank first; perplexity: of all tokens but answers'"
    # A hundredth of a perplexity matters, and the three digits of tables are too few for that.
    told = [row | {"perplexity": row["perplexity"] and f"{row['perplexity']:.4f}"} for row in rows]
    console.print(table_of("Answers inside the prompt", part.COLUMNS, told, caption))
    for line in failures(cases):
        console.print(f"[red]{escape(line)}[/]", highlight=False, soft_wrap=True)
    if any(case.get("error") for case in cases):
        raise typer.Exit(1)
