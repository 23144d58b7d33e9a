# SPDX-License-Identifier: Apache-2.0
"""Compile for a GPU that is not present, and read a kernel's properties from its machine code.

Triton needs a driver to know its target. A stand-in reports Hopper here; nothing can be launched on it, and
``Recorder`` compiles instead of launching. The tools that Triton includes disassemble the code.
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from vllm_sparse_kernels.cards import CARDS
from vllm_sparse_kernels.methods.sale import scores as sale_scores

Result = TypeVar("Result")

HOPPER_TARGET = GPUTarget("cuda", 90, 32)

BY_TARGET = {10 * card.capability[0] + card.capability[1]: card for card in CARDS}
"""GPUs by their target in Triton, such as 89."""

SHARED_KIB = {target: card.shared_bytes >> 10 for target, card in BY_TARGET.items()}
"""Shared memory of a program, by compute capability."""


class StandIn:
    """The part of a driver that compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        """Return a different number for each target, because a kernel caches its compiled code by device, not by
        target."""
        return int(self.target.arch)

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_for(target: GPUTarget = HOPPER_TARGET) -> Iterator[None]:
    """Make Triton compile for ``target`` on any machine."""
    before = driver._active
    driver.set_active(StandIn(target))
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def card(capability: int) -> Iterator[None]:
    """Compile, size and choose kernels as on a card of this compute capability.

    Calls that query the device's capability or shared memory get the card's values; tensors stay on the CPU. Gluon
    kernels for Hopper are left out, because other tests compile them.

    ``capability`` is a key of ``SHARED_KIB``, 90 for Hopper.
    """
    from vllm_sparse_kernels import block_width
    from vllm_sparse_kernels.attention.portable import engine as portable
    from vllm_sparse_kernels.methods.anchor_attention import method as anchors
    from vllm_sparse_kernels.methods.sale import method as sale
    from vllm_sparse_kernels.methods.share_prefill import block_average
    from vllm_sparse_kernels.methods.top_p import method as top_p, portable as top_p_masses, rounding as top_p_rounding
    from vllm_sparse_kernels.mla import (
        attention as mla_attention,
        prefill as mla_prefill,
        products as mla_products,
        selection as mla_selection,
    )
    from vllm_sparse_kernels.selection import engine as selection, last_queries

    limit_bytes, fp8 = SHARED_KIB[capability] << 10, torch.float8_e4m3fn
    answers = [
        (portable, "shared_bytes", limit_bytes),
        (block_width, "shared_bytes", limit_bytes),
        (last_queries, "shared_bytes", limit_bytes),
        (block_average, "shared_bytes", limit_bytes),
        (top_p_masses, "shared_bytes", limit_bytes),
        (top_p_rounding, "shared_bytes", limit_bytes),
        (selection, "shared_bytes", limit_bytes),
        (anchors, "shared_bytes", limit_bytes),
        (sale_scores, "shared_bytes", limit_bytes),
        (mla_attention, "shared_bytes", limit_bytes),
        (mla_attention, "has_bulk_copies", capability >= 90),
        (mla_prefill, "runs_kernels", True),
        (mla_products, "has_bulk_copies", capability >= 90),
        (mla_products, "capability_of", divmod(capability, 10)),
        (mla_products, "_arithmetic", "float16" if capability == 90 else "float32"),
        (mla_selection, "stored_dtype", fp8 if capability >= 89 else torch.float16),
        (top_p_masses, "_must_widen", False),
        (block_width, "_narrow_blocks_pay", False),  # blocks as wide as the card allows
        (top_p, "stored_dtype", fp8 if capability >= 89 else torch.float16),
        (sale, "integer_dtype", fp8 if capability >= 90 else torch.int8),
    ]
    with ExitStack() as stack:
        stack.enter_context(compiling_for(GPUTarget("cuda", capability, 32)))
        for module, name, answer in answers:
            stack.enter_context(patch.object(module, name, return_value=answer))
        yield


@cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def compile_with(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a process that compiles kernels, unlike this one, and serves all calls, because its imports
    take seconds."""
    with patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        result = _compiler().submit(function, *arguments)
    return result.result()


def report_of(script: str, *arguments: str) -> Any:
    """Return the JSON that a script prints last, in a process of its own that compiles kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: ended with {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Recorder:
    """Stands in for a kernel: launches compile it with their arguments, and run nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))


TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
"""Assembler and disassemblers that Triton includes."""


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread at a kernel's start, and the size of its stack in bytes, which holds spilled
    registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK", "LOCAL"))
    if registers is None or stack is None or local is None:
        raise ValueError(f"cuobjdump -res-usage: given {usage!r}, expected REG, STACK and LOCAL")
    return int(registers[1]), max(int(stack[1]), int(local[1]))


class Code(NamedTuple):
    """A kernel's machine code, an instruction per line, and its resources."""

    sass: list[str]
    registers: int  # per thread, at the start
    shared_bytes: int

    @staticmethod
    def of(compiled: Any) -> "Code":
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(compiled.asm["cubin"])
            sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        registers, _ = resource_usage(compiled.asm["cubin"])
        lines = [line for line in sass.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]
        return Code(lines, registers, compiled.metadata.shared)

    def places(self, mnemonic: str) -> list[int]:
        """Return the lines of an instruction; ``mnemonic`` is a regular expression for its name."""
        return [i for i, line in enumerate(self.sass) if re.search(rf"(?<![\w.])(?:{mnemonic})(?![\w])", line)]

    def uses_between(self, mnemonic: str) -> list[str]:
        """Return the instructions between the first and the last load of a kind that read a value of such a load.

        A warp issues its instructions in order. At such an instruction it waits for memory, and later loads only start
        then.

        Args:
            mnemonic: Regular expression for the name of a load of 16 bytes.
        """
        places = self.places(mnemonic)
        loaded: set[int] = set()
        uses = []
        for place in range(places[0], places[-1] + 1):
            instruction = re.sub(r"/\*.*?\*/", "", self.sass[place]).strip()
            registers = [int(number) for number in re.findall(r"(?<![\w.])R(\d+)", instruction)]
            if loaded.intersection(registers):
                uses.append(instruction)
            if place in places:
                loaded.update(range(registers[0], registers[0] + 4))
        return uses

    def count(self, mnemonic: str, begin: int = 0, end: int | None = None) -> int:
        """Return the number of times that an instruction occurs in lines [begin, end)."""
        stop = len(self.sass) if end is None else end
        return sum(begin <= place < stop for place in self.places(mnemonic))
