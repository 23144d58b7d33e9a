# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for Hopper without a GPU: properties that make passes over the last queries, SALE and top_p fast."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from tests.helpers.compiled_methods import compiled
from tests.helpers.compiled_sums import sums_figures
from tests.helpers.hopper_code import barriers_in_data
from tests.helpers.offline_compiler import compile_with, report_of
from vllm_sparse_kernels.methods import METHODS

pytestmark = pytest.mark.full

THREADS = {"split_lse_kernel": 512, "sums_kernel": 128}
REGISTERS, SHARED_BYTES = 1 << 16, 228 << 10
"""Registers and shared memory of a multiprocessor, which reserves 1 KB of the latter for each program."""


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    return compile_with(sums_figures)


@pytest.mark.parametrize("kernel", THREADS)
def test_passes_over_the_last_queries(figures: dict[str, dict[str, int]], kernel: str) -> None:
    """Keys are copied a tile ahead. If a tile's address depended on a look-up, each tile would wait for the full memory
    latency. Two programs fit a multiprocessor, so exponentials of one program overlap with products of the other."""
    assert figures[kernel]["copies_ahead"] >= 1
    assert 2 * (figures[kernel]["shared_bytes"] + 1024) <= SHARED_BYTES
    assert 2 * THREADS[kernel] * figures[kernel]["registers"] <= REGISTERS


def test_every_kernel_that_selects_compiles() -> None:
    """Other tests run kernels in the interpreter, which accepts code that the compiler refuses."""
    report = compiled(90, 128)
    assert report.keys() == METHODS.keys()
    assert all("attend_kernel" in kernels for kernels in report.values())
    assert len(report["share_prefill"]) > len(report["flex_vertical_slash"])  # kernels for heads that share
    assert report["top_p"].keys() >= {"_choose_kernel", "_masses_kernel"}


TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
COMPILE = """
import sys
import torch
from tests.helpers.offline_compiler import compiling_for
from vllm_sparse_kernels.gluon_compat import bulk_steps
from vllm_sparse_kernels.index import IndexArgs
from vllm_sparse_kernels.methods.sale import hopper as sale_hopper
from vllm_sparse_kernels.methods.sale.rounding import RoundedKeys, RoundedQueries

head_dim, block_tokens = int(sys.argv[1]), int(sys.argv[2])
integers = torch.empty(1, 256, head_dim, dtype=torch.float8_e4m3fn)
numbers, ids = torch.empty(256), torch.empty(256, dtype=torch.int32)
flags = torch.empty(256, dtype=torch.uint8)
bulk = bulk_steps(integers)
index = IndexArgs(ids, ids, ids, ids, ids, ids.long(), 256, ids, ids, ids.long())
with compiling_for():
    kernel = sale_hopper.half_kernel.warmup(
        RoundedQueries(integers, numbers, numbers, numbers, 256),
        RoundedKeys(integers, numbers, numbers, numbers.half(), numbers, numbers, 256),
        bulk, bulk, ids, numbers, flags, index, ids, 32, 128, flags,
        GROUP=4, INDEX_N=block_tokens, SPAN=8192, num_warps=4, grid=(1, 1, 1),
    )
with open(sys.argv[3], "wb") as file:
    file.write(kernel.asm["cubin"])
print(kernel.metadata.shared)
"""


@pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="this Triton brings no disassembler")
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(128, 64), (64, 32)])
def test_sales_gluon_kernel_compiles_as_meant(head_dim, block_tokens, tmp_path):
    """There are no spills, and products overlap with maxima."""
    cubin = tmp_path / "half_kernel.cubin"
    shared = report_of(COMPILE, str(head_dim), str(block_tokens), str(cubin))
    assert 2 * (shared + 1024) <= 227 * 1024, "two programs do not fit one multiprocessor"
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], check=True, capture_output=True, text=True)
    # Some assemblers put addresses on the stack (280 bytes with Triton 3.9), but never the 128 registers of scores.
    assert int(re.search(r"STACK:(\d+)", usage.stdout)[1]) <= 320
    assert " LOCAL:0 " in usage.stdout
    assert barriers_in_data(sass.splitlines()) == 0
    waits = [line for line in sass.splitlines() if "WARPGROUP.DEPBAR" in line]
    # Each product has a wait, and each step has two products. Every wait except the last leaves a product in flight.
    assert len(waits) == 2 * 4
    assert sum("gsb0, 0x1 ;" in line for line in waits) == 2 * 4 - 1
    # The maxima of a tile are between the last two waits: the assembler did not move the last wait above them.
    assert len(sass.split("WARPGROUP.DEPBAR")[-2].splitlines()) > 120


COMPILE_TOP_P = """
import json, re, sys
import torch
from tests.helpers.hopper_code import barriers_in_data, hasty_arrivals
from vllm_sparse_kernels.methods.top_p import hopper
from vllm_sparse_kernels.call import Call, HeadGroup
from tests.helpers.batches import new_index
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.methods.top_p.rounding import Rounded
from vllm_sparse_kernels.methods.top_p.scored import SET_TILES
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.selection.slabs import slabs_of
from vllm_sparse_kernels.rows import Rows
from tests.helpers.offline_compiler import Code, Recorder, compiling_for

kept_d = int(sys.argv[1])
names = ("_diagonal_kernel", "_scores_kernel", "_masses_kernel")
recorders = {name: Recorder(getattr(hopper, name)) for name in names}
for name, recorder in recorders.items():
    setattr(hopper, name, recorder)
with compiling_for():
    for context_len, query_len in ((4000, 300), (0, 129), (20000, 1)):
        rows = Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32))
        num_queries, num_keys = rows.num_tiles * 64, -(-(context_len + query_len) // 128) * 128
        rounded = Rounded(
            torch.zeros(8, num_queries, kept_d, dtype=torch.float8_e4m3fn), torch.zeros(8, num_queries), num_queries,
            torch.zeros(2, num_keys, kept_d, dtype=torch.float8_e4m3fn), torch.zeros(2, num_keys // 32), num_keys,
        )
        cache = PagedCache(*torch.zeros(2, 1, 16, 2, kept_d))
        index = new_index(rows, 8, 32)
        call = Call(torch.zeros(query_len, 8, kept_d), cache, index, 1.0, HeadGroup(tuple(range(8)), (TopP(),) * 8))
        (slab,) = slabs_of(rows, 8, hopper.tile_bytes, SET_TILES.value)
        for run in slab.runs:
            hopper.compute_masses(call, rounded, run, torch.zeros(8, rows.num_tiles, -(-num_keys // 512) * 16))
found = {}
for name, recorder in recorders.items():
    code = Code.of(recorder.compiled[0])
    found[name] = {
        "registers": code.registers, "shared_bytes": code.shared_bytes, "spills": code.count("STL|LDL"),
        "hasty_arrivals": hasty_arrivals(code.sass), "barriers_in_data": barriers_in_data(code.sass),
        "variants": len({id(one) for one in recorder.compiled}),
        "products": code.count(r"QGMMA[\\w.]*"), "maxima_of_pairs": code.count(r"HMNMX2|VHMNMX"),
        "shuffles": code.count(r"SHFL[\\w.]*"),
        "carries_previous_sum": len(re.findall(r"%b_previous\\w* = %cst", recorder.compiled[0].asm["ttgir"])),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=[32, 64, 128])
def of_top_p(request: pytest.FixtureRequest) -> dict[str, dict[str, int]]:
    """Return the figures of each compiled kernel, by name."""
    by_kernel = report_of(COMPILE_TOP_P, str(request.param))
    return {name: dict(figures) for name, figures in by_kernel.items()}


def test_top_ps_gluon_kernel_compiles_as_meant(of_top_p: dict[str, dict[str, int]]) -> None:
    scores = of_top_p["_scores_kernel"]
    assert scores["registers"] == 80, "two programs of three warp groups do not fit one multiprocessor"
    assert 2 * (scores["shared_bytes"] + 1024) <= 227 << 10
    assert scores["spills"] == 0
    assert scores["hasty_arrivals"] == 0, "a copy would write over what the last warp's product still reads"
    # A thread of a consumer has 64 pairs of scores. For each query, 8 instructions find the maximum of its pairs, and
    # another finds the larger half.
    assert scores["maxima_of_pairs"] <= 2 * 4 * 10
    assert scores["shuffles"] <= 2 * 4 * 2 + 2, "only sums at the end go from thread to thread"


def test_two_tiles_of_a_group_have_separate_sums(of_top_p: dict[str, dict[str, int]]) -> None:
    """The first tile's sum is the sum before the last step, which loops of both consumers carry from step to step."""
    assert of_top_p["_scores_kernel"]["carries_previous_sum"] == 2


def test_what_start_up_compiles_serves_every_batch_and_keeps_its_barriers(of_top_p: dict[str, dict[str, int]]) -> None:
    assert {name: figures["variants"] for name, figures in of_top_p.items()} == dict.fromkeys(of_top_p, 1)
    assert all(figures["spills"] == figures["barriers_in_data"] == 0 for figures in of_top_p.values())


COMPILE_ANCHORS = """
import json, sys
import torch
from tests.helpers.batches import every_head, new_index, random_batch
from tests.helpers.offline_compiler import Code, Recorder, card
from vllm_sparse_kernels.methods.anchor_attention import method as anchors

recorders = {name: Recorder(getattr(anchors, name)) for name in ("anchor_kernel", "vote_kernel", "stripes_kernel")}
recorders["blocks_kernel"] = Recorder(anchors.blocks_kernel)
for name, recorder in recorders.items():
    setattr(anchors, name, recorder)
head_dim = int(sys.argv[1])
with card(90):
    for lengths in ([(3000, 300)], [(0, 200), (600, 70)]):
        method, batch = anchors.AnchorAttention(), random_batch(lengths, 8, 2, head_dim, 128, torch.bfloat16)
        index = new_index(batch.rows, 8, 64, dict.fromkeys(range(8), method.stripe_layout(batch.rows)))
        method.select(batch.call(index, every_head(method, 8)))
code = Code.of(recorders["anchor_kernel"].compiled[0])
first_exit = code.places("EXIT")[0]
print(json.dumps({
    "loads_before_exit": code.count(r"LDG[\\w.]*", 0, first_exit),
    "query_loads": code.count(r"LDG.E.128"),
    "uses_between_query_loads": code.uses_between(r"LDG.E.128"),
    "variants": {name: len({id(compiled) for compiled in recorder.compiled}) for name, recorder in recorders.items()},
}))
"""


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_programs_of_anchors_wait_for_their_window_and_their_queries_once(head_dim: int) -> None:
    """The compiler moves the loads of the tile's row after the exit of tiles without candidates. If the window's start
    depended on another load, each program would wait for memory once more before it can load its queries. If a query
    were used before the last is loaded, the remaining loads would start only when memory has answered."""
    report = report_of(COMPILE_ANCHORS, str(head_dim))
    assert report["loads_before_exit"] == 1
    assert report["query_loads"] == 128 * head_dim * 2 // (256 * 16)  # a thread of 256 loads 16 bytes at a time
    assert report["uses_between_query_loads"] == []
    assert report["variants"] == dict.fromkeys(report["variants"], 1)
