# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for Hopper without one: what the passes over the last queries, and SALE, owe their speed to."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

pytestmark = pytest.mark.full

THREADS = {"split_lse_kernel": 512, "sums_kernel": 128}
REGISTERS, SHARED_BYTES = 1 << 16, 228 << 10
"""Of a multiprocessor, which keeps 1 KB of the latter for each program."""


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.methods.compiled_sums"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[0])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kernel", THREADS)
def test_passes_over_the_last_queries(figures: dict[str, dict[str, int]], kernel: str) -> None:
    """Keys are copied a tile ahead: a look-up that a tile's address waits for would have each tile wait for its whole
    way from memory. Two programs fit a multiprocessor: one's exponentials hide behind the other's products."""
    assert figures[kernel]["copies_ahead"] >= 1
    assert 2 * (figures[kernel]["shared_bytes"] + 1024) <= SHARED_BYTES
    assert 2 * THREADS[kernel] * figures[kernel]["registers"] <= REGISTERS


TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
COMPILE = """
import sys
import torch
from benchmarks.offline import compiling_for
from vllm_sparse_kernels.methods.sale import hopper as sale_hopper
from vllm_sparse_kernels.methods.sale.rounding import RoundedKeys, RoundedQueries
from vllm_sparse_kernels.methods.sale.scores import PAIR_FIELDS, FlagArgs

head_dim, block_tokens = int(sys.argv[1]), int(sys.argv[2])
integers = torch.empty(1, 256, head_dim, dtype=torch.float8_e4m3fn)
numbers, ids = torch.empty(256), torch.empty(256, dtype=torch.int32)
flags = torch.empty(256, dtype=torch.uint8)
bulk = sale_hopper.bulk(integers)
with compiling_for():
    kernel = sale_hopper.half_kernel.warmup(
        RoundedQueries(integers, numbers, numbers, numbers, 256),
        RoundedKeys(integers, numbers, numbers, numbers.half(), numbers, numbers, 256),
        bulk, bulk, ids, numbers, FlagArgs(flags, 256, ids.long(), ids), ids, 32, 128, flags,
        GROUP=4, BLOCK_D=head_dim, INDEX_N=block_tokens, SPAN=8192, FIELDS=4, STAGES=sale_hopper.STAGES,
        PAIR_FIELDS=PAIR_FIELDS.value, num_warps=4, grid=(1, 1, 1),
    )
with open(sys.argv[3], "wb") as file:
    file.write(kernel.asm["cubin"])
print(kernel.metadata.shared)
"""


@pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="this Triton brings no disassembler")
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(128, 64), (64, 32)])
def test_sales_gluon_kernel_compiles_as_meant(head_dim, block_tokens, tmp_path):
    """Without spills, and with products that run under the maxima."""
    cubin = tmp_path / "half_kernel.cubin"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(head_dim), str(block_tokens), str(cubin)]
    shared = int(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    assert 2 * (shared + 1024) <= 227 * 1024, "two programs do not fit one multiprocessor"
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], check=True, capture_output=True, text=True)
    # Some assemblers put addresses on the stack, 280 bytes of them with Triton 3.9; 128 registers of scores never.
    assert int(re.search(r"STACK:(\d+)", usage.stdout)[1]) <= 320
    assert " LOCAL:0 " in usage.stdout
    waits = [line for line in sass.splitlines() if "WARPGROUP.DEPBAR" in line]
    # One wait for each product, two products a step; every one but the last leaves a product under way.
    assert len(waits) == 2 * 4
    assert sum("gsb0, 0x1 ;" in line for line in waits) == 2 * 4 - 1
    # Between the last two waits stand the maxima of a tile: the assembler did not pull the wait up over them.
    assert len(sass.split("WARPGROUP.DEPBAR")[-2].splitlines()) > 120
