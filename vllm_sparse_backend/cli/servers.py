# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill bench serve` and `soak`: whole servers, beside stock vLLM's and under many clients."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vllm_sparse_backend.cli.common import (
    Json,
    Png,
    Results,
    draw,
    exit_on_sigterm,
    failures,
    level_of,
    refuse_without_model,
    say,
    split,
    text_of,
    token_counts,
    wide_console,
)

if TYPE_CHECKING:
    from vllm_sparse_backend.measure.load import Mix

REQUESTS = 48
"""Of the mixed load, by default."""
LONG_TOKENS = 32768
"""Those of its long prompts at least, by default."""


def serve(
    model: Annotated[Path | None, typer.Argument(help="Model to serve; not needed where servers run.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            help="The sparse_prefill object as JSON, or a profile; may be repeated. By default nothing is set."
        ),
    ] = None,
    stock_url: Annotated[str | None, typer.Option(help="A running stock server.")] = None,
    url: Annotated[str | None, typer.Option(help="A running server with this backend.")] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(help="Level that requests ask for, compared with stock by itself; may be repeated."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths of prompts, by comma; by default 1K to 131K, '' for none.")
    ] = None,
    cached: Annotated[int, typer.Option(help="Tokens of a cached prefix for --new; 0 for none.", min=0)] = 0,
    new: Annotated[str, typer.Option(help="New tokens after the cached prefix, by comma.")] = "20,200,1000",
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Most requests for each length; long ones get fewer.", min=1)] = 21,
    requests: Annotated[
        int | None,
        typer.Option(
            help=f"Requests of the mixed load, 0 for none; by default {REQUESTS}, if the model takes long prompts.",
            min=0,
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; by default 1.3 times what stock takes.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Send the load by so many clients, each when its last is answered.", min=1)
    ] = None,
    short: Annotated[str, typer.Option(help="Lengths of the load's short prompts.")] = "1024,2048,4096",
    long: Annotated[str | None, typer.Option(help="Lengths of its long prompts; by default 32K to 131K.")] = None,
    long_share: Annotated[float, typer.Option(help="Share of long prompts.", min=0.0, max=1.0)] = 0.25,
    text: Annotated[Path | None, typer.Option(help="Text file that prompts are taken from.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens that each server's cache has room for.", min=1)] = None,
    server_args: Annotated[str, typer.Option(help="More arguments for both servers, as one text.")] = "",
    apart: Annotated[
        bool, typer.Option("--apart", help="One server at a time, where a card has no room for two; no mixed load.")
    ] = False,
    label: Annotated[
        str | None, typer.Option(help="Name of what is compared, in place of what its settings say.")
    ] = None,
    json_path: Json = None,
    results: Results = None,
    png: Png = None,
) -> None:
    """Time to first token and per later token of stock vLLM and this backend, and both under a mixed load.

    Exit code 1 if a request fails: it is reported, and never counted.
    """
    exit_on_sigterm()
    with failures():
        from vllm_sparse_backend.measure import serve as part
        from vllm_sparse_backend.measure.endpoint import Endpoint
        from vllm_sparse_backend.measure.latency import Length
        from vllm_sparse_backend.measure.report import BenchError, Report

        running = stock_url is not None or url is not None
        if running == (model is not None) or (running and None in (stock_url, url)):
            raise BenchError("bench serve: expected a MODEL to serve, or both --stock-url and --url of running servers")
        if running:
            refuse_without_model({"--settings": settings, "--kv-tokens": kv_tokens, "--server-args": server_args})
        if label and len(settings or ()) > 1:
            raise BenchError(f"--label: given {label!r} with {len(settings or ())} --settings, expected one")
        if apart and (running or requests != 0):
            raise BenchError("--apart: given with running servers or a mixed load, expected a MODEL and --requests 0")
        fitting = part.fitting(part.LENGTHS, model, output_tokens) if model else list(part.LENGTHS)
        asked = [Length(n) for n in (fitting if lengths is None else token_counts("--lengths", lengths, or_none=True))]
        asked += [Length(n, cached) for n in (token_counts("--new", new) if cached else ())]
        longs = [n for n in fitting if n >= LONG_TOKENS] if long is None else token_counts("--long", long)
        mix = _mix(requests, rate, clients, token_counts("--short", short), longs, long_share, output_tokens)
        levels = [level_of(one) for one in level or ()]
        asking = part.Asking(tuple(asked), output_tokens, repeats, mix, rate, text_of(text))
        urls = [one for one in (stock_url, url) if one is not None]
        report = Report("serve", part.device_name(*urls), json_path, results)
        if model is not None:
            ours = [part.Settings.parse(one, label, model) for one in settings or ["{}"]]
            args = part.server_args(model, asking.longest + 16, kv_tokens, part.split_args(server_args))
            start = part.serve_apart if apart else part.serve_and_compare
            start(model, ours, levels, args, asking, report, _print_case)
        else:
            stock, server = Endpoint.connect("stock", stock_url or ""), Endpoint.connect("ours", url or "")
            part.compare(stock, part.of_levels(server, label, levels), asking, report, _print_case)
        _show_serve(report.cases, png)
        if any(case.get("failures") for case in report.cases):
            raise typer.Exit(1)


def _mix(
    requests: int | None,
    rate: float | None,
    clients: int | None,
    shorts: Sequence[int],
    longs: Sequence[int],
    long_share: float,
    output_tokens: int,
) -> "Mix | None":
    """The mixed load, if any. Raises BenchError where it was asked for, and cannot be."""
    from vllm_sparse_backend.measure.load import Mix
    from vllm_sparse_backend.measure.report import BenchError

    if rate is not None and not rate > 0:
        raise BenchError(f"--rate: given {rate:g}, expected a number above 0")
    if rate is not None and clients is not None:
        raise BenchError("--rate, --clients: given both, expected one: clients ask when their last request is answered")
    if requests == 0:
        if rate is not None or clients is not None:
            raise BenchError("--rate, --clients: given with --requests 0, expected a mixed load to send so")
        return None
    if not longs:
        why = f"the model has no positions for a prompt of {LONG_TOKENS:,} tokens and its answer"
        asked_for = {"--requests": requests, "--rate": rate, "--clients": clients}
        if given := [f"{name} {value}" for name, value in asked_for.items() if value is not None]:
            raise BenchError(f"{', '.join(given)}: {why}, expected --long with lengths that it has them for")
        say(f"No mixed load: {why}; --long says how long else its long prompts are")
        return None
    lengths = tuple(shorts), tuple(longs)
    return Mix(requests or REQUESTS, rate or 1.0, *lengths, long_share, output_tokens, clients=clients)


def soak(
    model: Annotated[Path | None, typer.Argument(help="Model to serve; not needed with --url.")] = None,
    url: Annotated[str | None, typer.Option(help="A running server with this backend.")] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            help="The sparse_prefill object as JSON, or a profile; with --url what the server was started with, for "
            "the audit of its counters, which is left out without."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="For how long requests are sent.", min=1.0)] = 600.0,
    clients: Annotated[int, typer.Option(help="Requests under way at a time.", min=1)] = 16,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompts.", min=1)] = 16,
    longest: Annotated[int, typer.Option(help="Tokens of the longest.", min=2)] = 131072,
    levels: Annotated[str, typer.Option(help="Levels that requests ask for, by comma; '' for none.")] = "0,1",
    aborts: Annotated[float, typer.Option(help="Share of requests that are broken off.", min=0.0, max=1.0)] = 0.1,
    chunk: Annotated[int, typer.Option(help="The server's --max-num-batched-tokens.", min=128)] = 8192,
    text: Annotated[Path | None, typer.Option(help="Text file that prompts are taken from.")] = None,
    server_args: Annotated[str, typer.Option(help="More arguments for the server, as one text.")] = "",
    seed: Annotated[int, typer.Option(help="Of lengths, levels and prefixes.")] = 0,
    json_path: Json = None,
    results: Results = None,
) -> None:
    """Many clients for a long time, then an audit of the counters.

    Exit code 1 if a request fails or has a log-probability that is no number, memory of the server or its devices grows
    by more than 3 %, a kernel is compiled, a tensor misses the arena, the guard trips, or counters do not fit what was
    sent.
    """
    exit_on_sigterm()
    with failures():
        from benchmarks import soak as soaking
        from vllm_sparse_backend.measure import serve as part
        from vllm_sparse_backend.measure.endpoint import Endpoint, Prompts
        from vllm_sparse_backend.measure.report import BenchError, Report
        from vllm_sparse_backend.measure.server import Server, sparse_args

        if (model is None) == (url is None) or shortest > longest:
            raise BenchError("bench soak: expected a MODEL to serve or --url, and --shortest at most --longest")
        if url is not None:
            refuse_without_model({"--server-args": server_args})
        asked = tuple(level_of(one) for one in split(levels))
        asking = soaking.Asking(seconds, clients, shortest, longest, (None, *asked), abort_share=aborts, seed=seed)
        report = Report("soak", part.device_name(*([url] if url else [])), json_path, results)
        own, given_text = part.Settings.parse(settings or "{}", model=model), text_of(text)
        with ExitStack() as stack:
            resident_bytes = None
            if model is not None:
                more = ("--max-num-batched-tokens", str(chunk), *part.split_args(server_args))
                args = part.server_args(model, longest + asking.most_output_tokens + 16, 2 * longest, more)
                server = stack.enter_context(Server(model, (*args, *sparse_args(own.values)), env=soaking.SERVER_ENV))
                resident_bytes = server.resident_bytes
            endpoint = Endpoint.connect("server", server.url if model else url or "")
            served = soaking.served_by(endpoint, own.values, model, chunk) if model or settings else None
            prompts = Prompts.of(endpoint, given_text)
            done = soaking.soak_and_check(endpoint, asking, prompts, resident_bytes, served)
        soaking.add_figures(report, asking, done, f"{Path(model or endpoint.model).name}, {own}")
        for line in soaking.lines(asking, done):
            wide_console().print(line, highlight=False)
        for problem in done.problems:
            wide_console().print(f"[red]{escape(problem)}[/]", highlight=False)
        if done.problems:
            raise typer.Exit(1)


def _show_serve(cases: Sequence[dict[str, Any]], png: Path | None) -> None:
    from benchmarks import plots
    from vllm_sparse_backend.measure import latency, load
    from vllm_sparse_backend.measure.report import table_of

    console = wide_console()
    for name in dict.fromkeys(case["label"] for case in cases):
        of = [case for case in cases if case["label"] == name]
        console.print(table_of(f"{name}: one request at a time", latency.COLUMNS, _part(of, "latency")))
        if mixed := _part(of, "load"):
            if (clients := mixed[0].get("clients")) is not None:
                caption = f"{clients} clients, each of which sends the next request when its last one is answered"
            else:
                rate = f"{mixed[0]['rate']:.2f} requests a second"
                caption = f"{rate} arrive on average, whether they are answered or not"
            console.print(table_of(f"{name}: mixed load", load.COLUMNS, mixed, caption))
    for case in cases:
        for said in case.get("said", ()):
            console.print(f"[red]failed[/] {case['label']}, {case.get('case', case.get('server'))}: {escape(said)}")
    whole = [case for case in _part(cases, "latency") if not case["cached_tokens"]]
    draw(png, plots.Panel("first token", "tokens", "times sooner than stock",
                           plots.series_of(whole, "new_tokens", "times_sooner", "label")))  # fmt: skip


def _part(cases: Iterable[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [case for case in cases if case["part"] == part]


def _print_case(case: Mapping[str, Any]) -> None:
    from vllm_sparse_backend.measure.report import cell

    hidden = {"answers", "requests", "said", "part", "kept_pairs", "causal_pairs"}
    told = [f"{key} {cell(value)}" for key, value in case.items() if key not in hidden and value is not None]
    say(", ".join(told))
