# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill eval`: what sparse prefill loses, seen through servers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vllm_sparse_backend.cli.common import (
    Json,
    Methods,
    Profile,
    Results,
    bar,
    device_of,
    exit_on_sigterm,
    failures,
    level_of,
    output,
    refuse_without_model,
    token_counts,
    wide_console,
)

if TYPE_CHECKING:
    from benchmarks.page import Page
    from vllm_sparse_backend.measure.answers import Templates
    from vllm_sparse_backend.measure.contestants import Contestant, Job
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


Url = Annotated[list[str] | None, typer.Option(help="A running server; may be repeated, the first is compared to.")]
Label = Annotated[list[str] | None, typer.Option(help="Name of what runs at each --url, in their order.")]
ServedModel = Annotated[Path | None, typer.Argument(help="Model to serve; not needed where servers run.")]
SparseSettings = Annotated[
    list[str] | None,
    typer.Option(help="The sparse_prefill object as JSON, or a profile; may be repeated. By default nothing is set."),
]
Levels = Annotated[
    list[str] | None,
    typer.Option("--level", help="Level that requests ask servers with this backend for; may be repeated."),
]
NoStock = Annotated[bool, typer.Option("--no-stock", help="Leave stock vLLM out.")]
Lengths = Annotated[str, typer.Option(help="Tokens of a prompt, by comma.")]
Fact = Annotated[str | None, typer.Option(help="Line that states a fact, with {name} and {value}.")]
QuestionLine = Annotated[str | None, typer.Option(help="Line that asks for it and answers, with both.")]
FirstToken = Annotated[
    str | None, typer.Option(help="Text of the token that starts prompts, '' for none; by default the model's bos.")
]
Concurrency = Annotated[
    int, typer.Option(help="Requests at a time; with more than one, chunks may differ from server to server.", min=1)
]
Jobs = Annotated[
    int, typer.Option(help="Servers at a time; on a card each gets its share of the memory, unless told.", min=1)
]
ServerArgs = Annotated[str, typer.Option(help="More arguments for all servers, as one text.")]
Html = Annotated[
    Path | None,
    typer.Option(help="Page to write, with tables and drawings, that needs nothing else.", callback=output),
]


@evaluate.command()
def answers(
    model: ServedModel = None,
    settings: SparseSettings = None,
    level: Levels = None,
    no_stock: NoStock = False,
    url: Url = None,
    label: Label = None,
    lengths: Lengths = "8192",
    prompts: Annotated[int, typer.Option(help="Prompts of each length.", min=1)] = 4,
    facts: Annotated[int, typer.Option(help="Facts in a prompt, each asked for once.", min=1, max=1000)] = 24,
    seed: Annotated[int, typer.Option(help="Of facts and places.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="Text file, or folder of *.py and *.md; simple prose unless given.")
    ] = None,
    fact: Fact = None,
    question: QuestionLine = None,
    first_token: FirstToken = None,
    concurrency: Concurrency = 1,
    jobs: Jobs = 1,
    server_args: ServerArgs = "",
    json_path: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Questions whose answers the prompt itself holds: which of them a prefill makes the model's first choice.

    Facts are spread over a text and asked for, with their answers, further on in the same prompt. An answer is right if
    each of its tokens has rank 1 in vLLM's prompt_logprobs. Questions at a prompt's end are answered by decoding, which
    is dense, and hide what prefill lost. Prompts are the same for all servers and begin apart, and vLLM takes nothing
    from its prefix cache for such requests. With --json FILE of an earlier run, what that holds is not asked again.
    """
    exit_on_sigterm()
    with failures():
        from benchmarks import pages
        from vllm_sparse_backend.measure import asking as part

        asking = part.Asking.about(
            text, token_counts("--lengths", lengths), prompts, facts=facts, seed=seed, first_token=first_token,
            templates=_templates(fact, question),
        )  # fmt: skip
        contestants, report = _contestants("answers", model, settings, level, no_stock, url, label, asking.longest,
                                           server_args, jobs, concurrency, json_path, results)  # fmt: skip
        _ask(contestants, asking, asking.key(contestants[0].model, server_args), report, concurrency, jobs, _answered)
        rows = part.summaries(report.cases, [one.label for one in contestants], asking.lengths)
        part.add_figures(report, rows, contestants[0].model)
        _show_answers(rows)
        _finish(report, html, lambda: pages.answers_page(contestants[0].model, rows, report))


@evaluate.command()
def tasks(
    model: ServedModel = None,
    settings: SparseSettings = None,
    level: Levels = None,
    no_stock: NoStock = False,
    url: Url = None,
    label: Label = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks, or families of them, by comma: needles, ruler, key_value, perplexity.")
    ] = "needles,ruler,key_value,perplexity",
    lengths: Lengths = "8192",
    prompts: Annotated[int, typer.Option(help="Prompts of each task and length.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text file, or folder of *.py and *.md, to hide things in, and whose perplexity is measured."
        ),
    ] = None,
    fact: Fact = None,
    question: QuestionLine = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user in a chat, by the model's own template.")] = False,
    first_token: FirstToken = None,
    concurrency: Concurrency = 1,
    jobs: Jobs = 1,
    server_args: ServerArgs = "",
    json_path: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Tasks over long prompts, answered greedily: needles by depth, RULER's, key-value retrieval; and perplexity.

    Prompts are the same for all servers, and as long as --lengths says with their answers. Any OpenAI-compatible server
    can be asked, but for perplexity, which needs vLLM's prompt_logprobs. A request that fails is reported, and never
    counted. With --json FILE of an earlier run, what that holds is not asked again.
    """
    exit_on_sigterm()
    with failures():
        from benchmarks import pages
        from benchmarks.tasks import job as part

        job = part.TaskJob.about(
            tasks, token_counts("--lengths", lengths), prompts, text,
            seed=seed, templates=_templates(fact, question), chat=chat, first_token=first_token,
        )  # fmt: skip
        contestants, report = _contestants("tasks", model, settings, level, no_stock, url, label, job.longest,
                                           server_args, jobs, concurrency, json_path, results)  # fmt: skip
        _ask(contestants, job, job.key(contestants[0].model, server_args), report, concurrency, jobs, _task_answered)
        labels, name = [one.label for one in contestants], contestants[0].model
        rows, perplexities = part.summaries(report.cases, labels), part.perplexities(report.cases, labels)
        part.add_figures(report, rows, perplexities, name)
        _show_tasks(rows, perplexities)
        _finish(report, html, lambda: pages.tasks_page(name, labels, rows, perplexities, report))


@evaluate.command()
def attention(
    captured: Annotated[list[Path], typer.Argument(help="Folders of `bench capture`.")],
    method: Methods = None,
    profile: Profile = None,
    chunks: Annotated[
        str, typer.Option(help="Tokens of a step, as --max-num-batched-tokens, by comma; 0 for the whole prompt.")
    ] = "8192",
    clusters: Annotated[
        Path | None, typer.Option(help="Another capture of the model, to find SharePrefill's clusters in.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also the curve of each method's main parameter.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda, or cpu, where references select, slowly.")] = None,
    json_path: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """What methods keep of a model's own attention: recall, down to single queries, density, error of the output.

    Methods select on captured queries and keys as the server does, chunk by chunk, and are held against exact
    attention, layer by layer: errors of earlier layers do not add up here.
    """
    with failures():
        import torch

        from benchmarks import attention as part
        from benchmarks.attention_page import attention_page
        from vllm_sparse_backend.measure.asked import methods_asked
        from vllm_sparse_backend.measure.report import Report
        from vllm_sparse_backend.profiling.capture import Capture
        from vllm_sparse_backend.profiling.clusters import head_clusters

        device = device_of(device)
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
        sizes = token_counts("--chunks", chunks, least=0)
        report = Report("attention", name, json_path, results)
        for found in [Capture.open(folder) for folder in captured]:
            named = [profile] if profile else []
            asked = [part.Setting(a.method, dict(a.params)) for a in methods_asked(method or (), named, found.shape)]
            by_layer = None
            if any(one.method == "share_prefill" for one in asked):
                by_layer = head_clusters(Capture.open(clusters) if clusters else found, device)
            for size in dict.fromkeys(size or found.num_tokens for size in sizes):
                with bar("layers", len(found.scales)) as (_, advance):
                    settings = part.swept(asked) if sweep else asked
                    figures = part.measure(found, settings, by_layer, size, device, queries=True, on_layer=advance)
                report.add_case(figures)
                part.add_figures(figures, report)
                _show_attention(figures)
        _show_chunks(report.cases)
        _finish(report, html, lambda: attention_page(report))


def _templates(fact: str | None, question: str | None) -> "Templates":
    from vllm_sparse_backend.measure.answers import Templates

    default = Templates()
    return Templates(fact or default.fact, question or default.question)


def _contestants(
    name: str,
    model: Path | None,
    settings: list[str] | None,
    level: list[str] | None,
    no_stock: bool,
    url: list[str] | None,
    label: list[str] | None,
    longest: int,
    server_args: str,
    jobs: int,
    concurrency: int,
    json_path: Path | None,
    results: Path | None,
) -> tuple[list["Contestant"], "Report"]:
    """Who is asked, and what is written of it."""
    from vllm_sparse_backend.measure.contestants import Contestant, started
    from vllm_sparse_backend.measure.report import BenchError, Report
    from vllm_sparse_backend.measure.serve import Settings, device_name

    if (model is None) == (not url):
        raise BenchError(f"eval {name}: expected a MODEL to serve, or --url of running servers")
    if model is None:
        refuse_without_model({"--settings": settings, "--no-stock": no_stock, "--server-args": server_args})
    if label and len(label) != len(url or ()):
        raise BenchError(f"--label: given {len(label)}, expected one for each of {len(url or ())} --url")
    levels = [level_of(one) for one in level or ()]
    if model is not None:
        chosen = [Settings.parse(one, model=model) for one in settings or ["{}"]]
        served = started(model, chosen, not no_stock, longest, server_args, jobs, concurrency, levels)
        return served, Report(name, device_name(), json_path, results)
    names: list[str | None] = list(label) if label else [None] * len(url or ())
    running = [one for name, at in zip(names, url or ()) for one in Contestant.running(name, at, levels)]
    return running, Report(name, ", ".join(url or ()), json_path, results)


def _ask(
    contestants: Sequence["Contestant"],
    job: "Job",
    key: str,
    report: "Report",
    concurrency: int,
    jobs: int,
    answered: Callable[[dict[str, Any]], str],
) -> None:
    """What the report's file does not hold yet, under a bar; ``answered`` says what came of a request."""
    from vllm_sparse_backend.measure.contestants import ask_all, resume

    resume(report, report.json_path, key, contestants)
    wanted, labels = set(job.wanted), {one.label for one in contestants}
    held = sum(
        case["label"] in labels and tuple(case.get(name) for name in job.fields) in wanted for case in report.cases
    )
    with bar("prompts", len(contestants) * len(wanted), held) as (console, advance):

        def tell(case: dict[str, Any]) -> None:
            advance()
            said = answered(case) if case["error"] is None else f"failed: {case['error']}"
            what = f"{case['task']}, " if "task" in case else ""
            line = f"{case['label']}, {what}{case['tokens']:,} tokens, prompt {case['prompt'] + 1}: {said}"
            console.print(escape(line), highlight=False, soft_wrap=True)

        ask_all(contestants, job, key, report, concurrency, tell, jobs)


def _answered(case: dict[str, Any]) -> str:
    from vllm_sparse_backend.measure.asking import right_answers

    return f"{sum(right_answers(case))} of {len(case['answers'])} right, {case['seconds']:.1f} s"


def _task_answered(case: dict[str, Any]) -> str:
    if "found" in case:
        return f"{sum(case['found'])} of {len(case['found'])} found, {case['seconds']:.1f} s"
    return f"{sum(place[3] for place in case['positions']):,} tokens' likelihood, {case['seconds']:.1f} s"


def _finish(report: "Report", html: Path | None, page: Callable[[], "Page"]) -> None:
    """The page, and what failed: a run with failures ends with 1."""
    from benchmarks.pages import failures

    console = wide_console()
    if html is not None:
        page().write(html)
        console.print(f"Written to {html}", highlight=False, soft_wrap=True)
    for line in failures(report.cases):
        console.print(f"[red]{escape(line)}[/]", highlight=False, soft_wrap=True)
    if any(case.get("error") for case in report.cases):
        raise typer.Exit(1)


def _fine(value: float | None) -> str | None:
    """A hundredth of a perplexity matters, and the three digits of tables are too few for that."""
    return None if value is None else f"{value:.4f}"


def _show_answers(rows: list[dict[str, Any]]) -> None:
    from vllm_sparse_backend.measure import asking as part
    from vllm_sparse_backend.measure.report import table_of

    console = wide_console()
    caption = "right: all tokens of the answer rank first; perplexity: of all tokens but answers'"
    told = [row | {"perplexity": _fine(row["perplexity"])} for row in rows]
    console.print(table_of("Answers inside the prompt", part.COLUMNS, told, caption))
    columns, by_distance = part.distance_columns(rows)
    console.print(table_of("Right answers by distance from the fact, in tokens", columns, by_distance))


def _show_tasks(rows: list[dict[str, Any]], perplexities: list[dict[str, Any]]) -> None:
    from benchmarks.tasks import job as part
    from vllm_sparse_backend.measure.report import table_of

    console = wide_console()
    if rows:
        caption = "found: texts that the answers should hold and do; less the first's: on prompts that both answered"
        console.print(table_of("Tasks", part.COLUMNS, rows, caption))
    if perplexities:
        told = [row | {key: _fine(row[key]) for key in ("perplexity", "of_first")} for row in perplexities]
        console.print(table_of("Perplexity", part.PERPLEXITY_COLUMNS, told))


def _show_attention(figures: dict[str, Any]) -> None:
    from benchmarks import attention as part
    from vllm_sparse_backend.measure.report import table_of

    console, rows = wide_console(), part.table_rows(figures)
    title = f"{figures['model']}, {part.length_name(figures)}"
    if rows:
        caption = f"{part.EXPLAINED} {part.QUERIES_EXPLAINED}"
        console.print(table_of(title, {name: name for name in rows[0]}, rows, caption))
    for name, why in figures["methods_left_out"].items():
        console.print(f"[red]{escape(name)} left out[/]: {escape(why)}", highlight=False, soft_wrap=True)


def _show_chunks(all_figures: Sequence[dict[str, Any]]) -> None:
    from benchmarks import attention as part
    from vllm_sparse_backend.measure.report import table_of

    for title, rows in part.chunk_tables(all_figures).items():
        wide_console().print(table_of(title, {name: name for name in rows[0]}, rows))
