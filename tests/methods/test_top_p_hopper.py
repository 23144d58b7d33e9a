# SPDX-License-Identifier: Apache-2.0
"""Masses of blocks on Hopper: right on a card, against float32; and compiled without one, as they were meant."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.workspace import Workspace

HEADS, KV_HEADS, GROUP = 8, 2, 4
POISON = 0x7FC00001
COMPILE = """
import json, sys
import torch
from benchmarks.compile_matrix import hasty_arrivals
from vllm_sparse_kernels.methods.top_p import hopper
from vllm_sparse_kernels.methods.top_p.rounding import Rounded
from vllm_sparse_kernels.select.slabs import pairs_of
from vllm_sparse_kernels.rows import Rows
from benchmarks.offline import Code, Recorder, compiling_for
from vllm_sparse_kernels.workspace import Workspace

kept_d = int(sys.argv[1])
names = ("_own_kernel", "_scores_kernel", "_masses_kernel")
recorders = {name: Recorder(getattr(hopper, name)) for name in names}
for name, recorder in recorders.items():
    setattr(hopper, name, recorder)
with compiling_for():
    for context_len, query_len in ((4000, 300), (0, 129), (20000, 1)):
        rows = Rows((0,), (query_len,), (context_len,), torch.zeros(1, 1, dtype=torch.int32))
        num_queries, num_keys = rows.num_tiles * 128, -(-(context_len + query_len) // 128) * 128
        rounded = Rounded(
            torch.zeros(8, num_queries, kept_d, dtype=torch.float8_e4m3fn), torch.zeros(8, num_queries), num_queries,
            torch.zeros(2, num_keys, kept_d, dtype=torch.float8_e4m3fn), torch.zeros(2, num_keys // 32), num_keys,
        )
        pairs = torch.tensor(pairs_of(rows, 0, rows.num_tiles, {0: 0}), dtype=torch.int32).view(-1, 3)
        scratch = hopper.room(8, rows.num_tiles, context_len + query_len, Workspace(torch.device("cpu")))
        heads, kept = torch.arange(8, dtype=torch.int32), torch.zeros(8)
        target = torch.zeros(8, rows.num_tiles, -(-num_keys // 512) * 16)
        hopper.masses(rounded, heads, kept, 0.2, 4, rows.tiles, 0, pairs, scratch, target)
found = {}
for name, recorder in recorders.items():
    code = Code.of(recorder.compiled[0])
    found[name] = {
        "registers": code.registers, "shared_bytes": code.shared_bytes, "spills": code.count("STL|LDL"),
        "hasty_arrivals": hasty_arrivals(code.sass), "variants": len({id(one) for one in recorder.compiled}),
        "products": code.count(r"QGMMA[\\w.]*"), "maxima_of_pairs": code.count(r"HMNMX2|VHMNMX"),
        "shuffles": code.count(r"SHFL[\\w.]*"),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=[64, 128])
def figures(request: pytest.FixtureRequest) -> dict[str, dict[str, int]]:
    """What each kernel comes to, from a process of its own, as this one interprets its kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(request.param)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: dict(one) for name, one in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.full
def test_the_gluon_kernel_compiles_as_meant(figures: dict[str, dict[str, int]]) -> None:
    scores = figures["_scores_kernel"]
    assert scores["registers"] == 80, "two programs of three warp groups do not fit one multiprocessor"
    assert 2 * (scores["shared_bytes"] + 1024) <= 227 << 10
    assert scores["spills"] == 0
    assert scores["hasty_arrivals"] == 0, "a copy would write over what the last warp's product still reads"
    # Of each consumer's 64 pairs of scores a thread 8 instructions a query find the largest, and one its larger half.
    assert scores["maxima_of_pairs"] <= 2 * 4 * 10
    assert scores["shuffles"] <= 2 * 4 * 2 + 2, "only sums at the end go from thread to thread"


@pytest.mark.full
def test_what_start_up_compiles_serves_every_batch(figures: dict[str, dict[str, int]]) -> None:
    assert {name: one["variants"] for name, one in figures.items()} == dict.fromkeys(figures, 1)
    assert all(one["spills"] == 0 for one in figures.values())


def scored(lengths: list[tuple[int, int]], kept_d: int):  # type: ignore[no-untyped-def]
    """Rows and their rounded queries and keys, some of which are looked for: (rows, Rounded, keys in order, starts)."""
    from vllm_sparse_kernels.methods.top_p.rounding import Rounded

    generator = torch.Generator("cuda").manual_seed(kept_d)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    contexts, queries = zip(*lengths, strict=True)
    table = torch.zeros(len(lengths), 1, dtype=torch.int32, device="cuda")
    rows = Rows(tuple(sum(queries[:i]) for i in range(len(queries))), queries, contexts, table)
    starts = [0]
    for seq_len in rows.seq_lens:
        starts.append(starts[-1] + -(-seq_len // 128) * 128)
    energies = torch.linspace(1, -1.5, kept_d, device="cuda").exp()
    q, k = random(HEADS, rows.num_tiles * 128, kept_d), random(KV_HEADS, starts[-1], kept_d) * energies
    hot = torch.randint(0, starts[-1], (starts[-1] // 500 + 4,), generator=generator, device="cuda")
    k[:, hot] += 0.4 * q[::GROUP, hot % q.shape[1]]
    for i, tile in enumerate(rows.tile_list):
        q[:, i * 128 + tile.length_tokens : (i + 1) * 128] = 0
    for start, seq_len in zip(starts, rows.seq_lens, strict=False):
        k[:, start + seq_len : start + -(-seq_len // 128) * 128] = 0
    q_steps = q.abs().amax(-1).clamp(min=1e-20) / 15
    k_steps = k.unflatten(1, (-1, 32)).abs().amax((2, 3)).clamp(min=1e-20) / 15
    q8 = (q / q_steps[..., None]).to(torch.float8_e4m3fn)
    k8 = (k / k_steps.repeat_interleave(32, 1)[..., None]).to(torch.float8_e4m3fn)
    factors = q_steps * (q != 0).any(-1) * (2.5 / math.sqrt(kept_d))
    o_n = torch.arange(128, device="cuda")
    slots = o_n % 32 // 2 * 8 + o_n // 32 * 2 + o_n % 2
    permuted = torch.empty_like(k8).view(torch.uint8).unflatten(1, (-1, 128))
    permuted[:, :, slots] = k8.view(torch.uint8).unflatten(1, (-1, 128))
    permuted = permuted.flatten(1, 2).view(torch.float8_e4m3fn)
    return rows, Rounded(q8, factors, q8.shape[1], permuted, k_steps, k8.shape[1]), k8, starts


def masses(rows, rounded, starts: list[int], first: int, end: int, peak: float = 2.0) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Of tiles [first, end), where nothing that is read was left unwritten."""
    from vllm_sparse_kernels.methods.top_p import hopper
    from vllm_sparse_kernels.select.slabs import pairs_of

    reach = max(tile.last_position for tile in rows.tile_list[first:end]) + 1
    scratch = hopper.room(HEADS, end - first, reach, Workspace(torch.device("cuda")))
    target = torch.empty(HEADS, end - first, -(-reach // 512) * 16, device="cuda")
    for one in (*scratch, target):
        one.view(torch.int32).fill_(POISON)
    pairs = torch.tensor(
        pairs_of(rows, first, end, dict(enumerate(starts[:-1]))), dtype=torch.int32, device="cuda"
    ).view(-1, 3)
    heads, kept = torch.arange(HEADS, dtype=torch.int32, device="cuda"), torch.full((HEADS,), 0.95, device="cuda")
    hopper.masses(rounded, heads, kept, peak, GROUP, rows.tiles, first, pairs, scratch, target)
    return target


def shares(rows, rounded, k8: torch.Tensor, starts: list[int], i_tile: int, head: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """In float32: of each query of a tile and each block. [queries, blocks]"""
    tile = rows.tile_list[i_tile]
    start, num_blocks = starts[tile.row], tile.last_position // 32 + 1
    queries = slice(i_tile * 128, i_tile * 128 + tile.length_tokens)
    keys = k8[head // GROUP, start : start + 32 * num_blocks].float()
    scores = rounded.queries[head, queries].double() @ keys.double().T
    positions = tile.position + torch.arange(tile.length_tokens, device="cuda")
    future = torch.arange(32 * num_blocks, device="cuda") > positions[:, None]
    steps = rounded.steps[head // GROUP, start // 32 : start // 32 + num_blocks].double()
    largest = scores.masked_fill(future, -math.inf).unflatten(1, (-1, 32)).amax(2)
    seen = largest > -math.inf
    logs = largest.where(seen, torch.zeros_like(largest)) * steps * rounded.factors[head, queries, None]
    return (logs.where(seen, torch.full_like(logs, -math.inf)) * math.log(2)).softmax(1).float()


@pytest.mark.gpu
@pytest.mark.parametrize("kept_d", [32, 64, 128, 256])
@pytest.mark.parametrize("lengths", [[(0, 1), (77, 333), (1000, 129), (8300, 200)], [(20000, 257)], [(128, 1024)]])
def test_masses_are_the_references(lengths: list[tuple[int, int]], kept_d: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    rows, rounded, k8, starts = scored(lengths, kept_d)
    found = masses(rows, rounded, starts, 0, rows.num_tiles)
    for i_tile, tile in enumerate(rows.tile_list):
        own = tile.position // 128 * 4
        for head in range(HEADS):
            expected = shares(rows, rounded, k8, starts, i_tile, head)
            mean, spread = expected.mean(0), expected.square().sum(0).sqrt() / tile.length_tokens
            ours = found[head, i_tile, : len(mean)]
            # Two bits of mantissa: off by up to a ninth each, and by chance in either direction.
            assert ((ours - mean).abs() <= 0.02 * mean + 0.13 * spread + 1e-6)[:own].all()
            torch.testing.assert_close(ours[own], mean[own:].sum(), rtol=0.01, atol=1e-5)
            assert (ours[own + 1 :] == 0).all()
            assert abs(float(ours.sum()) - 1) < 0.12


@pytest.mark.gpu
def test_masses_are_negative_where_a_query_reaches_the_peak() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    rows, rounded, k8, starts = scored([(77, 333), (8300, 200)], 64)
    plain, marked = (masses(rows, rounded, starts, 0, rows.num_tiles, peak) for peak in (2.0, 0.2))
    several = 0
    for i_tile, tile in enumerate(rows.tile_list):
        own = tile.position // 128 * 4
        assert torch.equal(marked[:, i_tile, : own + 1].abs(), plain[:, i_tile, : own + 1])
        for head in range(HEADS):
            most, found = shares(rows, rounded, k8, starts, i_tile, head).amax(0)[:own], marked[head, i_tile, :own] < 0
            assert bool(found[most > 0.2 * 1.15].all())
            assert not bool(found[most < 0.2 / 1.15].any())
            several += int(found.sum())
    assert several > 10


@pytest.mark.gpu
def test_masses_do_not_depend_on_what_runs_beside_them() -> None:
    """Bit for bit: tiles by themselves, in pairs that begin elsewhere, and twice."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    rows, rounded, _, starts = scored([(300, 40), (9000, 700)], 64)
    whole = masses(rows, rounded, starts, 0, rows.num_tiles)
    for first, end in ((0, rows.num_tiles), (2, 5), (3, 4), (4, rows.num_tiles)):
        part = masses(rows, rounded, starts, first, end)
        for i_tile in range(first, end):
            num_blocks = rows.tile_list[i_tile].last_position // 32 + 1
            assert torch.equal(part[:, i_tile - first, :num_blocks], whole[:, i_tile, :num_blocks])
