# SPDX-License-Identifier: Apache-2.0
"""``top_p`` of MLA's prefill by kernels: estimates near the exact ones, and the reference's blocks for the same
estimates."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from tests.helpers.mla_calls import HEADS, KEY_DIM, POISON, SCALE, Inputs, inputs_of, prefill
from vllm_sparse_kernels.methods.top_p.scored import HALF_SCORED
from vllm_sparse_kernels.mla import (
    MlaAShape,
    MlaMethod,
    MlaPrefill,
    MlaRow,
    MlaTopP,
    prefill as prefill_module,
    products,
    reference,
    selection,
)
from vllm_sparse_kernels.mla.calls import BLOCK_TOKENS, SINK_TOKENS, Call
from vllm_sparse_kernels.mla.products import ProductLaunch
from vllm_sparse_kernels.mla.reference import RunningSums
from vllm_sparse_kernels.mla.selection import Selection
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div

METHOD = MlaTopP(0.8)
HALF = METHOD._replace(queries="half")
CONTEXT, NEW = 501, 140

STEP: list[tuple[bool, list[MlaRow]]] = [
    (True, [MlaRow(3, NEW, CONTEXT, 0, 2, NEW, CONTEXT), MlaRow(150, 200, 0, 140, 145, 200, 0)]),
    (False, [MlaRow(3, NEW, CONTEXT, 0, 1, 300, 0)]),
    (False, [MlaRow(3, NEW, CONTEXT, 0, 0, 201, 300)]),
]
"""A step of two rows: new tokens, then two chunks of the context of one of them."""


def selection_of(engine: MlaPrefill) -> Selection:
    assert engine._selection is not None
    return engine._selection


def stored_maxima(
    engine: MlaPrefill, method: MlaTopP, rows: Sequence[MlaRow], is_causal: bool
) -> dict[tuple[int, int], torch.Tensor]:
    """Return the kernels' scores [heads, scored queries, blocks] of each tile, by first query and offset.

    They are -inf for blocks without a key up to the query.
    """
    selection = selection_of(engine)
    assert selection.heads_at_once == HEADS
    runs = Call.of(rows, engine.device).runs(selection.most_tiles, selection.most_blocks)
    assert len(runs) == 1
    tiles, width, num_scored = runs[0].tiles.tolist(), runs[0].width, method.num_scored
    shape = (HEADS, len(tiles), width, num_scored)
    stored = selection.scratch.products[: HEADS * len(tiles) * width * num_scored].view(shape).float()
    queries, keys = selection.rounded
    maxima = {}
    for i, (query, length, offset, _, _, key_start, num_keys, _) in enumerate(tiles):
        reached = ceil_div(min(num_keys, offset + length) if is_causal else num_keys, BLOCK_TOKENS)
        scored = query + reference.scored_queries(method, length, engine.device)
        largest = stored[:, i, :reached, : len(scored)].transpose(1, 2)
        blocks = key_start + BLOCK_TOKENS * torch.arange(reached, device=engine.device)
        scales = queries.scales[:, scored, None] * keys.scales[:, None, blocks]
        maxima[query, offset] = (largest * scales + queries.shifts[:, scored, None]).masked_fill(
            largest == -torch.inf, -torch.inf
        )
    return maxima


def listed_blocks(engine: MlaPrefill, rows: Sequence[MlaRow]) -> dict[int, list[set[int]]]:
    """Return the kernels' blocks of each tile and head, by the tile's first query."""
    selection = selection_of(engine)
    (run,) = Call.of(rows, engine.device).runs(selection.most_tiles, selection.most_blocks)
    num_tiles, width = run.num_tiles, run.width
    counts = selection.counts[: HEADS * num_tiles].view(HEADS, num_tiles).tolist()
    ids = selection.ids[: HEADS * num_tiles * width].view(HEADS, num_tiles, width).tolist()
    lists = {}
    for i, tile in enumerate(run.tiles.tolist()):
        lists[tile[0]] = [set(ids[head][i][: counts[head][i]]) for head in range(HEADS)]
        assert all(ids[head][i][: counts[head][i]] == sorted(lists[tile[0]][head]) for head in range(HEADS))
    return lists


def attend(engine: MlaPrefill, method: MlaMethod, rows: Sequence[MlaRow], is_causal: bool, inputs: Inputs) -> int:
    """Run a call and return the kept pairs."""
    kept = torch.zeros(1, dtype=torch.int64, device=inputs.q.device)
    engine.attend(
        method, inputs.q, inputs.k, inputs.v, rows, is_causal=is_causal, out=inputs.out, lse=inputs.lse, kept_pairs=kept
    )
    return int(kept)


def flatten_channels(k: torch.Tensor, varying: int) -> None:
    """Make keys differ in some channels only. All channels have a large mean, which shifts all scores of a query."""
    flat = torch.randperm(KEY_DIM, generator=torch.Generator().manual_seed(7))[varying:].to(k.device)
    k[..., flat] *= 0.02
    k += (torch.arange(KEY_DIM, device=k.device) % 5 - 2).to(k.dtype)


def check_step(engine: MlaPrefill, method: MlaTopP, step: Sequence[tuple[bool, list[MlaRow]]], device: str) -> None:
    """Run a step's calls. Compare estimates, blocks, running sums, results and kept pairs with the reference."""
    dtype = engine.dtype
    sums = RunningSums.zeros(HEADS, 2304, torch.device(device))
    queries = inputs_of(step[0][1], device, dtype)
    for seed, (is_causal, rows) in enumerate(step):
        inputs = inputs_of(rows, device, dtype, seed)
        if method.channels < KEY_DIM:
            flatten_channels(inputs.k, method.channels)
        if not is_causal:
            inputs = inputs._replace(
                q=queries.q, out=torch.full_like(queries.out, POISON), lse=torch.full_like(queries.lse, POISON)
            )
        pairs = attend(engine, method, rows, is_causal, inputs)
        maxima, lists = stored_maxima(engine, method, rows, is_causal), listed_blocks(engine, rows)
        expected_pairs = 0
        written = torch.zeros(len(inputs.q), dtype=torch.bool, device=device)
        for row in rows:
            if is_causal:
                sums.part(row.state_start, row.num_queries).clear()
            for offset in range(0, row.num_queries, TILE_TOKENS):
                length = min(TILE_TOKENS, row.num_queries - offset)
                tile = slice(row.query_start + offset, row.query_start + offset + length)
                written[tile] = True
                keys = slice(row.key_start, row.key_start + row.num_keys)
                scores = torch.einsum("qhd,khd->hqk", inputs.q[tile].float(), inputs.k[keys].float()) * SCALE
                allowed = reference._causal(row, offset, length, torch.device(device))
                scores = scores.masked_fill(~allowed, -torch.inf)
                by_kernels = maxima[tile.start, offset]
                exact = reference.block_maxima(scores[:, reference.scored_queries(method, length, scores.device)])
                exact = exact[..., : by_kernels.shape[-1]]
                torch.testing.assert_close(by_kernels == -torch.inf, exact == -torch.inf)
                errors = (by_kernels - exact)[exact > -torch.inf]
                assert errors.abs().max() < 1.5
                assert errors.square().mean().sqrt() < 0.25

                part = sums.part(row.state_start + offset, length)
                kept = reference.keep_blocks(method, by_kernels, part, row, offset, is_causal)
                for head in range(HEADS):
                    assert lists[tile.start][head] == set(kept[head].nonzero().flatten().tolist())
                now = engine.sums.part(row.state_start + offset, length)
                torch.testing.assert_close(now.top, part.top)
                torch.testing.assert_close(now.total, part.total)
                torch.testing.assert_close(now.dropped, part.dropped, rtol=1e-4, atol=1e-5)

                pad = row.num_keys - min(row.num_keys, kept.shape[1] * BLOCK_TOKENS)
                by_key = kept.repeat_interleave(BLOCK_TOKENS, 1)[:, None, : row.num_keys]
                by_key = torch.nn.functional.pad(by_key, (0, pad)) & allowed
                expected_pairs += int(by_key.sum())
                scores = scores.masked_fill(~by_key, -torch.inf)
                out = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), inputs.v[keys].float())
                tolerance = 2e-4 if dtype == torch.float32 else 1e-2
                torch.testing.assert_close(inputs.out[tile].float(), out, rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(inputs.lse[:, tile], scores.logsumexp(-1), rtol=tolerance, atol=tolerance)
        assert pairs == expected_pairs
        assert (inputs.out[~written] == POISON).all()
        assert (inputs.lse[:, ~written] == POISON).all()


@pytest.mark.parametrize(
    "method",
    [METHOD, MlaTopP(0.95, 0.3, 128), MlaTopP(0.9, channels=64), HALF, MlaTopP(0.95, 0.3, 128, "half")],
    ids=str,
)
def test_kernels_keep_the_references_blocks(method: MlaTopP, device: str) -> None:
    engine = prefill(device, torch.float32 if device == "cpu" else torch.float16)
    check_step(engine, method, STEP, device)


@pytest.mark.parametrize(
    ("method", "size", "context"),
    [
        (METHOD, 1, 3), (METHOD, 63, 189), (METHOD, 5, 2049), (HALF, 1, 3), (HALF, 2, 65), (HALF, 63, 189),
        (HALF, 129, 130), pytest.param(HALF, 2049, 64, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_sizes(method: MlaTopP, size: int, context: int, device: str) -> None:
    engine = prefill(device, torch.float32 if device == "cpu" else torch.float16)
    step = [
        (True, [MlaRow(1, size, context, 0, 3, size, context)]),
        (False, [MlaRow(1, size, context, 0, 0, context, 0)]),
    ]
    check_step(engine, method, step, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides itself")
def test_sets_of_tiles_and_bulk_copies_give_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper: a program has 256 scored queries of up to four tiles, and boxes of keys reach into other rows."""
    launch = ProductLaunch(256, 128, "widened", num_warps=8, num_stages=2, maxnreg=None)
    monkeypatch.setattr(products, "product_launch", lambda *args: launch)
    copies: list[bool] = []
    matrices = products._matrices
    monkeypatch.setattr(products, "has_bulk_copies", lambda device: True)
    monkeypatch.setattr(
        products, "_matrices", lambda *args: copies.append(matrices(*args)[0] is not None) or matrices(*args)
    )
    new = [MlaRow(1, 523, 70, 0, 3, 523, 70), MlaRow(524, 130, 0, 523, 526, 130, 0)]
    chunk = [MlaRow(1, 523, 70, 0, 2, 70, 0)]
    check_step(prefill("cpu"), HALF, [(True, new), (False, chunk)], "cpu")
    check_step(prefill("cpu"), HALF._replace(channels=64), [(True, new[1:])], "cpu")
    check_step(prefill("cpu"), METHOD, [(True, new)], "cpu")
    assert copies == [True] * 4


@pytest.mark.parametrize(
    ("length", "expected"), [(1, [0]), (2, [1]), (3, [1, 2]), (5, [1, 3, 4]), (128, list(range(1, 128, 2)))]
)
def test_half_of_the_queries_are_the_second_of_each_two(length: int, expected: list[int]) -> None:
    assert reference.scored_queries(HALF, length).tolist() == expected
    assert reference.scored_queries(METHOD, length).tolist() == list(range(length))


def test_new_tokens_restart_the_sums_of_scored_queries_only(device: str) -> None:
    """The next layer uses the same engine, which still has the sums of this layer."""
    engine, fresh = (prefill(device, torch.float32 if device == "cpu" else torch.float16) for _ in range(2))
    row = MlaRow(0, 3, 100, 0, 0, 3, 100)
    attend(fresh, HALF, [row], True, inputs_of([row], device, engine.dtype))
    for x in engine.sums:
        x.fill_(3.0)
    attend(engine, HALF, [row], True, inputs_of([row], device, engine.dtype))
    for now, expected in zip(engine.sums, fresh.sums, strict=True):
        assert torch.equal(now[:, 1:3], expected[:, 1:3])
        assert (now[:, 0] == 3).all()
    assert (fresh.sums.total[:, 1:3] > 0).all()
    assert (fresh.sums.total[:, 0] == 0).all()
    assert (fresh.sums.top[:, 0] == -torch.inf).all()


def test_sets_have_neighbouring_tiles_of_a_row() -> None:
    """The set with the longest reach comes first; a run has whole sets."""
    rows = [MlaRow(0, 129, 0, 0, 0, 129, 0), MlaRow(129, 700, 0, 129, 129, 700, 0)]
    call = Call.of(rows, torch.device("cpu"))
    assert call.tiles[:, 0].tolist() == [769, 641, 513, 385, 257, 129, 128, 0]
    assert call.sets.tolist() == [[0, 4], [4, 2], [6, 2]]
    whole = call.whole()
    assert (whole.num_tiles, whole.num_sets, whole.width) == (8, 3, 11)
    runs = call.runs(most_tiles=6, most_blocks=1000)
    assert [(run.first_tile, run.num_tiles, run.num_sets, run.width) for run in runs] == [(0, 6, 2, 11), (6, 2, 1, 3)]
    assert [run.sets.tolist() for run in runs] == [[[0, 4], [4, 2]], [[6, 2]]]
    runs = call.runs(most_tiles=100, most_blocks=44)
    assert [(run.first_tile, run.num_tiles) for run in runs] == [(0, 4), (4, 4)]


def test_products_of_half_of_the_queries_need_half_of_the_memory_and_nothing_else_fits_it(device: str) -> None:
    """For each head. Where not all heads fit, more of them are selected at a time."""

    def nbytes(engine: MlaPrefill) -> int:
        return selection_of(engine).scratch.products.nbytes

    dtype = torch.float32 if device == "cpu" else torch.float16
    half = prefill(device, dtype, num_scored=HALF_SCORED)
    assert nbytes(half) == nbytes(prefill(device, dtype)) // 2
    row = MlaRow(0, 3, 100, 0, 0, 3, 100)
    attend(half, HALF, [row], True, inputs_of([row], device, dtype))
    attend(half, MlaAShape(1, 2), [row], True, inputs_of([row], device, dtype))
    with pytest.raises(ValueError, match=r"expected at most 64 scored queries of a tile: .* num_scored 128"):
        attend(half, METHOD, [row], True, inputs_of([row], device, dtype))
    with pytest.raises(ValueError, match=r"num_scored=32.*, expected num_scored 128, 64, or 0 without top_p"):
        prefill(device, dtype, num_scored=32)


def test_without_scored_queries_no_selection_is_allocated_and_top_p_is_refused(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    engine = prefill(device, dtype, num_scored=0)
    assert engine._selection is None
    row = MlaRow(0, 3, 100, 0, 0, 3, 100)
    others = prefill(device, dtype)
    for method in MlaAShape(1, 2), MlaTopP(1.0):
        inputs, expected = (inputs_of([row], device, dtype) for _ in range(2))
        assert attend(engine, method, [row], True, inputs) == attend(others, method, [row], True, expected)
        assert torch.equal(inputs.out, expected.out)
    for method, num_scored in (METHOD, 128), (HALF, 64):
        says = rf"expected at most 0 scored queries of a tile: .* num_scored {num_scored}"
        with pytest.raises(ValueError, match=says):
            attend(engine, method, [row], True, inputs)


def run_step(engine: MlaPrefill, method: MlaTopP, device: str) -> tuple[list[int], list[torch.Tensor]]:
    """Return the kept pairs and the results of each call of ``STEP``, and the running sums at its end."""
    counts, tensors = [], []
    queries = inputs_of(STEP[0][1], device, engine.dtype)
    for seed, (is_causal, rows) in enumerate(STEP):
        inputs = inputs_of(rows, device, engine.dtype, seed)
        inputs = inputs._replace(q=queries.q, out=torch.zeros_like(queries.out), lse=torch.zeros_like(queries.lse))
        counts.append(attend(engine, method, rows, is_causal, inputs))
        tensors += [inputs.out, inputs.lse]
    return counts, [*tensors, *(x[:, :340].clone() for x in engine.sums)]


class StepResult(NamedTuple):
    """What ``run_step`` returns for ``METHOD``, and the engine that ran it."""

    engine: MlaPrefill
    counts: list[int]
    tensors: list[torch.Tensor]


@pytest.fixture(scope="module")
def step_result(device: str) -> StepResult:
    engine = prefill(device, torch.float32 if device == "cpu" else torch.float16)
    return StepResult(engine, *run_step(engine, METHOD, device))


def test_something_is_dropped_and_new_tokens_restart_the_sums(step_result: StepResult, device: str) -> None:
    counts, tensors = run_step(step_result.engine, METHOD, device)
    assert counts == step_result.counts
    for first, second in zip(step_result.tensors, tensors, strict=True):
        assert torch.equal(first, second)
    assert sum(counts) < HEADS * (NEW * (NEW + 1) // 2 + 200 * 201 // 2 + NEW * CONTEXT)
    _, total, dropped = tensors[-3:]
    for tile in (dropped / total)[:, :NEW].split(TILE_TOKENS, 1):
        assert 0.05 < float(tile.mean(1).max()) <= 1 - METHOD.kept_mass + 1e-5


def test_parts_do_not_show(step_result: StepResult, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and sets of tiles one at a time, and short spans of keys, give the same bits."""
    monkeypatch.setattr(selection, "SCRATCH_BYTES", 0)
    monkeypatch.setattr(products, "SPAN_TOKENS", 128)
    monkeypatch.setattr(prefill_module, "MOST_ROWS", 1)
    engine = prefill(device, step_result.engine.dtype)
    part = selection_of(engine)
    assert part.heads_at_once == 1 < HEADS
    part.most_tiles = 2
    counts, tensors = run_step(engine, METHOD, device)
    assert counts == step_result.counts
    for part_tensor, tensor in zip(tensors, step_result.tensors, strict=True):
        assert torch.equal(part_tensor, tensor)


@pytest.mark.parametrize("method", [METHOD, HALF], ids=str)
def test_runs_of_tiles_do_not_show(method: MlaTopP, device: str) -> None:
    """Runs after the first begin within the tiles of the call."""
    rows = [MlaRow(0, 129, 0, 0, 0, 129, 0), MlaRow(129, 700, 0, 129, 129, 700, 0)]
    results = []
    for most_tiles in None, 4:
        engine = prefill(device, torch.float32 if device == "cpu" else torch.float16)
        part = selection_of(engine)
        part.most_tiles = most_tiles or part.most_tiles
        runs = Call.of(rows, engine.device).runs(part.most_tiles, part.most_blocks)
        assert [run.first_tile for run in runs] == ([0] if most_tiles is None else [0, 4])
        inputs = inputs_of(rows, device, engine.dtype)
        count = attend(engine, method, rows, True, inputs)
        results.append((count, [inputs.out, inputs.lse, *engine.sums]))
    (count, tensors), (part_count, part_tensors) = results
    assert part_count == count < HEADS * (129 * 130 // 2 + 700 * 701 // 2)
    for part_tensor, tensor in zip(part_tensors, tensors, strict=True):
        assert torch.equal(part_tensor, tensor)


@pytest.mark.parametrize("by_kernels", [True, False])
def test_other_methods_restart_the_sums_too(by_kernels: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of ``top_p`` after new tokens that are dense never sees the sums of an earlier layer."""
    if not by_kernels:
        monkeypatch.setattr(MlaPrefill, "use_kernels", lambda self: None)
    engine = prefill(device, torch.float32 if device == "cpu" else torch.float16)
    earlier = MlaRow(0, 1, 0, 0, 0, 1, 0)
    attend(engine, METHOD, [earlier], True, inputs_of([earlier], device, engine.dtype))
    for x in engine.sums:
        x.fill_(3.0)
    row = MlaRow(0, 70, 100, 5, 0, 70, 100)
    attend(engine, MlaTopP(1.0), [row], True, inputs_of([row], device, engine.dtype))
    assert (engine.sums.top[:, 5:75] == -torch.inf).all()
    assert (engine.sums.total[:, 5:75] == 0).all()
    assert (engine.sums.dropped[:, 5:75] == 0).all()
    assert (engine.sums.total[:, :5] == 3).all()
    assert (engine.sums.total[:, 75:] == 3).all()


def test_sums_restart_once_for_neighbouring_rows_and_never_without_top_p(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prefill(device, torch.float32 if device == "cpu" else torch.float16)
    clear, ranges = RunningSums.clear, []

    def record(sums: RunningSums) -> None:
        ranges.append((sums.top.storage_offset() % engine.sums.top.stride(0), sums.top.shape[1]))
        clear(sums)

    monkeypatch.setattr(RunningSums, "clear", record)
    rows = [MlaRow(5, 4, 0, 5, 5, 4, 0), MlaRow(0, 5, 9, 0, 0, 5, 9), MlaRow(10, 3, 0, 10, 10, 3, 0)]
    inputs = inputs_of(rows, device, engine.dtype)
    attend(engine, MlaAShape(1, 2), rows, True, inputs)
    assert ranges == []
    attend(engine, METHOD, rows[:1], True, inputs)
    attend(engine, MlaAShape(1, 2), rows, True, inputs)
    assert ranges == [(0, 9), (10, 3)]


def test_most_share_limits_blocks_for_their_mass(device: str) -> None:
    """Sinks and the diagonal are kept besides. The tile then drops more than its budget."""
    engine = prefill(device, torch.float32 if device == "cpu" else torch.float16)
    step = [
        (True, [MlaRow(0, 128, 1280, 0, 0, 128, 1280)]),
        (False, [MlaRow(0, 128, 1280, 0, 0, 1280, 0)]),
    ]
    inputs = inputs_of(step[0][1], device, engine.dtype)
    attend(engine, MlaTopP(0.99, 0.15), step[0][1], True, inputs)
    chunk = inputs_of(step[1][1], device, engine.dtype, 1)._replace(q=inputs.q, out=inputs.out, lse=inputs.lse)
    attend(engine, MlaTopP(0.99, 0.15), step[1][1], False, chunk)
    for blocks in listed_blocks(engine, step[1][1])[0]:
        assert set(range(SINK_TOKENS // BLOCK_TOKENS)) <= blocks
        assert len(blocks) == SINK_TOKENS // BLOCK_TOKENS + 3  # 15 % of 20 blocks
    shares = engine.sums.dropped[:, :128] / engine.sums.total[:, :128]
    assert float(shares.mean()) > 0.02
