# SPDX-License-Identifier: Apache-2.0
"""The machine code of every Triton kernel, without a GPU: to see whether a change of the source changes it.

    python -m benchmarks.kernel_code record before.json   # on the commit before
    python -m benchmarks.kernel_code record after.json    # on the commit after
    python -m benchmarks.kernel_code compare before.json after.json --out docs/results/readable.json

``record`` compiles whatever each method, at each setting of its ladder, and the engines launch on random batches, in
the order of the launches, and writes registers, spills, shared memory and two hashes for each variant: of the PTX and
of the machine code, less names and the places of parameters. Nothing is run. Triton's own cache is not used.
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
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

TARGETS = {"sm_80": 80, "sm_90": 90}

app = typer.Typer()


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="JSON file to write.")],
    target: Annotated[list[str] | None, typer.Option(help="sm_80 or sm_90; both without.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Part of a kernel's name; all kernels without.")] = None,
) -> None:
    """Compile everything and write what it comes to."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for name in target or TARGETS:
            for variant, compiled in compiled_variants(TARGETS[name], kernel or [""]):
                found[f"{name} {variant}"] = figures_of(compiled)
    out.write_text(json.dumps(found, indent=1) + "\n")
    typer.echo(f"{len(found)} variants")


def compiled_variants(arch: int, kernels: Sequence[str] = ("",)) -> Iterator[tuple[str, Any]]:
    """(place of a launch, what Triton makes of it), once for each distinct variant of a kernel at its place.

    Args:
        arch: 80 or 90.
        kernels: parts of names; what has none of them in its own is not compiled.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from benchmarks.batches import random_batch
    from benchmarks.offline import compiling_for
    from vllm_sparse_kernels.attend import portable
    from vllm_sparse_kernels.attend.flash import FlashAttention, flash_engine
    from vllm_sparse_kernels.layer import Layer, layer_plan, run
    from vllm_sparse_kernels.methods import METHODS
    from vllm_sparse_kernels.methods.anchor_attention import method as anchors
    from vllm_sparse_kernels.methods.sale import method as sale
    from vllm_sparse_kernels.methods.top_p import method as top_p
    from vllm_sparse_kernels.pairs import add_listed_pairs

    launches: list[tuple[str, Any]] = []
    launch = JITFunction.run
    seen: set[int] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = f"{self.fn.__module__.removeprefix('vllm_sparse_kernels.')}.{self.fn.__name__}"
        if not any(part in name for part in kernels):
            return None
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        if id(compiled) not in seen:
            seen.add(id(compiled))
            launches.append((name, compiled))
        return compiled

    def varlen(q: Any, out: Any, **_: Any) -> Any:
        return out, torch.zeros(1, len(q))

    limit = {80: 163, 90: 227}[arch] << 10
    fp8 = torch.float8_e4m3fn
    settings: list[tuple[int, torch.dtype, int, list[tuple[int, int]]]] = [
        (128, torch.bfloat16, 128, [(3000, 300), (0, 200)]),
        (64, torch.float16, 16, [(600, 300), (0, 200)]),
    ]
    with ExitStack() as stack:
        stack.enter_context(compiling_for(GPUTarget("cuda", arch, 32)))
        stack.enter_context(patch.object(JITFunction, "run", compile_only))
        stack.enter_context(patch.object(torch, "empty", torch.zeros))
        stack.enter_context(patch.object(portable, "shared_bytes", return_value=limit))
        stack.enter_context(patch.object(top_p, "stored_dtype", return_value=fp8 if arch >= 89 else torch.float16))
        stack.enter_context(patch.object(sale, "integer_dtype", return_value=fp8 if arch >= 90 else torch.int8))
        for head_dim, dtype, page_size, lengths in settings:
            batch = random_batch(lengths, 8, 2, head_dim, page_size=page_size, dtype=dtype)
            for bulk in (False, True) if arch >= 90 and head_dim == 128 else (False,):
                with _bulk(bulk, portable, anchors):
                    for name, spec in METHODS.items():
                        ladder = spec.ladder if head_dim == 128 and not bulk else spec.ladder[:1]
                        methods = spec.parameters(), spec.full, *(spec.parameters(**p).alike for p in ladder)
                        for i, method in enumerate(dict.fromkeys(methods)):
                            layer = Layer.of(layer_plan([method] * 8), head_dim, torch.device("cpu"))
                            widest = portable.widest_block(head_dim, limit)
                            wide = min(layer.block_tokens, 64 if arch == 80 and not bulk else widest)
                            engines = [portable.PORTABLE]
                            if layer.options is None:
                                flash = FlashAttention.of_version(3 if arch == 90 else 2, varlen)
                                if arch == 90 or page_size % 16 == 0:
                                    engines.append(flash_engine(flash))
                            for engine in engines:
                                if i and engine.name == "flash":
                                    continue
                                layer = replace(layer, by_kernels=True, engine=engine, block_tokens=wide)
                                seen.clear()
                                try:
                                    index = run(
                                        layer, batch.q, batch.cache, batch.rows, torch.zeros_like(batch.q), batch.scale
                                    )
                                except ValueError as error:  # the engine refuses stripes, say
                                    typer.echo(f"{name} {i} {engine.name}: {error}")
                                    launches.clear()
                                    continue
                                if engine.name == "portable":
                                    add_listed_pairs(index, torch.zeros(4, dtype=torch.int64), 1)
                                counts: Counter[str] = Counter()
                                for kernel, compiled in launches:
                                    where = f"d{head_dim}{' bulk' if bulk else ''} {name} {i} {engine.name}"
                                    yield f"{where} {counts[kernel]} {kernel}", compiled
                                    counts[kernel] += 1
                                launches.clear()


@contextmanager
def _bulk(value: bool, *modules: Any) -> Iterator[None]:
    """Whether keys are read by bulk copies, as a device would say."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "supports_bulk", return_value=value))
        yield


def figures_of(compiled: Any) -> dict[str, Any]:
    """Of one variant; the same cubin is looked at once."""
    registers, spilled, sass = _machine_code(compiled.asm["cubin"])
    return {
        "registers": registers, "spilled_bytes": spilled, "shared_bytes": compiled.metadata.shared,
        "ptx": _hash(_plain_ptx(compiled.asm["ptx"])), "sass": sass,
    }  # fmt: skip


def _plain_ptx(ptx: str) -> str:
    """Without comments, debugging sections, and the names of kernels and parameters."""
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
    """(registers, bytes of local memory, hash of the instructions without names and places of parameters)."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
        usage = run([tools / "cuobjdump", "-res-usage", file]).stdout
        sass = run([tools / "nvdisasm", "-c", file]).stdout
    instructions = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*;)", sass, flags=re.M)
    text = re.sub(r"c\[0x0\]\[0x\w+\]", "c[parameter]", "\n".join(instructions))
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", usage)[1])
        for name in ("REG", "STACK", "LOCAL")  # type: ignore[index]
    )
    return registers, max(stack, local), _hash(re.sub(r"`\(.*?\)", "label", text))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="What record wrote on the commit before.")],
    after: Annotated[Path, typer.Argument(help="What record wrote on the commit after.")],
    out: Annotated[Path | None, typer.Option(help="JSON file of results to add rows to.")] = None,
) -> None:
    """A line for each kernel: its variants, how many are the same, and registers and shared memory where not."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    by_kernel: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    for key in old.keys() | new.keys() if len(new) >= len(old) else new.keys():
        kernel = (key.split()[0], key.split()[-1])
        by_kernel.setdefault(kernel, []).append((old.get(key), new.get(key)))
    rows: list[dict[str, Any]] = []
    for (target, kernel), pairs in sorted(by_kernel.items()):
        there = [(a, b) for a, b in pairs if a and b]
        lost = len(pairs) - len(there)
        same_ptx = sum(a["ptx"] == b["ptx"] for a, b in there)
        same = sum(a["sass"] == b["sass"] for a, b in there)
        line = f"{target} {kernel}: {len(there)} variants, {same_ptx} same PTX, {same} same machine code"
        values = {}
        for field in ("registers", "shared_bytes", "spilled_bytes"):
            worse = [(a[field], b[field]) for a, b in there if b[field] > a[field]]
            values[field] = max((b - a for a, b in worse), default=0)
            most = tuple(max((pair[i][field] for pair in there), default=0) for i in (0, 1))
            line += f", {field} {most[0]} -> {most[1]}" + (f" ({len(worse)} worse)" if worse else "")
        typer.echo(line + (f", {lost} only on one side" if lost else ""))
        common = {"device": f"none, compiled for {target}", "command": "python -m benchmarks.kernel_code compare"}
        rows.append(
            {"name": f"{kernel} on {target}: variants whose machine code changed", "value": len(there) - same,
             "unit": f"of {len(there)} variants", "bar": None, "better": "lower", **common}
        )  # fmt: skip
        for field, unit in (("registers", "registers"), ("shared_bytes", "bytes"), ("spilled_bytes", "bytes")):
            rows.append(
                {"name": f"{kernel} on {target}: {field} more than before, at most", "value": values[field],
                 "unit": unit, "bar": 0, "better": "lower", **common}
            )  # fmt: skip
    if out is not None:
        kept = json.loads(out.read_text()) if out.exists() else []
        names = {row["name"] for row in rows}
        out.write_text(json.dumps([*(r for r in kept if r["name"] not in names), *rows], indent=1) + "\n")


if __name__ == "__main__":
    app()
