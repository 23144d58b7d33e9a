# SPDX-License-Identifier: Apache-2.0
"""Density of each setting that `eval answers` asked, by length: servers count that of all prompts together.

    python -m benchmarks.capture MODEL CAPTURE --tokens 130000 --text FOLDER
    python -m benchmarks.densities CAPTURE [--answers docs/results/answers.json] [--results FILE]

Kept over causal (query, key) pairs of all layers and heads, past the first ``min_tokens`` positions, selected as a
server does, in its chunks. A prompt's beginning does not know what follows: one capture serves all shorter lengths.
"""

import json
import shlex
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.figures import Report, read_figures
from benchmarks.kept import select_layer
from vllm_sparse_backend.measure.server import Settings
from vllm_sparse_backend.profiling.capture import Capture
from vllm_sparse_backend.profiling.chunks import chunk_rows, paged
from vllm_sparse_backend.settings.config import KEY, load_config
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_kernels import PagedCache
from vllm_sparse_kernels.index import causal_pairs

ANSWERS = Path("docs/results/answers.json")


def settings_asked(answers: Path) -> list[Settings]:
    """Of the commands that answers were measured by, each once."""
    found: dict[str, Settings] = {}
    for command in dict.fromkeys(row["command"] for row in read_figures(answers)):
        words = shlex.split(command)
        for option, value in pairwise(words):
            if option == "--settings":
                values = json.loads(value) if value.startswith("{") else {"profile": value}
                found.setdefault(json.dumps(values, sort_keys=True), Settings(values))
    return list(found.values())


def densities(
    captured: Capture, num_tokens: int, asked: Sequence[tuple[Plan, int]], chunk_tokens: int, device: str
) -> list[float]:
    """Of each plan, past as many positions, in the capture's first ``num_tokens``. Layers that run dense keep all."""
    chunks = [chunk_rows(num_tokens, chunk_tokens, torch.device(device), first) for _, first in asked]
    num_heads, kept = captured.shape.num_heads, [0] * len(asked)
    for layer, scale in sorted(captured.scales.items()):
        q, k, v = (x[:num_tokens] for x in captured.read(layer, device))
        cache = PagedCache(paged(k), paged(v))
        for i, (plan, _) in enumerate(asked):
            groups = plan.layer(layer)
            for rows in chunks[i]:
                if groups is None:
                    kept[i] += num_heads * causal_pairs(rows)
                    continue
                queries = q[rows.context_lens[0] : rows.seq_lens[0]]
                kept[i] += int(select_layer(groups, queries, cache, rows, scale).kept_pairs())
    heads = len(captured.scales) * num_heads
    return [n / (heads * sum(map(causal_pairs, rows))) for n, rows in zip(kept, chunks, strict=True)]


def plan_asked(settings: Settings, captured: Capture) -> tuple[Plan, int]:
    """What a server would do, and how many first positions it leaves dense. Raises ConfigurationError."""
    config = load_config({KEY: dict(settings.values)})
    return Plan.build(config, captured.shape), config.min_tokens if isinstance(config.min_tokens, int) else 0


def main(
    captured: Annotated[Path, typer.Argument(help="Folder of `benchmarks.capture`, as long as the longest length.")],
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, by comma.")] = "12000,32000,65000,130000",
    answers: Annotated[Path, typer.Option(help="Figures of `sparse-prefill eval answers`.")] = ANSWERS,
    more: Annotated[
        list[str] | None, typer.Option("--settings", help="Others, as JSON or a profile; may be repeated.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a step, as --max-num-batched-tokens.")] = 8192,
    device: Annotated[str, typer.Option(help="cuda, or cpu, where references select, slowly.")] = (
        "cuda" if torch.cuda.is_available() else "cpu"
    ),
    results: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
) -> None:
    found = Capture.open(captured)
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    report = Report("densities", name, None, results, f"python -m benchmarks.densities {captured.name}")
    asked: dict[str, tuple[Plan, int]] = {}
    for settings in [*settings_asked(answers), *map(Settings.parse, more or ())]:
        try:
            # Those that differ in more than their parameters have their whole text for a name.
            name = json.dumps(dict(settings.values)) if str(settings) in asked else str(settings)
            asked[name] = plan_asked(settings, found)
        except ConfigurationError as error:
            print(f"{settings} left out: {error}")
    for length in map(int, lengths.split(",")):
        if length > found.num_tokens:
            raise ConfigurationError(f"--lengths: given {length:,}, expected at most {found.num_tokens:,}, as captured")
        began = time.monotonic()
        for label, value in zip(asked, densities(found, length, list(asked.values()), chunk, device), strict=True):
            report.add_figure(f"{label}, density, {length:,} tokens, {found.model}", value, "share", "lower")
            print(f"{label}, {length:,} tokens: {value:.4f}")
        print(f"{length:,} tokens: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
