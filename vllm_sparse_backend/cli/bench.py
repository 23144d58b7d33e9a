# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill bench`: speed on this machine, beside dense attention and stock vLLM."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vllm_sparse_backend.cli.common import (
    Json,
    Methods,
    Png,
    Profile,
    Results,
    bar,
    draw,
    failures,
    folder_for,
    say,
    shares,
    split,
    token_counts,
    wide_console,
)

if TYPE_CHECKING:
    from vllm_sparse_backend.measure.asked import Asked
    from vllm_sparse_backend.measure.card import Card
    from vllm_sparse_backend.measure.data import Heads
    from vllm_sparse_backend.settings.model_shape import ModelShape
    from vllm_sparse_backend.settings.plan import Plan

bench = typer.Typer(
    help="Measure speed on this machine, beside dense attention and stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Engines = Annotated[str | None, typer.Option("--engines", help="Engines by comma; by default all, each where it can.")]
Model = Annotated[Path | None, typer.Option(help="Model folder whose heads are measured, in place of an 8B model's.")]
Page = Annotated[int, typer.Option("--page-size", help="Tokens of a page of the cache.")]
CacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="auto, or fp8: of the cache, and of queries then, on H100 and H200.")
]
Contexts = Annotated[str, typer.Option(help="Cached tokens before the chunk, by comma.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a chunk, as --max-num-batched-tokens.")]


@bench.command()
def attend(
    contexts: Contexts = "24576,122880",
    chunk: Chunk = 8192,
    blocks: Annotated[str, typer.Option(help="Widths of blocks in keys, by comma.")] = "128,64,32",
    densities: Annotated[str, typer.Option(help="Shares of blocks to keep, by comma.")] = "1,0.5,0.2,0.08,0.03",
    stripes: Annotated[str, typer.Option(help="Single keys a tile, by comma; empty for none.")] = "1024,8192",
    engines: Engines = None,
    options: Annotated[bool, typer.Option("--options", help="Also 8-bit scores and skipped products.")] = False,
    model: Model = None,
    page_size: Page = 128,
    json_path: Json = None,
    results: Results = None,
    png: Png = None,
) -> None:
    """Attention over random indices: what a kept pair costs, beside FlashAttention on the same card."""
    with failures():
        from benchmarks import plots
        from benchmarks.attend import COLUMNS, cases_of, run_attend
        from vllm_sparse_backend.measure.report import Report

        cases = cases_of(
            token_counts("--contexts", contexts, least=0), chunk, token_counts("--blocks", blocks),
            shares("--densities", densities), token_counts("--stripes", stripes, or_none=True),
        )  # fmt: skip
        card, heads = _card(), _heads(model, page_size)
        chosen = _engines(engines, card)
        report = Report("attend", card.name, json_path, results)
        title = f"attend beside {card.dense_name}, {card.name}, {heads}"
        rows = run_attend(card, heads, cases, chosen, report, options)
        _show(title, COLUMNS, rows, len(cases) * len(chosen) * (4 if options else 1))
        plain = [case for case in report.cases if "option" not in case and not case["stripes"]]
        for case in plain:
            case["series"] = f"{case['engine']}, after {case['context_len']:,}, blocks of {case['block_tokens']}"
        draw(
            png,
            plots.Panel("attend", "density", f"times faster than {card.dense_name}",
                        plots.series_of(plain, "density", "times_faster", "series")),
            plots.Panel("a kept pair", "density", "efficiency",
                        plots.series_of(plain, "density", "efficiency", "series")),
        )  # fmt: skip


@bench.command()
def methods(
    method: Methods = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="A profile, bundled or a file; may be repeated. On a capture it is measured as it is, on structured "
            "data what most heads of each of its methods have."
        ),
    ] = None,
    captured: Annotated[
        Path | None, typer.Option(help="Folder of `bench capture`, in place of structured data.")
    ] = None,
    clusters: Annotated[
        Path | None, typer.Option(help="Another capture of the model, to find SharePrefill's clusters in.")
    ] = None,
    contexts: Contexts = "24576,122880",
    chunk: Chunk = 8192,
    layers: Annotated[int, typer.Option(help="Layers of structured data, each of its own.", min=1)] = 2,
    repeat_heads: Annotated[int, typer.Option(help="Heads that captured ones are repeated to.")] = 32,
    engines: Engines = None,
    model: Model = None,
    page_size: Page = 128,
    kv_cache_dtype: CacheDtype = "auto",
    json_path: Json = None,
    results: Results = None,
    png: Png = None,
) -> None:
    """Selection and attention of each method, beside FlashAttention: time, density, error of the output."""
    with failures():
        from benchmarks import plots
        from vllm_sparse_backend.measure import data
        from vllm_sparse_backend.measure.methods import COLUMNS, FP8_COLUMNS, run_methods
        from vllm_sparse_backend.measure.report import Report

        is_fp8 = _is_fp8(kv_cache_dtype)
        lengths = token_counts("--contexts", contexts, least=0)
        card, heads = _card(), _heads(model, page_size)
        if captured is not None:
            prompts, plans, name = _captured(captured, clusters, repeat_heads, method, profile or (), card)
        else:
            prompts = data.structured_prompts(heads, max(lengths) + chunk, layers, card.device)
            plans = [*_plans(method, profile or (), heads.model(layers), data.structured_clusters(heads, layers))]
            name = "structured"
        report, chosen = Report("methods", card.name, json_path, results), _engines(engines, card)
        unrounded, columns, dtype = (prompts, FP8_COLUMNS, " in fp8") if is_fp8 else ((), COLUMNS, "")
        given = [prompt.in_fp8() for prompt in prompts] if is_fp8 else prompts
        rows = run_methods(card, given, name + dtype, plans, lengths, chunk, chosen, report, unrounded=unrounded)
        title = f"methods beside {card.dense_name}, {card.name}, {name} data{dtype}, chunk of {chunk:,}"
        _show(title, columns, rows, len(plans) * len(lengths) * len(chosen))
        if name == "structured":
            _print_oracle(prompts[0])
        for case in report.cases:
            case["tokens"] = case["context_len"] + chunk
        faster = f"times faster than {card.dense_name}"
        by_length = plots.series_of(report.cases, "tokens", "times_faster", "method", "engine")
        by_density = plots.series_of(report.cases, "density", "times_faster", "method", "engine")
        draw(
            png,
            plots.Panel(f"{name} data", "tokens", faster, by_length),
            plots.Panel(f"{name} data", "density", faster, by_density),
        )


@bench.command()
def crossover(
    method: Methods = None,
    profile: Profile = None,
    table: Annotated[Path, typer.Option(help="Table to write, or to merge into.")] = Path("crossover.json"),
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt that is tried.")] = 131072,
    shortest: Annotated[int, typer.Option(help="Least tokens that min_tokens could be.")] = 2048,
    new_tokens: Annotated[str | None, typer.Option(help="New tokens after a cached prefix, by comma.")] = None,
    chunk: Chunk = 8192,
    margin: Annotated[float, typer.Option(help="How many times faster sparse must be.")] = 1.03,
    layers: Annotated[int, typer.Option(help="Layers that follow each other in a step.", min=1)] = 4,
    engines: Engines = None,
    model: Model = None,
    page_size: Page = 128,
    json_path: Json = None,
    png: Png = None,
) -> None:
    """From which lengths on each method is faster than dense attention here: the table that `auto` reads."""
    with failures():
        from benchmarks import plots
        from vllm_sparse_backend.measure import crossover as part
        from vllm_sparse_backend.measure import data
        from vllm_sparse_backend.measure.report import Report, table_of

        card, heads = _card(), _heads(model, page_size)
        chosen = _engines(engines, card)
        kept = [profile] if profile else []
        plans = _plans(method, kept, heads.model(layers), data.structured_clusters(heads, layers))
        prompts = data.structured_prompts(heads, longest, layers, card.device)
        rungs = part.ladder(shortest, longest)
        by_default = [n for n in part.NEW_TOKENS if n <= chunk and n < longest]
        asked = token_counts("--new-tokens", new_tokens) if new_tokens else by_default
        report = Report("crossover", card.name, json_path)
        entries: list[dict[str, Any]] = []

        def rows() -> Iterator[dict[str, Any]]:
            for row in part.run_crossover(card, heads, prompts, plans, chosen, rungs, asked, chunk, report, margin):
                if "entry" in row:
                    entries.append(row["entry"])
                    part.merge_entries(table, entries)
                    row = {"method": row["entry"]["method"], "engine": row["entry"]["engine"]} | {
                        "problem": f"min_tokens {row['entry']['min_tokens']}, "
                        f"min_query_tokens {row['entry']['min_query_tokens']}"
                    }
                yield row

        _show(f"crossover, {card.name}, {heads}", part.COLUMNS, rows(), None)
        wide_console().print(table_of(f"in {table}; empty: never faster", part.ENTRY_COLUMNS, entries))
        faster = f"times faster than {card.dense_name}"
        ladders = ("min_tokens", "min_query_tokens")
        of = {name: [case for case in report.cases if case["ladder"] == name] for name in ladders}
        by_length = plots.series_of(of["min_tokens"], "context_len", "times_faster", "method", "engine")
        by_new = plots.series_of(of["min_query_tokens"], "query_len", "times_faster", "method", "engine")
        draw(
            png,
            plots.Panel("half a chunk after so many tokens", "tokens", faster, by_length),
            plots.Panel(f"{longest:,} tokens in all", "tokens that are new", faster, by_new),
        )


@bench.command()
def capture(
    model: Annotated[Path, typer.Argument(help="Folder of a model in Hugging Face's format.")],
    folder: Annotated[Path, typer.Argument(help="Where the capture is written.")],
    tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=1)] = 32768,
    text: Annotated[
        Path | None, typer.Option(help="Text file, or folder of *.py; vLLM's sources unless given.")
    ] = None,
    skip: Annotated[int, typer.Option(help="Tokens of the text to leave out before the prompt.", min=0)] = 0,
) -> None:
    """Write down queries, keys and values of a model on a text, for `bench methods --captured`."""
    with failures():
        from vllm_sparse_backend.measure.server import has_cuda
        from vllm_sparse_backend.profiling.capture import capture as run
        from vllm_sparse_backend.profiling.capture import default_text, read_tokens, require_model, text_files

        require_model(model, tokens)
        folder_for("FOLDER", folder)
        ids = read_tokens(model, text_files(text or default_text()), tokens, skip=skip)
        captured = run(model, ids, folder, "cuda" if has_cuda() else "cpu")
        layers = f"{len(captured.scales)} layers" + (f", left out: {captured.left_out}" if captured.left_out else "")
        say(f"{captured.num_tokens:,} tokens of {captured.model} in {folder}: {layers}")


def _card() -> "Card":
    from vllm_sparse_backend.measure.card import Card

    return Card()


def _heads(model: Path | None, page_size: int) -> "Heads":
    from vllm_sparse_backend.measure.data import Heads
    from vllm_sparse_backend.settings.model_shape import ModelShape

    if model is None:
        return Heads(page_tokens=page_size)
    shape = ModelShape.from_folder(model)
    return Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, page_size)


def _engines(given: str | None, card: "Card") -> list[str]:
    from vllm_sparse_backend.measure.report import BenchError
    from vllm_sparse_backend.settings.errors import not_one_of

    names = split(given) if given else list(card.engines)
    if unknown := [name for name in names if name not in card.engines]:
        raise BenchError(f"--engines: {not_one_of(unknown[0], card.engines)}")
    return names


def _is_fp8(given: str) -> bool:
    from vllm_sparse_backend.measure.report import BenchError
    from vllm_sparse_backend.settings.errors import not_one_of

    if given not in (known := ("auto", "fp8")):
        raise BenchError(f"--kv-cache-dtype: {not_one_of(given, known)}")
    return given == "fp8"


def _plans(
    texts: Sequence[str] | None, profiles: Sequence[str], shape: "ModelShape", clusters: tuple[tuple[int, ...], ...]
) -> list[tuple["Asked", "Plan"]]:
    from vllm_sparse_backend.measure.asked import methods_asked

    return [(asked, asked.plan(shape, clusters)) for asked in methods_asked(texts or (), profiles, shape)]


def _captured(
    folder: Path,
    others: Path | None,
    num_heads: int,
    texts: Sequence[str] | None,
    profiles: Sequence[str],
    card: "Card",
) -> tuple[list[Any], list[tuple["Asked | str", "Plan"]], str]:
    """(prompts by layer, plans for their heads, name of the model)."""
    from dataclasses import replace

    from vllm_sparse_backend.measure import data
    from vllm_sparse_backend.measure.asked import methods_asked, plan_of_profile
    from vllm_sparse_backend.profiling.capture import Capture
    from vllm_sparse_backend.profiling.clusters import head_clusters
    from vllm_sparse_backend.settings.profile import name_of_profile
    from vllm_sparse_kernels.methods.share_prefill.method import NOISE

    found = Capture.open(folder)
    copies = max(1, num_heads // found.shape.num_heads)
    shape = replace(
        found.shape, num_layers=len(found.scales), num_heads=found.shape.num_heads * copies,
        num_kv_heads=found.shape.num_kv_heads * copies,
    )  # fmt: skip
    asked, clusters = methods_asked(texts or (), (), shape) if texts or not profiles else [], None
    if any(one.method == "share_prefill" for one in asked):
        by_layer = head_clusters(Capture.open(others) if others else found, str(card.device))
        clusters = data.repeated_clusters([by_layer[layer] for layer in sorted(found.scales)], copies, NOISE)
    plans: list[tuple[Asked | str, Plan]] = [(one, one.plan(shape, clusters)) for one in asked]
    layers = sorted(found.scales)  # others are not in the capture
    plans += [
        (f"profile {name_of_profile(name)}", plan_of_profile(name, found.shape, copies, layers)) for name in profiles
    ]
    return data.captured_prompts(found, copies, card.device), plans, found.model


def _show(title: str, columns: Mapping[str, str], rows: Iterable[dict[str, Any]], total: int | None) -> None:
    """A line as each case comes, a bar meanwhile, a table at the end."""
    from vllm_sparse_backend.measure.report import cell, table_of

    shown = []
    with bar(title.split(",")[0], total) as (console, advance):
        for row in rows:
            shown.append(row)
            advance()
            told = [f"{heading} {cell(row[key])}" for key, heading in columns.items() if row.get(key) is not None]
            console.print(escape(", ".join(told)), highlight=False, soft_wrap=True)
    wide_console().print(table_of(title, columns, shown))


def _print_oracle(prompt: Any) -> None:
    from vllm_sparse_backend.measure.structured import Structured, oracle_density

    batch = prompt.whole
    k, v = batch.cache.gather(batch.rows.block_table[0], prompt.num_tokens)
    density = oracle_density(Structured(batch.q, k, v, 0, ()))
    spread = ", ".join(f"{q:g}: {float(density.quantile(q)):.4f}" for q in (0.1, 0.5, 0.9, 1.0))
    say(f"95 % of the mass could be held at a density of {float(density.mean()):.3f} (heads' quantiles {spread})")
