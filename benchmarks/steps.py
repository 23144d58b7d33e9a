# SPDX-License-Identifier: Apache-2.0
"""Whether a running server holds what it announced at start-up: its arena's size, and that all kernels are compiled.

    python -m benchmarks.levels /tmp/varied.yaml --varied
    vllm serve /tmp/llama-8b-shape --load-format dummy --attention-backend sparse-prefill \\
        --additional-config '{"sparse_prefill": {"profile": "/tmp/varied.yaml"}}'
    python -m benchmarks.steps http://127.0.0.1:8000 --rows 256x32 --rows 64x128

First random steps: clients send prompts of all lengths, many over shared prefixes. Then many short rows over one long
cached document in one step: while the engine computes another prompt, all of them come in, and wait. Exit code 1 where
a request failed, the arena was too small, a kernel was compiled, or no row was sparse.
"""

import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.soak import Asking, Client
from vllm_sparse_backend.measure.endpoint import Endpoint, Prompts, RequestError
from vllm_sparse_backend.measure.report import Report
from vllm_sparse_backend.measure.scrape import parse
from vllm_sparse_backend.settings.metrics import PREFIX

MOST_S = 180.0
"""So long random steps may take."""


def steps_of(page: str) -> int:
    """How many steps the server's engines have made, by vLLM's own metrics."""
    return sum(
        int(float(n)) for n in re.findall(r"^vllm:iteration_tokens_total_count\{.*\} (\S+)$", page, re.MULTILINE)
    )


def gauge(page: str, name: str) -> float:
    """The largest value of one of our gauges over all workers; 0 where there is none."""
    return max((float(n) for n in re.findall(rf"^{PREFIX}{name}\{{.*\}} (\S+)$", page, re.MULTILINE)), default=0.0)


def random_steps(server: Endpoint, prompts: Prompts, steps: int, clients: int, longest: int) -> list[str]:
    """Requests of all lengths, some over shared prefixes, until so many steps were made; what went wrong."""
    asking = Asking(0.0, clients, 1, longest)
    prefixes = [prompts.take(longest) for _ in range(2)]
    errors: list[str] = []
    lock, is_over = threading.Lock(), threading.Event()

    def run(client: Client) -> None:
        while not is_over.is_set():
            with lock:
                request = client.next()
            try:
                server.ask(request.prompt, request.output_tokens)
            except RequestError as error:
                errors.append(f"{len(request.prompt)} tokens: {error}")

    threads = [threading.Thread(target=run, args=(Client(asking, prefixes, prompts, i),)) for i in range(clients)]
    before = steps_of(server.metrics())
    for thread in threads:
        thread.start()
    began = time.monotonic()
    while steps_of(server.metrics()) - before < steps and len(errors) < clients:
        if time.monotonic() - began > MOST_S:
            errors.append(f"{steps_of(server.metrics()) - before} steps in {MOST_S:.0f} s, expected {steps}")
            break
        time.sleep(0.5)
    is_over.set()
    for thread in threads:
        thread.join()
    return errors


def rows_over_document(
    server: Endpoint, prompts: Prompts, document: Sequence[int], rows: int, new_tokens: int, meanwhile: int
) -> list[str]:
    """So many requests at once, each of ``new_tokens`` after the cached document; what went wrong.

    meanwhile: tokens of the prompts that the engine computes while they come in.
    """
    errors: list[str] = []

    def ask(prompt: list[int]) -> None:
        try:
            server.ask(prompt, 2)
        except RequestError as error:
            errors.append(f"{rows} rows of {new_tokens} tokens: {error}")

    ask(list(document))
    others = [threading.Thread(target=ask, args=(prompts.take(len(document)),)) for _ in range(meanwhile)]
    own = [threading.Thread(target=ask, args=([*document, *prompts.take(new_tokens)],)) for _ in range(rows)]
    for thread in others:
        thread.start()
    time.sleep(0.5)  # they are to be first
    for thread in own:
        thread.start()
    for thread in [*others, *own]:
        thread.join()
    return errors


def main(
    url: Annotated[str, typer.Argument(help="The server's address.")],
    rows: Annotated[list[str] | None, typer.Option(help="ROWSxTOKENS over the document; may be repeated.")] = None,
    document: Annotated[int, typer.Option(help="Tokens of the cached document.")] = 131072,
    meanwhile: Annotated[int, typer.Option(help="Prompts as long that keep the engine busy meanwhile.")] = 1,
    steps: Annotated[int, typer.Option(help="Random steps.")] = 200,
    clients: Annotated[int, typer.Option(help="That send them.")] = 64,
    longest: Annotated[int, typer.Option(help="Tokens of the longest of their prompts.")] = 32768,
    text: Annotated[Path | None, typer.Option(help="Text file that prompts are taken from.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="File for all that was measured.")] = None,
    results: Annotated[Path | None, typer.Option(help="List of figures to merge this run's into.")] = None,
) -> None:
    from vllm_sparse_backend.measure.serve import device_name

    server = Endpoint.connect("server", url)
    prompts = Prompts.of(server, text.read_text() if text else None)
    report = Report("steps", device_name(server.url), json_path, results, f"python -m benchmarks.steps {url}")
    problems: list[str] = []

    def look(about: str, errors: Sequence[str], began: float) -> None:
        counted = parse(page := server.metrics())
        arena, peak = gauge(page, "arena_bytes"), gauge(page, "arena_peak_bytes")
        compiled = counted.compilations["serving"]
        case = {
            "about": about, "took_s": time.monotonic() - began, "errors": list(errors[:5]), "arena_bytes": arena,
            "arena_peak_bytes": peak, "overflows": counted.arena_overflows, "compiled": compiled,
            "steps": steps_of(page), "rows": {f"{path} {why}".strip(): n for (path, why), n in counted.rows.items()},
        }  # fmt: skip
        report.add_case(case)
        print(case, flush=True)
        name = f"a server of 1,024 different heads, {about}"
        report.add_figure(f"{name}: errors", len(errors), "requests", "lower")
        if arena:
            report.add_figure(f"{name}: peak of the arena, share of it", peak / arena, "share", "lower")
        report.add_figure(f"{name}: kernels compiled while serving", compiled, "kernels", "lower")
        problems.extend(errors[:5])
        sparse = counted.rows_of("sparse")
        if compiled or counted.arena_overflows or peak > arena or not sparse:
            problems.append(
                f"{about}: {peak:.0f} of the arena's {arena:.0f} bytes, {counted.arena_overflows} overflows, "
                f"{compiled} kernels compiled, {sparse} sparse rows"
            )

    began = time.monotonic()
    look(f"{steps} random steps", random_steps(server, prompts, steps, clients, longest), began)
    cached = prompts.take(document)
    for one in rows or ("256x32", "64x128"):
        number, _, tokens = one.partition("x")
        began = time.monotonic()
        errors = rows_over_document(server, prompts, cached, int(number), int(tokens), meanwhile)
        look(f"{number} rows of {tokens} tokens after {document:,} cached", errors, began)
    for problem in problems:
        print(problem, file=sys.stderr)
    raise typer.Exit(bool(problems))


if __name__ == "__main__":
    typer.run(main)
