# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for Hopper without a GPU: properties that make passes over the last queries, SALE and top_p fast."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.helpers.hopper_code import barriers_in_data
from vllm_sparse_kernels.methods import METHODS

pytestmark = pytest.mark.full

THREADS = {"split_lse_kernel": 512, "sums_kernel": 128}
REGISTERS, SHARED_BYTES = 1 << 16, 228 << 10
"""Registers and shared memory of a multiprocessor, which reserves 1 KB of the latter for each program."""


def printed_by(*arguments: str) -> str:
    """Return the last line that a Python process prints. Unlike this process, it does not interpret kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    report = json.loads(printed_by("-m", "tests.helpers.compiled_sums"))
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("kernel", THREADS)
def test_passes_over_the_last_queries(figures: dict[str, dict[str, int]], kernel: str) -> None:
    """Keys are copied a tile ahead. If a tile's address depended on a look-up, each tile would wait for the full memory
    latency. Two programs fit a multiprocessor, so exponentials of one program overlap with products of the other."""
    assert figures[kernel]["copies_ahead"] >= 1
    assert 2 * (figures[kernel]["shared_bytes"] + 1024) <= SHARED_BYTES
    assert 2 * THREADS[kernel] * figures[kernel]["registers"] <= REGISTERS


def test_every_kernel_that_selects_compiles() -> None:
    """Other tests run kernels in the interpreter, which accepts code that the compiler refuses."""
    report = json.loads(printed_by("-m", "tests.helpers.compiled_methods", "90", "128"))
    assert report.keys() == METHODS.keys()
    assert all("attend_kernel" in kernels for kernels in report.values())
    assert len(report["share_prefill"]) > len(report["flex_vertical_slash"])  # kernels for heads that share
    assert report["top_p"].keys() >= {"_choose_kernel", "_floor_kernel", "_list_kernel", "_maps_kernel"}


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
    shared = int(printed_by("-c", COMPILE, str(head_dim), str(block_tokens), str(cubin)))
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
from vllm_sparse_kernels.methods.top_p.rounding import Rounded, Selected
from vllm_sparse_kernels.selection.slabs import SET_FIELDS, Run, tile_sets_of
from vllm_sparse_kernels.rows import Rows
from tests.helpers.offline_compiler import Code, Recorder, compiling_for
from vllm_sparse_kernels.workspace import Workspace

kept_d, scored = map(int, sys.argv[1:])
names = ("_diagonal_kernel", "_scores_kernel", "_masses_kernel")
recorders = {name: Recorder(getattr(hopper, name)) for name in names}
for name, recorder in recorders.items():
    setattr(hopper, name, recorder)
with compiling_for():
    for context_len, query_len in ((4000, 300), (0, 129), (20000, 1)):
        rows = Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32))
        num_queries, num_keys = rows.num_tiles * scored, -(-(context_len + query_len) // 128) * 128
        rounded = Rounded(
            torch.zeros(8, num_queries, kept_d, dtype=torch.float8_e4m3fn), torch.zeros(8, num_queries), num_queries,
            torch.zeros(2, num_keys, kept_d, dtype=torch.float8_e4m3fn), torch.zeros(2, num_keys // 32), num_keys,
        )
        flat = tile_sets_of(rows, 0, rows.num_tiles, {0: 0}, hopper.set_tiles(scored))
        sets = torch.tensor(flat, dtype=torch.int32).view(-1, SET_FIELDS)
        workspace = Workspace(torch.device("cpu"))
        scratch = hopper.allocate_scratch(8, rows.num_tiles, scored, context_len + query_len, workspace)
        selected = Selected(torch.arange(8, dtype=torch.int32), torch.zeros(8), 0.2, 4)
        run = Run(0, rows.num_tiles, context_len + query_len, sets)
        target = torch.zeros(8, rows.num_tiles, -(-num_keys // 512) * 16)
        hopper.compute_masses(rounded, selected, rows.tiles, run, scratch, target)
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


@pytest.fixture(
    scope="module", params=[(32, 128), (64, 128), (128, 128), pytest.param((32, 64), marks=pytest.mark.full), (64, 64)]
)
def of_top_p(request: pytest.FixtureRequest) -> dict[str, dict[str, int]]:
    """Return the figures of each compiled kernel, by name."""
    by_kernel = json.loads(printed_by("-c", COMPILE_TOP_P, *map(str, request.param)))
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


def test_two_tiles_of_a_group_have_separate_sums(
    of_top_p: dict[str, dict[str, int]], request: pytest.FixtureRequest
) -> None:
    """The first tile's sum is the sum before the last step, which loops of both consumers carry from step to step."""
    _, scored = request.node.callspec.params["of_top_p"]
    assert of_top_p["_scores_kernel"]["carries_previous_sum"] == (2 if scored == 64 else 0)


def test_what_start_up_compiles_serves_every_batch_and_keeps_its_barriers(of_top_p: dict[str, dict[str, int]]) -> None:
    assert {name: figures["variants"] for name, figures in of_top_p.items()} == dict.fromkeys(of_top_p, 1)
    assert all(figures["spills"] == figures["barriers_in_data"] == 0 for figures in of_top_p.values())


COMPILE_FLOOR = """
import json
import torch
from vllm_sparse_kernels import share_counts
from vllm_sparse_kernels.methods.top_p import floor, hopper, portable
from vllm_sparse_kernels.methods.top_p.choice import mass_width
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.share_counts import SHARE_FIELDS
from tests.helpers.offline_compiler import Code, Recorder, compiling_for
from vllm_sparse_kernels.workspace import Workspace

adds = floor._floor_kernel = Recorder(floor._floor_kernel)
counts = floor._count_kernel = Recorder(floor._count_kernel)
sums = share_counts._add_share_counts_kernel = Recorder(share_counts._add_share_counts_kernel)
with compiling_for():
    for context_len, query_len in ((4000, 300), (0, 129), (20000, 1)):
        rows = Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32))
        reach = context_len + query_len
        scratch = hopper.allocate_scratch(8, rows.num_tiles, 64, reach, Workspace(torch.device("cpu")))
        marks = torch.zeros(8, rows.num_tiles, mass_width(reach), dtype=torch.uint8)
        numbers = torch.zeros(8)
        stored = hopper.stored_shares(scratch)
        floor.add_for_floor(stored, marks, numbers, numbers, rows.tiles, 0, 128, 160)
        shares, by_row = floor.FloorShares(numbers, numbers), torch.zeros(1, SHARE_FIELDS.value, dtype=torch.int64)
        floor.count_kept_shares(stored, marks, shares, rows.tiles, 0, by_row)
        share_counts.add_share_counts(by_row, by_row.clone(), 0)
    num_by_bytes = len(counts.compiled)
    scratch = portable.allocate_scratch(8, rows.num_tiles, 64, reach, Workspace(torch.device("cpu")))
    floor.count_kept_shares(portable.stored_shares(scratch), marks, shares, rows.tiles, 0, by_row)
    share_counts.add_share_counts(by_row.expand(5, -1), by_row, 3)
assert len(counts.compiled) == num_by_bytes + 1
counts.compiled.pop()  # the variant for half-precision scores
figures = {}
for name, recorder in (("adds", adds), ("counts", counts), ("sums", sums)):
    code = Code.of(recorder.compiled[0])
    figures[name] = {
        "registers": code.registers, "spills": code.count("STL|LDL"), "shared_bytes": code.shared_bytes,
        "variants": len({id(compiled) for compiled in recorder.compiled}),
    }
print(json.dumps(figures))
"""


def test_the_floor_over_bytes_compiles_once_and_five_programs_fit() -> None:
    """The kernels wait for memory, so other programs of the multiprocessor must have loads in flight."""
    by_kernel = json.loads(printed_by("-c", COMPILE_FLOOR))
    for kernel, programs in (("adds", 5), ("counts", 5), ("sums", 6)):
        figures = by_kernel[kernel]
        assert figures["variants"] == 1, kernel
        assert figures["spills"] == 0, kernel
        assert programs * 128 * figures["registers"] <= REGISTERS, kernel
        assert programs * (figures["shared_bytes"] + 1024) <= SHARED_BYTES, kernel


COMPILE_LOW_RANK = """
import json
import torch
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.methods.top_p import low_rank, rounding
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.slabs import KeySlab
from tests.helpers.batches import random_batch
from tests.helpers.offline_compiler import Code, Recorder, compiling_for
from vllm_sparse_kernels.workspace import Workspace

kernels = {
    low_rank: ("_products_kernel", "_second_moments_kernel", "_maps_kernel"),
    rounding: ("_round_queries_kernel", "_round_keys_kernel"),
}
recorders = {name: Recorder(getattr(module, name)) for module, names in kernels.items() for name in names}
for module, names in kernels.items():
    for name in names:
        setattr(module, name, recorders[name])
with compiling_for():
    for lengths in ([(4000, 300)], [(20000, 1), (0, 129)]):
        batch = random_batch(lengths, 8, 2, 128, 16, torch.bfloat16)
        inputs = LayerInputs(batch.q, batch.cache, batch.rows, batch.scale)
        workspace = Workspace(torch.device("cpu"))
        storage = rounding.Storage(low_rank.rank_of(128), True, 128, torch.float8_e4m3fn)
        shares = torch.zeros(len(lengths), 16, dtype=torch.int64)
        moments = rounding.row_moments(inputs, storage, workspace, shares)
        rounding.round_queries(inputs, moments, torch.arange(8, dtype=torch.int32), storage, workspace)
        starts = torch.zeros(len(lengths), dtype=torch.int32)
        slab = KeySlab(0, starts, 32768, 20001, [])
        rounding.round_keys(inputs, slab, moments, storage, True, workspace)
figures = {}
for name, recorder in recorders.items():
    code = Code.of(recorder.compiled[0])
    figures[name] = {
        "registers": code.registers, "spills": code.count("STL|LDL"), "shared_bytes": code.shared_bytes,
        "variants": len({id(compiled) for compiled in recorder.compiled}),
    }
print(json.dumps(figures))
"""


def test_kernels_of_low_rank_compile_once_and_leave_room_for_others() -> None:
    """Registers and shared memory allow several programs per multiprocessor, which take turns waiting for memory."""
    figures = json.loads(printed_by("-c", COMPILE_LOW_RANK))
    assert {name: kernel["variants"] for name, kernel in figures.items()} == dict.fromkeys(figures, 1)
    assert all(kernel["spills"] == 0 for kernel in figures.values())
    for name, programs in {"_products_kernel": 2, "_round_queries_kernel": 4, "_round_keys_kernel": 4}.items():
        assert programs * 256 * figures[name]["registers"] <= REGISTERS, name
        assert programs * (figures[name]["shared_bytes"] + 1024) <= SHARED_BYTES, name
    assert figures["_maps_kernel"]["shared_bytes"] <= 99 << 10, "cards of less shared memory run the same program"


COMPILE_ANCHORS = """
import json, sys
import torch
from tests.helpers.batches import random_batch
from tests.helpers.offline_compiler import Code, Recorder, card
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.anchor_attention import method as anchors

recorders = {name: Recorder(getattr(anchors, name)) for name in ("anchor_kernel", "vote_kernel", "stripes_kernel")}
recorders["blocks_kernel"] = Recorder(anchors.blocks_kernel)
for name, recorder in recorders.items():
    setattr(anchors, name, recorder)
head_dim = int(sys.argv[1])
with card(90):
    for lengths in ([(3000, 300)], [(0, 200), (600, 70)]):
        method, batch = anchors.AnchorAttention(), random_batch(lengths, 8, 2, head_dim, 128, torch.bfloat16)
        index = SparseIndex.allocate(batch.rows, 8, 64, dict.fromkeys(range(8), method.stripe_layout(batch.rows)))
        method.select(batch.q, batch.cache, index, torch.arange(8, dtype=torch.int32), batch.scale)
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
    report = json.loads(printed_by("-c", COMPILE_ANCHORS, str(head_dim)))
    assert report["loads_before_exit"] == 1
    assert report["query_loads"] == 128 * head_dim * 2 // (256 * 16)  # a thread of 256 loads 16 bytes at a time
    assert report["uses_between_query_loads"] == []
    assert report["variants"] == dict.fromkeys(report["variants"], 1)
