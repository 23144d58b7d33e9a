# SPDX-License-Identifier: Apache-2.0
"""Compares the machine code of every Triton kernel before and after a change of the source, without a GPU.

    python -m benchmarks.kernel_code record before.json   # on the commit before
    python -m benchmarks.kernel_code record after.json    # on the commit after
    python -m benchmarks.kernel_code compare before.json after.json --out docs/results/readable.json

``record`` compiles the launches of the engines, and the launches of each method at each setting of its ladder, on
random batches. It writes registers, spills, shared memory and two hashes for each variant: of the PTX, and of the
machine code without names and places of parameters. Nothing runs, and Triton's cache is not used.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import typer

TARGETS = {"sm_80": 80, "sm_90": 90}

FIELDS = {"registers": "registers", "shared_bytes": "bytes", "spilled_bytes": "bytes"}
"""Compared quantities of a variant, with their units."""

app = typer.Typer()


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="JSON file to write.")],
    target: Annotated[list[str] | None, typer.Option(help="sm_80 or sm_90. Default: both.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Part of a kernel's name. Default: all kernels.")] = None,
) -> None:
    """Compile all kernels, and write their figures."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for name in target or TARGETS:
            for variant, compiled in compiled_variants(TARGETS[name], kernel or [""]):
                figures[f"{name} {variant}"] = figures_of(compiled)
    out.write_text(json.dumps(figures, indent=1) + "\n")
    typer.echo(f"{len(figures)} variants")


class Case(NamedTuple):
    """One layer whose kernels are compiled."""

    name: str
    head_dim: int
    bulk: bool  # whether keys are read by bulk copies
    layer: Any


def compiled_variants(arch: int, kernels: Sequence[str] = ("",)) -> Iterator[tuple[str, Any]]:
    """Yield (place of a launch, compiled kernel), once for each variant that a layer launches.

    Args:
        arch: 80 or 90.
        kernels: Parts of names. Kernels whose names contain none of them are not compiled.
    """
    import torch
    from triton.runtime.jit import JITFunction

    from tests.helpers.batches import random_batch
    from tests.helpers.offline_compiler import card
    from vllm_sparse_kernels.layer import run
    from vllm_sparse_kernels.layer_inputs import LayerInputs
    from vllm_sparse_kernels.pair_counts import add_listed_pairs

    launches: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = f"{self.fn.__module__.removeprefix('vllm_sparse_kernels.')}.{self.fn.__name__}"
        if not any(part in name for part in kernels):
            return None
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        if not any(compiled is known for _, known in launches):
            launches.append((name, compiled))
        return compiled

    batches = {
        128: random_batch([(3000, 300), (0, 200)], 8, 2, 128, page_size=128, dtype=torch.bfloat16),
        64: random_batch([(600, 300), (0, 200)], 8, 2, 64, page_size=16, dtype=torch.float16),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", compile_only))
        stack.enter_context(patch.object(torch, "empty", torch.zeros))
        for case in _cases(arch):
            launches.clear()
            batch = batches[case.head_dim]
            with card(arch, case.bulk):
                try:
                    out = torch.zeros_like(batch.q)
                    index = run(case.layer, LayerInputs(batch.q, batch.cache, batch.rows, batch.scale), out)
                except ValueError as error:  # for example, the engine refuses stripes
                    typer.echo(f"{case.name}: {error}")
                    continue
                if case.name.endswith("portable"):
                    add_listed_pairs(index, torch.zeros(4, dtype=torch.int64), 1)
            counts: Counter[str] = Counter()
            for kernel, compiled in launches:
                yield f"{case.name} {counts[kernel]} {kernel}", compiled
                counts[kernel] += 1


def _cases(arch: int) -> Iterator[Case]:
    """Yield each method at each setting of its ladder.

    Its first settings are also compiled with bulk copies, flash and head_dim 64.
    """
    import torch

    from tests.helpers.offline_compiler import SHARED_KIB
    from vllm_sparse_kernels.attention import FlashAttention, flash_engine, widest_block
    from vllm_sparse_kernels.layer import Layer, layer_plan
    from vllm_sparse_kernels.methods import METHODS

    def varlen(q: Any, out: Any, **_: Any) -> Any:
        return out, torch.zeros(1, len(q))

    flash = flash_engine(FlashAttention.of_version(3 if arch == 90 else 2, varlen))
    for head_dim, bulk in ((128, False), (128, True), (64, False)) if arch >= 90 else ((128, False), (64, False)):
        # Earlier sources do not compile blocks of 128 on an A100.
        widest = 64 if arch == 80 else widest_block(head_dim, SHARED_KIB[arch] << 10) or 64
        for name, spec in METHODS.items():
            ladder = spec.ladder if head_dim == 128 and not bulk else spec.ladder[:1]
            settings = spec.parameters(), spec.full, *(spec.parameters(**step).group_key for step in ladder)
            for i, method in enumerate(dict.fromkeys(settings)):
                where = f"d{head_dim}{' bulk' if bulk else ''} {name} {i}"
                layer = Layer.of(layer_plan([method] * 8), head_dim, torch.device("cpu"))
                layer = replace(layer, by_kernels=True, block_tokens=min(layer.block_tokens, widest))
                yield Case(f"{where} portable", head_dim, bulk, layer)
                if i == 0 and layer.options is None:
                    yield Case(f"{where} flash", head_dim, bulk, replace(layer, engine=flash))


def figures_of(compiled: Any) -> dict[str, Any]:
    """Return the figures of one variant. Equal cubins are inspected once."""
    registers, spilled, sass = _machine_code(compiled.asm["cubin"])
    return {
        "registers": registers, "spilled_bytes": spilled, "shared_bytes": compiled.metadata.shared,
        "ptx": _hash(_plain_ptx(compiled.asm["ptx"])), "sass": sass,
    }  # fmt: skip


def _plain_ptx(ptx: str) -> str:
    """Return the PTX without comments, debugging sections, and names of kernels and parameters."""
    ptx = re.sub(r"\.section\s+\.debug.*", "", ptx, flags=re.S)
    names = re.findall(r"\.entry (\w+)\(", ptx)
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith((".loc", ".file")))
    for name in names:
        text = text.replace(name, "kernel")
    return text


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=4096)
def _machine_code(cubin: bytes) -> tuple[int, int, str]:
    """Return (registers, bytes of local memory, hash of the instructions without names and places of parameters)."""
    from tests.helpers.offline_compiler import TOOLS, resource_usage

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [str(TOOLS / "nvdisasm"), "-c", str(file)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*;)", sass, flags=re.M)
    text = re.sub(r"c\[0x0\]\[0x\w+\]", "c[parameter]", "\n".join(instructions))
    return *resource_usage(cubin), _hash(re.sub(r"`\(.*?\)", "label", text))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="File that record wrote on the earlier commit.")],
    after: Annotated[Path, typer.Argument(help="File that record wrote on the later commit.")],
    out: Annotated[Path | None, typer.Option(help="JSON file of results to add rows to.")] = None,
) -> None:
    """Print a line for each kernel: variants, changed variants, registers, shared memory and spills."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    by_kernel: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    for key in new:
        by_kernel.setdefault((key.split()[0], key.split()[-1]), []).append((old.get(key), new[key]))
    rows: list[dict[str, Any]] = []
    for (target, kernel), pairs in sorted(by_kernel.items()):
        there = [(a, b) for a, b in pairs if a is not None]
        changed = [(a, b) for a, b in there if a["sass"] != b["sass"]]
        line = f"{target} {kernel}: {len(there)} variants, {len(changed)} with other machine code"
        common = {"device": f"none, compiled for {target}", "command": "python -m benchmarks.kernel_code compare"}
        rows.append(
            {"name": f"{kernel} on {target}: variants whose machine code changed", "value": len(changed),
             "unit": f"of {len(there)} variants", "bar": 0, "better": "lower", **common}
        )  # fmt: skip
        for field, unit in FIELDS.items():
            before_most, after_most = (max((pair[i][field] for pair in there), default=0) for i in (0, 1))
            line += f", {field} {before_most} -> {after_most}"
            if changed:
                more = max(b[field] - a[field] for a, b in changed)
                rows.append(
                    {"name": f"{kernel} on {target}: {field} more than before, at most", "value": more,
                     "unit": unit, "bar": 0, "better": "lower", **common}
                )  # fmt: skip
        lost = len(pairs) - len(there)
        typer.echo(line + (f", {lost} only after" if lost else ""))
    if out is not None:
        kept = json.loads(out.read_text()) if out.exists() else []
        names = {row["name"] for row in rows}
        out.write_text(json.dumps([*(r for r in kept if r["name"] not in names), *rows], indent=1) + "\n")


if __name__ == "__main__":
    app()
