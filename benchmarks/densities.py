# SPDX-License-Identifier: Apache-2.0
"""Density by prompt length of each setting in the results of `eval answers`. Servers count all lengths together.

    python -m benchmarks.capture MODEL CAPTURE --tokens 130000 --text FOLDER
    python -m benchmarks.densities CAPTURE [--answers docs/results/answers.json] [--results FILE]

Density is the ratio of kept to causal (query, key) pairs over all layers and heads, past the first ``min_tokens``
positions, with the selection and chunks of a server. The beginning of a prompt does not depend on its continuation, so
one capture is enough for all shorter lengths.
"""

import json
import shlex
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import Report, read_figures
from benchmarks.options import Device, Results, device_label
from benchmarks.plan_quality import kept_shares
from vllm_sparse_backend.calibration.capture import Capture
from vllm_sparse_backend.cli.common import device_of
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import KEY, load_config
from vllm_sparse_backend.evaluation.vllm_server import Settings

ANSWERS = Path("docs/results/answers.json")


def settings_asked(answers: Path) -> list[Settings]:
    """Return the distinct settings of the commands that measured answers."""
    settings: dict[str, Settings] = {}
    for command in dict.fromkeys(row["command"] for row in read_figures(answers)):
        words = shlex.split(command)
        for option, value in pairwise(words):
            if option == "--settings":
                values = json.loads(value) if value.startswith("{") else {"profile": value}
                settings.setdefault(json.dumps(values, sort_keys=True), Settings(values))
    return list(settings.values())


def plan_asked(settings: Settings, captured: Capture) -> tuple[Plan, int]:
    """Return a server's plan, and its number of dense first positions. Raises ConfigurationError."""
    config = load_config({KEY: dict(settings.values)})
    return Plan.build(config, captured.shape), config.min_tokens if isinstance(config.min_tokens, int) else 0


def main(
    captured: Annotated[Path, typer.Argument(help="Folder of `benchmarks.capture`, with at least the longest length.")],
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, comma-separated.")
    ] = "12000,32000,65000,130000",
    answers: Annotated[Path, typer.Option(help="Figures of `sparse-prefill eval answers`.")] = ANSWERS,
    more: Annotated[
        list[str] | None, typer.Option("--settings", help="Further settings, as JSON or a profile; repeatable.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a step (--max-num-batched-tokens).")] = 8192,
    device: Device = None,
    results: Results = None,
) -> None:
    capture, device = Capture.open(captured), device_of(device)
    report = Report("densities", device_label(device), None, results)
    by_label: dict[str, tuple[Plan, int]] = {}
    for settings in [*settings_asked(answers), *map(Settings.parse, more or ())]:
        try:
            # Settings that differ in more than their parameters are named by their whole text.
            name = json.dumps(dict(settings.values)) if str(settings) in by_label else str(settings)
            by_label[name] = plan_asked(settings, capture)
        except ConfigurationError as error:
            print(f"{settings} left out: {error}")
    plans, starts = zip(*by_label.values(), strict=True)
    for length in map(int, lengths.split(",")):
        if length > capture.num_tokens:
            raise ConfigurationError(
                f"--lengths: given {length:,}, expected at most the captured {capture.num_tokens:,}"
            )
        began = time.monotonic()
        for label, value in zip(by_label, kept_shares(capture, plans, chunk, device, length, starts), strict=True):
            report.add_figure(f"{label}, density, {length:,} tokens, {capture.model}", value, "share", "lower")
            print(f"{label}, {length:,} tokens: {value:.4f}")
        print(f"{length:,} tokens: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
