# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill eval`: what sparse prefill loses, seen through servers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vllm_sparse_backend.cli.common import (
    Json,
    Labels,
    Level,
    ServedModel,
    ServerArgs,
    SparseSettings,
    Text,
    Urls,
    exit_on_sigterm,
    failures,
    group,
    levels_of,
    token_counts,
    wide_console,
)
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.measure.report import Report, table_of

if TYPE_CHECKING:
    from vllm_sparse_backend.measure.asking import Asking
    from vllm_sparse_backend.measure.contestants import Contestant

evaluate = group("Measure what sparse prefill loses: answers of stock vLLM and this backend to the same prompts.")


@evaluate.callback()
def commands() -> None:
    pass


@evaluate.command(
    epilog="Example: sparse-prefill eval answers MODEL --settings mine.yaml --lengths 32768 --json a.json"
)
def answers(
    model: ServedModel = None,
    settings: SparseSettings = None,
    level: Level = None,
    url: Urls = None,
    label: Labels = None,
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, by comma.")] = "8192",
    count: Annotated[int, typer.Option(help="Prompts of each length.", min=1)] = 4,
    facts: Annotated[int, typer.Option(help="Facts in a prompt, each asked for once.", min=1, max=1000)] = 24,
    concurrency: Annotated[int, typer.Option(help="Requests at a time; more than one may change chunks.", min=1)] = 1,
    text: Text = None,
    server_args: ServerArgs = "",
    json_path: Json = None,
) -> None:
    """Questions whose answers the prompt itself holds: which of them a prefill makes the model's first choice.

    An answer is right if each of its tokens has rank 1 in vLLM's prompt_logprobs. Prompts are the same for all servers.
    A request that fails is reported, never counted, and exit code 1. What --json FILE of an earlier run holds is not
    asked again.
    """
    exit_on_sigterm()
    with failures(f"The same command goes on with what {json_path} holds." if json_path else ""):
        from vllm_sparse_backend.measure import asking as part
        from vllm_sparse_backend.measure.contestants import asked_for
        from vllm_sparse_backend.measure.server import device_name

        asking = part.Asking.about(text, token_counts("--lengths", lengths), count, facts)
        if model is not None:
            asking.require_room(model)
        contestants = asked_for(
            model, settings or (), levels_of(level), url or (), label or (), asking.longest + 1, server_args
        )
        report = Report("answers", ", ".join(url or ()) or device_name(), json_path)
        _ask(contestants, asking, asking.key(contestants[0].model, server_args), report, concurrency)
        rows = part.summaries(report.cases, [one.label for one in contestants], asking.lengths)
        report.write(summary=rows)
    _show(rows, report.cases)


def _ask(contestants: Sequence["Contestant"], asking: "Asking", key: str, report: Report, concurrency: int) -> None:
    """What the report's file does not hold yet, under a bar."""
    from vllm_sparse_backend.measure.asking import right_answers
    from vllm_sparse_backend.measure.contestants import ask_all, held, resume

    resume(report, report.json_path, key, contestants)
    with bar("prompts") as shown:
        shown.begin("prompts", len(contestants) * len(asking.wanted), held(report.cases, contestants, asking))

        def tell(case: dict[str, Any]) -> None:
            if case["part"] != "prompt":
                return
            shown.step()
            said = f"failed: {case['error']}"
            if case["error"] is None:
                said = f"{sum(right_answers(case))} of {len(case['answers'])} right, {case['seconds']:.1f} s"
            shown.print(f"{case['label']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}: {said}")

        report.on_case = tell
        ask_all(contestants, asking, key, report, concurrency)


def _show(rows: list[dict[str, Any]], cases: Sequence[dict[str, Any]]) -> None:
    """A table, and what failed: a run with failures ends with 1."""
    from vllm_sparse_backend.measure import asking as part
    from vllm_sparse_backend.measure.contestants import failures

    console = wide_console()
    caption = (
        "right: all tokens of the answer rank first; perplexity: of all tokens but answers', change against the first's"
    )
    # A hundredth of a perplexity matters, and the three digits of tables are too few for that.
    told = [row | {"perplexity": row["perplexity"] and f"{row['perplexity']:.4f}"} for row in rows]
    for row in told:
        if row["perplexity_change"] is not None:
            row["perplexity_change"] = f"{row['perplexity_change']:+.2f}"
    console.print(table_of("Answers inside the prompt", part.COLUMNS, told, caption))
    for line in failures(cases):
        console.print(f"[red]{escape(line)}[/]", highlight=False, soft_wrap=True)
    if any(case.get("error") for case in cases):
        raise typer.Exit(1)
