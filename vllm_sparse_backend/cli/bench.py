# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill bench`: speed on this machine, beside dense attention and stock vLLM."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

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
    say,
    split,
    text_of,
    token_counts,
    wide_console,
)

bench = typer.Typer(
    help="Measure speed on this machine, beside dense attention and stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@bench.command()
def serve(
    model: ServedModel = None,
    settings: SparseSettings = None,
    level: Level = None,
    stock_url: Annotated[str | None, typer.Option(help="A running stock server.")] = None,
    url: Annotated[str | None, typer.Option(help="A running server with this backend.")] = None,
    label: Annotated[str | None, typer.Option(help="Name of what is compared.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens of prompts, by comma; 1K to 131K, '' for none.")] = None,
    cached: Annotated[int, typer.Option(help="Tokens of a cached prefix for --new; 0 for none.", min=0)] = 0,
    new: Annotated[str, typer.Option(help="Tokens after the cached prefix, by comma.")] = "20,200,1000",
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Most requests a length; long ones get fewer.", min=1)] = 21,
    requests: Annotated[int | None, typer.Option(help="Requests of the mixed load, 0 for none; 48.", min=0)] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second; 1.3 times what stock takes.")] = None,
    clients: Annotated[
        int | None, typer.Option(help="In place of --rate: clients that wait for answers.", min=1)
    ] = None,
    short: Annotated[str, typer.Option(help="Tokens of the load's short prompts.")] = "1024,2048,4096",
    long: Annotated[str | None, typer.Option(help="Tokens of its long prompts; 32K to 131K.")] = None,
    text: Text = None,
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens that each server's cache holds.", min=1)] = None,
    server_args: ServerArgs = "",
    apart: Annotated[bool, typer.Option("--apart", help="One server at a time; no mixed load.")] = False,
    json_path: Json = None,
) -> None:
    """TTFT and TPOT of stock vLLM and this backend, asked in turn, and both under a mixed load.

    The load is sent by `vllm bench serve`. Exit code 1 if a request fails: it is reported, and never counted.
    """
    exit_on_sigterm()
    with failures():
        from vllm_sparse_backend.measure import serve as part
        from vllm_sparse_backend.measure.client import Endpoint
        from vllm_sparse_backend.measure.latency import Length
        from vllm_sparse_backend.measure.report import Report
        from vllm_sparse_backend.measure.server import Settings, device_name, server_args as arguments, split_args

        _check_servers(model, stock_url, url, settings, label, kv_tokens, server_args, apart, requests)
        fitting = part.fitting(model, output_tokens)
        asked = [Length(n) for n in (fitting if lengths is None else token_counts("--lengths", lengths, or_none=True))]
        asked += [Length(n, cached) for n in (token_counts("--new", new) if cached else ())]
        longs = [n for n in fitting if n >= part.LONG_TOKENS] if long is None else token_counts("--long", long)
        mix, why_none = part.mix_of(requests, rate, clients, token_counts("--short", short), longs, output_tokens)
        if why_none:
            say(why_none)
        levels = [level_of(one) for one in level or ()]
        asking = part.Asking(tuple(asked), output_tokens, repeats, mix, text_of(text))
        report = Report("serve", device_name(*(one for one in (stock_url, url) if one)), json_path)
        report.on_case = _print_case
        if model is not None:
            ours = [Settings.parse(one, label, model) for one in settings or ["{}"]]
            args = arguments(model, asking.longest + 16, kv_tokens, split_args(server_args))
            servers = part.Servers(model, ours, levels, args)
            (servers.apart if apart else servers.side_by_side)(asking, report)
        else:
            stock, server = Endpoint.connect("stock", stock_url or ""), Endpoint.connect("ours", url or "")
            part.compare(stock, part.of_levels(server, label, levels), asking, report)
        _show_serve(report.cases)


def _check_servers(
    model: Path | None,
    stock_url: str | None,
    url: str | None,
    settings: Sequence[str] | None,
    label: str | None,
    kv_tokens: int | None,
    server_args: str,
    apart: bool,
    requests: int | None,
) -> None:
    """Whether options fit together. Raises BenchError."""
    from vllm_sparse_backend.measure.report import BenchError

    running = stock_url is not None or url is not None
    if running == (model is not None) or (running and None in (stock_url, url)):
        raise BenchError("bench serve: expected a MODEL to serve, or both --stock-url and --url of running servers")
    if running:
        refuse_without_model({"--settings": settings, "--kv-tokens": kv_tokens, "--server-args": server_args})
    if label and len(settings or ()) > 1:
        raise BenchError(f"--label: given {label!r} with {len(settings or ())} --settings, expected one")
    if apart and (running or requests != 0):
        raise BenchError("--apart: given with running servers or a mixed load, expected a MODEL and --requests 0")


def _print_case(case: Mapping[str, Any]) -> None:
    from vllm_sparse_backend.measure.report import cell

    hidden = {"answers", "requests", "said", "part", "kept_pairs", "causal_pairs"}
    say(", ".join(f"{key} {cell(value)}" for key, value in case.items() if key not in hidden and value is not None))


def _show_serve(cases: Sequence[dict[str, Any]]) -> None:
    """Tables, and what failed: a run with failures ends with 1."""
    from vllm_sparse_backend.measure import latency, load
    from vllm_sparse_backend.measure.report import table_of

    console = wide_console()
    for name in dict.fromkeys(case["label"] for case in cases):
        of = {part: [c for c in cases if (c["label"], c["part"]) == (name, part)] for part in ("latency", "load")}
        console.print(table_of(f"{name}: one request at a time", latency.COLUMNS, of["latency"]))
        for mixed in of["load"][:1]:
            caption = f"{mixed['rate']:.2f} requests a second arrive on average" if "rate" in mixed else (
                f"{mixed['clients']} clients, each of which sends the next request when its last one is answered"
            )  # fmt: skip
            console.print(table_of(f"{name}: mixed load", load.COLUMNS, of["load"], caption))
    for case in cases:
        for said in case.get("said", ()):
            console.print(f"[red]failed[/] {case['label']}, {case.get('case', case.get('server'))}: {escape(said)}")
    if any(case.get("failures") for case in cases):
        raise typer.Exit(1)


@bench.command()
def crossover(
    method: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME:FIELD=VALUE,…; may be repeated. All, and the default.")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Profile whose methods are measured.")] = None,
    table: Annotated[Path, typer.Option(help="Table to write, or to merge into.")] = Path("crossover.json"),
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt that is tried.")] = 131072,
    shortest: Annotated[int, typer.Option(help="Least tokens that min_tokens could be.")] = 2048,
    new: Annotated[str | None, typer.Option(help="Tokens after a cached prefix, by comma.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk, as --max-num-batched-tokens.")] = 8192,
    margin: Annotated[float, typer.Option(help="How many times faster sparse must be.")] = 1.03,
    layers: Annotated[int, typer.Option(help="Layers that follow each other in a step.", min=1)] = 4,
    engines: Annotated[str | None, typer.Option(help="Engines by comma; all, each where it can.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model folder whose heads are measured; an 8B model's.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page of the cache.")] = 128,
    json_path: Json = None,
) -> None:
    """From which lengths on each method is faster than dense attention here: the table that `auto` reads.

    Needs a GPU that vLLM has FlashAttention for. Nothing is timed before its result was held against exact attention.
    """
    with failures():
        from vllm_sparse_backend.measure import crossover as part
        from vllm_sparse_backend.measure.card import Card
        from vllm_sparse_backend.measure.data import Heads
        from vllm_sparse_backend.measure.report import Report, table_of

        card, heads = Card(), Heads.of(model, page_size)
        asked = part.Asking(
            card.engines_named(split(engines or "")), shortest, longest, chunk, margin, layers,
            token_counts("--new", new) if new else None,
        )  # fmt: skip
        report = Report("crossover", card.name, json_path)
        rows = part.run(card, heads, method or (), [profile] if profile else [], asked, table, report)
        show(f"crossover, {card.name}, {heads}", part.COLUMNS, rows)
        entries = [case["entry"] for case in report.cases if "entry" in case]
        wide_console().print(table_of(f"in {table}; empty: never faster", part.ENTRY_COLUMNS, entries))


def show(title: str, columns: Mapping[str, str], rows: Iterable[dict[str, Any]]) -> None:
    """A line as each case comes, a bar meanwhile, a table at the end."""
    from vllm_sparse_backend.measure.report import cell, table_of

    shown = []
    with bar(title.split(",")[0], None) as (console, advance):
        for row in rows:
            shown.append(row)
            advance()
            told = [f"{heading} {cell(row[key])}" for key, heading in columns.items() if row.get(key) is not None]
            console.print(escape(", ".join(told)), highlight=False, soft_wrap=True)
    wide_console().print(table_of(title, columns, shown))
