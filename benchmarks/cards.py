# SPDX-License-Identifier: Apache-2.0
"""`make cards`: compile every kernel of every method for every GPU of docs/compatibility.md, without a GPU.

    python -m benchmarks.cards [--jobs 14] [--out docs/results/cards.json] [--target 89] [--head-dim 256]

It needs only torch and Triton. Like a server, it refuses a head dim if the GPU's shared memory cannot hold a block of
keys, and a method if its selection does not fit. A kernel fails if it does not compile, or needs more shared memory or
registers than the GPU has. The rows of a GPU and head dim are written as soon as they are complete. The
exit code is 1 if a kernel failed.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import triton

from tests.helpers.compiled_methods import HEAD_DIMS, Usage, compiled, problems
from vllm_sparse_kernels.attention import widest_block
from vllm_sparse_kernels.cards import CARDS, Card
from vllm_sparse_kernels.methods import METHODS

ALL_KERNELS = "all kernels"
"""Replaces the kernel's name if a method's whole process failed."""


class Case(NamedTuple):
    """Layers with a head dim, on a GPU."""

    card: Card
    head_dim: int

    def __str__(self) -> str:
        return f"all methods, sm_{self.card.target}, head dim {self.head_dim}, bf16"

    @property
    def is_refused(self) -> bool:
        return widest_block(self.head_dim, self.card.shared_bytes) is None


def rows_of(case: Case, table: Mapping[str, Mapping[str, Usage]], failed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return rows for docs/results. ``table`` maps methods to their kernels, and ``failed`` kernels to their errors."""
    if case.is_refused:
        reason = f"{case.card.shared_bytes} bytes of shared memory cannot hold a block of keys"
        return [_row(f"{case}: refused, {reason}", len(METHODS), "methods", None)]
    usages = [usage for kernels in table.values() for usage in kernels.values()]
    spilled = sum(usage["stack_bytes"] > 0 for usage in usages)
    refused = refused_methods(table, failed)
    what = "kernels that need more shared memory or registers than the GPU has, or do not compile"
    return [
        _row(f"{case}: {what}", len(failed), "kernels", 0),
        _row(f"{case}: kernels compiled", len(usages), "kernels", None, "higher"),
        _row(f"{case}: methods refused, whose selection needs more shared memory", len(refused), "methods", None),
        _row(f"{case}: kernels with a stack, such as spilled registers", spilled, "kernels", None),
    ]


def refused_methods(table: Mapping[str, Mapping[str, Usage]], failed: Mapping[str, str]) -> list[str]:
    """Return the methods without kernels, except those whose process failed."""
    return [name for name, kernels in table.items() if not kernels and f"{name}: {ALL_KERNELS}" not in failed]


def _row(name: str, value: int, unit: str, bar: int | None, better: str = "lower") -> dict[str, Any]:
    device, command = f"none: compiled by Triton {triton.__version__}", "python -m benchmarks.cards"
    return {
        "name": name, "value": value, "unit": unit, "bar": bar, "better": better, "device": device, "command": command
    }  # fmt: skip


def write(path: Path, case: Case, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the rows of a case in a results file, or create the file."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [row for row in old if not row["name"].startswith(f"{case}: ")]
    path.write_text(json.dumps([*kept, *rows], indent=1) + "\n", encoding="utf-8")


def run(cases: Sequence[Case], jobs: int, out: Path | None) -> dict[Case, dict[str, str]]:
    """Compile all cases, method by method, in ``jobs`` processes. Return the errors of kernels by case."""
    failures: dict[Case, dict[str, str]] = {case: {} for case in cases}
    tables: dict[Case, dict[str, dict[str, Usage]]] = {case: {} for case in cases}
    with ThreadPoolExecutor(jobs) as pool:
        pending: dict[Future[dict[str, dict[str, Usage]]], tuple[Case, str]] = {}
        for case in cases:
            if case.is_refused:
                _finish(case, {}, {}, out)
            for method in () if case.is_refused else METHODS:
                pending[pool.submit(compiled, case.card.target, case.head_dim, method)] = case, method
        for future in as_completed(pending):
            case, method = pending[future]
            error = future.exception()
            if error is None:
                tables[case] |= future.result()
                failures[case] |= problems(future.result(), case.card.shared_bytes)
            else:
                tables[case][method] = {}
                failures[case][f"{method}: {ALL_KERNELS}"] = str(error)
            if len(tables[case]) == len(METHODS):
                _finish(case, tables[case], failures[case], out)
    return failures


def _finish(case: Case, table: Mapping[str, Mapping[str, Usage]], failed: Mapping[str, str], out: Path | None) -> None:
    rows = rows_of(case, table, failed)
    for row in rows:
        print(f"{row['name']}: {row['value']}", flush=True)
    for kernel, reason in failed.items():
        print(f"  {kernel}: {reason}", flush=True)
    for method in refused_methods(table, failed):
        print(f"  {method}: refused: its selection needs more shared memory", flush=True)
    for method, kernels in table.items():
        for kernel, usage in kernels.items():
            if usage["stack_bytes"] > 0:
                print(f"  {method}: {kernel}: a stack of {usage['stack_bytes']} bytes per thread", flush=True)
    if out is not None:
        write(out, case, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="results file to write")
    parser.add_argument("--target", type=int, action="append", choices=[card.target for card in CARDS])
    parser.add_argument("--head-dim", type=int, action="append", choices=HEAD_DIMS)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    cards = [card for card in CARDS if options.target is None or card.target in options.target]
    cases = [Case(card, head_dim) for card in cards for head_dim in options.head_dim or HEAD_DIMS]
    failures = run(cases, options.jobs, options.out)
    failed = sum(map(len, failures.values()))
    refused = sum(case.is_refused for case in cases)
    seconds = time.monotonic() - begin
    print(f"{len(cases)} GPUs × head dims, {refused} refused; {failed} kernels failed; {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
