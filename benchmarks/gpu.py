# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: run the GPU tests on this card, then measure README's figures and write a results file to contribute.

    python -m benchmarks.gpu [--out docs/results] [--budget-s 1200]

The steps are: the tests of kernels; all other tests, including those with servers; TTFT of an 8B model's shape with
stock vLLM and with A-shape; and the efficiency of `attend` relative to FlashAttention. Each step may take 8 minutes,
and all steps together the budget. A step that takes longer is stopped and counts as failed; the file has the results of
the other steps. The exit code is 1 if anything failed.

On a machine with two cards of the same model, two steps run at a time, each on its own card: first the tests, then the
measurements. All servers for TTFT run on the first card, and `attend` is compared with FlashAttention on the second, so
both sides of each ratio come from the same card.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
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

Steps = Mapping[str, Sequence[Sequence[str]]]
"""Commands for Python, in order, by the name of the step."""


def steps_of(folder: Path, memory_bytes: int, at_once: int = 1) -> Steps:
    """Return the steps.

    ``folder`` is for files of this run only: a model's shape, and the figures of each step. ``at_once`` is the number
    of steps that share this machine's CPUs.
    """
    lengths = "8192,32768,131072" if memory_bytes > LARGE_BYTES else "8192,32768"
    bench = ["-m", "vllm_sparse_backend", "bench", "serve", str(folder / "shape"), "--lengths", lengths]
    ours = ["--repeats", "3", "--settings", '{"method": "a_shape"}', "--server-args", SERVER_ARGS]
    attend = ["--densities", "1,0.2,0.05", "--stripes", "8192", "--blocks", "128"]
    # Compiling takes most of the time, with one CPU per process.
    workers = ["-n", str(max(1, min(24, ((os.cpu_count() or 1) - 2) // at_once))), "--dist", "loadgroup"]
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


def run(
    steps: Steps, budget_s: float, step_s: float = STEP_S, cards: Sequence[str] = ()
) -> Iterator[tuple[str, float, str | None]]:
    """Yield (step, seconds, problem) of each step.

    With several ``cards`` (values of CUDA_VISIBLE_DEVICES), steps run in parallel, one on each card, and the output of
    a step is printed when it ends. Otherwise steps run one after the other, and print to this program's output.
    """
    end, names = time.monotonic() + budget_s, list(steps)
    if len(cards) < 2:
        for name in names:
            yield name, *_run_step(steps[name], end, step_s)
        return
    with ThreadPoolExecutor(len(cards)) as pool:
        for start in range(0, len(names), len(cards)):
            running = {
                pool.submit(_run_step, steps[name], end, step_s, card): name
                for name, card in zip(names[start : start + len(cards)], cards)
            }
            for step in as_completed(running):
                yield running[step], *step.result()


def _run_step(
    commands: Sequence[Sequence[str]], end: float, step_s: float, card: str | None = None
) -> tuple[float, str | None]:
    """Run a step's commands until one fails, and return its seconds and the problem, if any."""
    begin = time.monotonic()
    until, problem = min(begin + step_s, end), None
    for command in commands:
        if problem is None:
            problem = _ended(command, max(until - time.monotonic(), 0), card)
    return time.monotonic() - begin, problem


def _ended(command: Sequence[str], limit_s: float, card: str | None) -> str | None:
    """Run a command, and stop it with its child processes when its time is over. Return the problem, if any."""
    env = os.environ if card is None else {**os.environ, "CUDA_VISIBLE_DEVICES": card}
    with TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            start_new_session=True,
            stdout=None if card is None else output,
            stderr=None if card is None else subprocess.STDOUT,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)  # servers then end their own processes
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        print(output.read().decode(errors="replace"), end="", flush=True)
    if code is None:
        return f"took longer than {limit_s:.0f} s"
    return None if code == 0 else f"ended with {code}"


def cards_alike(names: Sequence[str], visible: str | None) -> list[str]:
    """Return the first card and the next card of the same model, if any, as values of CUDA_VISIBLE_DEVICES.

    ``names`` has the names of the cards that torch sees, and ``visible`` is CUDA_VISIBLE_DEVICES of this process.
    """
    cards = visible.split(",") if visible else [str(i) for i in range(len(names))]
    return [card for card, name in zip(cards, names) if name == names[0]][:2]


def add_figures(results: Path, measured: Path) -> None:
    """Merge the figures of a step into the card's results, if it wrote any."""
    if measured.is_file():
        merge_figures(results, read_figures(measured))


def add_tests(report: Report, step: str, junit: Path) -> None:
    """Add the numbers of passed and failed tests, if the step wrote a report."""
    if junit.is_file():
        counts = outcome(ElementTree.parse(junit).getroot())
        report.add_figure(f"{step}: passed", counts["passed"], "tests", "higher")
        report.add_figure(f"{step}: failed", len(counts["failed"]), "tests", "lower", bar=0)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the card's results file.")] = ROOT / "docs/results",
    budget_s: Annotated[float, typer.Option(help="Seconds for all steps together.")] = 1200.0,
) -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("make gpu: no CUDA device, expected one that torch sees; `make test` runs without")
    card = torch.cuda.get_device_name()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cards = cards_alike(names, os.environ.get("CUDA_VISIBLE_DEVICES"))
    results = out.absolute() / f"{re.sub(r'[^a-z0-9]+', '_', card.lower()).strip('_')}.jsonl"
    report, failed = Report("gpu", card, None, results, "make gpu"), False
    with TemporaryDirectory() as name:
        make_shape((folder := Path(name)) / "shape", 135_168)
        steps = steps_of(folder, torch.cuda.get_device_properties(0).total_memory, at_once=len(cards))
        for step, seconds, problem in run(steps, budget_s, cards=cards):
            print(f"{step}: {problem or 'done'}, after {seconds:.0f} s", flush=True)
            failed = failed or problem is not None
            add_tests(report, step, folder / f"{step}.xml")
            add_figures(results, folder / f"{step}.jsonl")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
