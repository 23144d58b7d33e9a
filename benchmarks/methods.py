"""Every method in a real server: a batch of prompts of different lengths, beside stock.

    python -m benchmarks.methods [--out docs/results/methods.json]

The server of `first_token`: a Llama-3.1-8B-shaped model with random weights, chunks of 8,192, CUDA graphs on. Servers
stand on the card two at a time and are asked in turn; the first of a run is stock FlashAttention-3. The batch's prompts
are sent at once, the shortest a moment before the next: they answer while the longest is still prefilled, so that steps
hold decodes, dense rows and sparse rows. A log-probability that is no number stops the run.

Random weights make attention nearly uniform. Methods that look at attention then keep far more than they do on a
trained model, and their times here show only that they run and what their densities cost.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.first_token import density, first_token_s, make_shape, serving
from benchmarks.results import Results
from vllm_sparse_backend.demo.model import VOCAB_SIZE
from vllm_sparse_backend.demo.server import Server, sparse_args

LONGEST = 131072
BATCH = (1000, 5000, 12288, LONGEST)
BETWEEN_S = 0.01
"""Between two prompts of the batch. Without it, threads race for who is scheduled first, and so for the order."""
BATCH_OUTPUT_TOKENS = 64
MIN_TOKENS = 4096
"""All of the batch but its shortest prompt run sparse."""

PARAMS: dict[str, dict[str, Any]] = {"share_prefill": {"cluster": 0}}
"""What cannot be left at its default: heads of one cluster, as random weights have none to be found."""

NAMES = "streaming,anchor_attention,sparge_attn,sale,share_prefill,minference,block_sparse,flex_vertical_slash,dense"


class Taken(NamedTuple):
    batch_s: tuple[float, ...]  # of each prompt of BATCH
    density: float | None


def prompt(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, VOCAB_SIZE) for _ in range(length)]


def ask(server: Server, is_stock: bool) -> Taken:
    """Time to first token of each prompt of the batch, all sent at once, after one prompt to warm up."""
    first_token_s(server, prompt(BATCH[-2], 1), 1)
    prompts, answers = [prompt(length, length) for length in BATCH], []
    with ThreadPoolExecutor(len(BATCH)) as pool:
        for one in prompts:
            answers.append(pool.submit(first_token_s, server, one, BATCH_OUTPUT_TOKENS))
            time.sleep(BETWEEN_S)
    return Taken(tuple(answer.result()[0] for answer in answers), None if is_stock else density(server))


def record(name: str, taken: Taken, stock: Taken, results: Results) -> None:
    for length, first in zip(BATCH, taken.batch_s, strict=True):
        about = f"{name}: first token after {length} tokens in a batch of {len(BATCH)}, random weights"
        results.add(about, first, "s", "lower")
    if taken.density is not None:
        beside = f"{name}: stock's first token after {LONGEST} in the same call, random weights"
        results.add(beside, stock.batch_s[-1], "s", "lower")
        sooner = stock.batch_s[-1] / taken.batch_s[-1]
        results.add(
            f"{name}: times sooner than stock after {LONGEST} in the batch, random weights", sooner, "ratio", "higher"
        )
        results.add(f"{name}: density over all sparse rows, random weights", taken.density, "share", "lower")


def show(taken: dict[str, Taken]) -> None:
    lengths = [f"{length} in the batch" for length in BATCH]
    table = Table("method", "density", *lengths, title="Seconds to the first token")
    for name, t in taken.items():
        times = (f"{seconds:.2f}" for seconds in t.batch_s)
        table.add_row(name, "" if t.density is None else f"{t.density:.3f}", *times)
    Console(width=150).print(table)


def main(
    out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the model folder is made.")] = Path("/tmp/llama-8b-shape"),
    methods: Annotated[str, typer.Option(help="Methods by comma; stock goes before them.")] = NAMES,
) -> None:
    results, taken = Results(out), dict[str, Taken]()
    make_shape(folder)
    arguments: dict[str, tuple[str, ...]] = {"stock": ()}
    for name in methods.split(","):
        arguments[name] = sparse_args(
            {"method": name, "min_tokens": MIN_TOKENS, "min_query_tokens": 1, "params": PARAMS.get(name, {})}
        )
    names = list(arguments)
    for pair in (names[i : i + 2] for i in range(0, len(names), 2)):
        with serving(folder, BATCH, {name: arguments[name] for name in pair}) as servers:
            for name, server in servers.items():
                taken[name] = ask(server, name == "stock")
                record(name, taken[name], taken["stock"], results)
                print(name, taken[name], flush=True)
    show(taken)
    results.show()


if __name__ == "__main__":
    typer.run(main)
