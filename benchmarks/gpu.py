# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: run the GPU tests on this card, then measure README's figures and write a results file to contribute.

    python -m benchmarks.gpu [--out docs/results] [--budget-s 1200]

The steps are: the tests of kernels; all other tests, including those with servers; TTFT of an 8B model's shape with
stock vLLM and with A-shape; and the efficiency of `attend` relative to FlashAttention. Each step may take 8 minutes,
and all steps together the budget. A step that takes longer is stopped and counts as failed; the file has the results of
the other steps. The exit code is 1 if anything failed.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from xml.etree import ElementTree

import typer

from benchmarks.figures import Report, merge_figures, read_figures
from benchmarks.shape import make_shape
from benchmarks.vllm_matrix import outcome

ROOT = Path(__file__).parents[1]
STEP_S = 480.0
LARGE_BYTES = 44 << 30
"""Bytes; the weights and cache of an 8B model with 131,072 tokens take about 34 GiB."""

SERVER_ARGS = "--load-format dummy --gpu-memory-utilization 0.8"
"""Leaves memory for other processes on the card."""


def steps_of(folder: Path, memory_bytes: int) -> Mapping[str, Sequence[Sequence[str]]]:
    """Return each step's commands for Python, in order, by the name of the step.

    ``folder`` is for files of this run only: a model's shape, and the figures of each step.
    """
    lengths = "8192,32768,131072" if memory_bytes > LARGE_BYTES else "8192,32768"
    bench = ["-m", "vllm_sparse_backend", "bench", "serve", str(folder / "shape"), "--lengths", lengths]
    ours = ["--repeats", "3", "--settings", '{"method": "a_shape"}', "--server-args", SERVER_ARGS]
    attend = ["--densities", "1,0.2,0.05", "--stripes", "8192", "--blocks", "128"]
    # Compiling takes most of the time, with one CPU per process.
    workers = ["-n", str(max(1, min(24, (os.cpu_count() or 1) - 2))), "--dist", "loadgroup"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *workers, "--durations=10"]
    kernels, others = "GPU tests of kernels", "GPU tests of servers, methods and backend"
    return {
        kernels: [[*tests, "tests/kernels", f"--junitxml={folder}/{kernels}.xml"]],
        others: [[*tests, "tests", "--ignore=tests/kernels", f"--junitxml={folder}/{others}.xml"]],
        "TTFT": [
            [*bench, *ours, "--json", f"{folder}/served.json"],
            ["-m", "benchmarks.figures", f"{folder}/served.json", f"{folder}/TTFT.jsonl"],
        ],
        "attend": [["-m", "benchmarks.attend", *attend, "--results", f"{folder}/attend.jsonl"]],
    }  # fmt: skip


def run_step(commands: Sequence[Sequence[str]], limit_s: float) -> str | None:
    """Run a step's commands until one fails or the time is over, and return the problem, if any."""
    end = time.monotonic() + limit_s
    for command in commands:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # servers then end their own processes
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return f"took longer than {limit_s:.0f} s"
        if code:
            return f"ended with {code}"
    return None


def main(
    out: Annotated[Path, typer.Option(help="Folder of the card's results file.")] = ROOT / "docs/results",
    budget_s: Annotated[float, typer.Option(help="Seconds for all steps together.")] = 1200.0,
) -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("make gpu: no CUDA device, expected one that torch sees; `make test` runs without")
    card = torch.cuda.get_device_name()
    results = out.absolute() / f"{re.sub(r'[^a-z0-9]+', '_', card.lower()).strip('_')}.jsonl"
    report, failed, end = Report("gpu", card, None, results, "make gpu"), False, time.monotonic() + budget_s
    with TemporaryDirectory() as name:
        make_shape((folder := Path(name)) / "shape", 135_168)
        steps = steps_of(folder, torch.cuda.get_device_properties(0).total_memory)
        for step, commands in steps.items():
            began = time.monotonic()
            problem = run_step(commands, max(min(STEP_S, end - began), 0))
            print(f"{step}: {problem or 'done'}, after {time.monotonic() - began:.0f} s", flush=True)
            failed = failed or problem is not None
            junit, measured = folder / f"{step}.xml", folder / f"{step}.jsonl"
            if junit.is_file():
                counts = outcome(ElementTree.parse(junit).getroot())
                report.add_figure(f"{step}: passed", counts["passed"], "tests", "higher")
                report.add_figure(f"{step}: failed", len(counts["failed"]), "tests", "lower", bar=0)
            if measured.is_file():
                merge_figures(results, read_figures(measured))
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
