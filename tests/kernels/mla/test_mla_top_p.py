# SPDX-License-Identifier: Apache-2.0
"""``top_p`` of MLA's prefill: the rule of running sums, estimates near the exact ones, and the reference's blocks for
the same estimates."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.helpers.mla_calls import HEADS, KEY_DIM, POISON, Inputs, inputs_of, prefill, zero_sums
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.mla import (
    MlaCall,
    MlaPrefill,
    MlaRow,
    prefill as prefill_module,
    products,
    reference,
    selection,
)
from vllm_sparse_kernels.mla.calls import BLOCK, SINK, Part, TileFields
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div

METHOD = TopP(kept_mass=0.8, most_tokens=None)
CONTEXT, NEW = 501, 140

STEP: list[tuple[bool, list[MlaRow]]] = [
    (True, [MlaRow(3, NEW, CONTEXT, 0, 2, NEW, CONTEXT), MlaRow(150, 200, 0, 140, 145, 200, 0)]),
    (False, [MlaRow(3, NEW, CONTEXT, 0, 1, 300, 0)]),
    (False, [MlaRow(3, NEW, CONTEXT, 0, 0, 201, 300)]),
]
"""A step of two rows: new tokens, then two chunks of the context of one of them."""


@pytest.mark.parametrize("chunk_tokens", [64, 192, 1024])
@pytest.mark.parametrize("heavy", [slice(0, 4), slice(576, 640), slice(0, 640), slice(0, 0)], ids=str)
@pytest.mark.parametrize("kept_mass", [0.5, 0.9])
def test_no_tile_drops_more_than_its_share_of_the_whole_row(chunk_tokens: int, heavy: slice, kept_mass: float) -> None:
    """This holds wherever the mass is: in the sinks, the last chunk, all of the context, or anywhere."""
    context, new, method = 640, 200, TopP(kept_mass=kept_mass, most_tokens=None)
    scores = 2 * torch.randn(HEADS, new, context + new, generator=torch.Generator().manual_seed(0))
    scores[..., heavy] += 4
    future = torch.arange(context + new) > context + torch.arange(new)[:, None]
    maxima = reference.block_maxima(scores.masked_fill(future, -torch.inf))
    starts = [context, *range(0, context, chunk_tokens)]
    ends = [context + new, *(min(start + chunk_tokens, context) for start in starts[1:])]
    sums, dropped = zero_sums("cpu"), torch.zeros(HEADS, new)
    for start, end in zip(starts, ends, strict=True):
        row, blocks = MlaRow(0, new, context, 0, 0, end - start, start), slice(start // 64, ceil_div(end, 64))
        call = MlaCall(method, (row,), is_causal=start == context, parts=())
        for offset in range(0, new, TILE_TOKENS):
            tile = slice(offset, min(offset + TILE_TOKENS, new))
            part = maxima[:, tile, blocks]
            scored = reference.scored_queries(part.shape[1])
            kept = reference.keep_blocks(call, part[:, scored], sums, TileFields.of(row, offset))
            dropped[:, tile] += (part.exp2() * ~kept[:, None]).sum(-1)
    for shares in (dropped / maxima.exp2().sum(-1)).split(TILE_TOKENS, 1):
        mean = shares[:, reference.scored_queries(shares.shape[1])].mean(1)
        assert mean.max() <= 1 - kept_mass + 1e-5
        assert mean.max() > 0.02 or heavy.stop > 4  # mass that comes late is kept with the blocks before it


def stored_maxima(engine: MlaPrefill, call: MlaCall) -> Iterator[torch.Tensor]:
    """Yield the estimates that kernels stored, as logarithms to base 2, in the order of the reference."""
    (part,) = call.parts
    assert engine._selection is not None
    rounded, scratch = engine._selection.rounded, engine._selection.scratch
    shape = (HEADS, len(part.tiles), part.width, 64)
    stored = scratch.products[: HEADS * len(part.tiles) * part.width * 64].view(shape).float()
    by_start = {fields[0]: i for i, fields in enumerate(part.tiles.tolist())}
    for row in call.rows:
        for offset in range(0, row.num_queries, TILE_TOKENS):
            length = min(TILE_TOKENS, row.num_queries - offset)
            reach = min(row.num_keys, offset + length) if call.is_causal else row.num_keys
            scored = row.query_start + offset + reference.scored_queries(length, engine.device)
            blocks = row.key_start + torch.arange(0, reach, BLOCK.value, device=engine.device)
            largest = stored[:, by_start[row.query_start + offset], : len(blocks), : len(scored)].transpose(1, 2)
            scales = rounded.query_scales[:, scored, None] * rounded.key_scales[:, None, blocks]
            maxima = largest * scales + rounded.query_shifts[:, scored, None]
            missing = ceil_div(row.num_keys, BLOCK.value) - len(blocks)
            yield torch.nn.functional.pad(
                maxima.masked_fill(largest == -torch.inf, -torch.inf), (0, missing), value=-torch.inf
            )


def flatten_channels(k: torch.Tensor) -> None:
    """Make keys differ in 128 channels only. All channels have a large mean, which shifts all scores of a query."""
    flat = torch.randperm(KEY_DIM, generator=torch.Generator().manual_seed(7))[128:].to(k.device)
    k[..., flat] *= 0.02
    k += (torch.arange(KEY_DIM, device=k.device) % 5 - 2).to(k.dtype)


def check_step(method: TopP, step: Sequence[tuple[bool, list[MlaRow]]], device: str) -> None:
    """Compare the kernels' estimates with exact ones, and their results with the reference's for the same estimates."""
    engine, sums, queries = prefill(device), zero_sums(device), inputs_of(step[0][1], device)
    block_maxima = reference.block_maxima
    for seed, (is_causal, rows) in enumerate(step):
        inputs = inputs_of(rows, device, seed)
        inputs = queries._replace(k=inputs.k, v=inputs.v)
        inputs.out.fill_(POISON)
        inputs.lse.fill_(POISON)
        flatten_channels(inputs.k)
        call = engine.prepare(method, rows, is_causal=is_causal)
        kept = inputs.attend(engine, call)
        stored = stored_maxima(engine, call)

        def estimated(scores: torch.Tensor, stored: Iterator[torch.Tensor] = stored) -> torch.Tensor:
            exact, by_kernels = block_maxima(scores), next(stored)
            torch.testing.assert_close(by_kernels == -torch.inf, exact == -torch.inf)
            errors = (by_kernels - exact)[exact > -torch.inf]
            assert errors.abs().max() < 1.5
            assert errors.square().mean().sqrt() < 0.25
            return by_kernels

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(reference, "block_maxima", estimated)
            inputs.check(call, kept, sums)
        for row in rows:
            for offset in range(0, row.num_queries, TILE_TOKENS):
                length = min(TILE_TOKENS, row.num_queries - offset)
                scored = row.state_start + offset + reference.scored_queries(length, engine.device)
                for now, expected in zip(engine.sums, sums, strict=True):
                    torch.testing.assert_close(now[:, scored], expected[:, scored], rtol=1e-4, atol=1e-5)


def row_of(size: int, context: int) -> list[tuple[bool, list[MlaRow]]]:
    """Return a step of a row whose context is one chunk."""
    return [
        (True, [MlaRow(1, size, context, 0, 3, size, context)]),
        (False, [MlaRow(1, size, context, 0, 0, context, 0)]),
    ]


@pytest.mark.parametrize("method", [METHOD, TopP(kept_mass=0.95, most_tokens=224)], ids=str)
def test_kernels_keep_the_references_blocks(method: TopP, device: str) -> None:
    check_step(method, STEP, device)


@pytest.mark.parametrize(
    ("size", "context"),
    [(1, 3), (2, 65), (63, 189), (129, 130), (5, 2049), pytest.param(2049, 64, marks=pytest.mark.full)],
)
def test_sizes(size: int, context: int, device: str) -> None:
    check_step(METHOD, row_of(size, context), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides itself")
def test_sets_of_tiles_and_bulk_copies_give_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper: a program has 256 scored queries of up to four tiles, and boxes of keys reach into other rows."""
    for module in prefill_module, products:
        monkeypatch.setattr(module, "set_tiles", lambda device: 4)
    monkeypatch.setattr(products, "has_bulk_copies", lambda device: True)
    new = [MlaRow(1, 523, 70, 0, 3, 523, 70), MlaRow(524, 130, 0, 523, 526, 130, 0)]
    check_step(METHOD, [(True, new), (False, [MlaRow(1, 523, 70, 0, 2, 70, 0)])], "cpu")


def test_sets_have_neighbouring_tiles_of_a_row() -> None:
    """The set with the longest reach comes first."""
    rows = [MlaRow(0, 129, 0, 0, 0, 129, 0), MlaRow(129, 700, 0, 129, 129, 700, 0)]
    part = Part.of(rows, 4, torch.device("cpu"))
    assert part.tiles[:, 0].tolist() == [769, 641, 513, 385, 257, 129, 128, 0]
    assert part.sets.tolist() == [[0, 4], [4, 2], [6, 2]]
    assert part.rows.tolist() == [[0, 129, 0, 129], [129, 700, 129, 700]]
    assert (part.width, part.most_queries, part.most_keys) == (11, 700, 700)


def run_step(engine: MlaPrefill, device: str) -> tuple[list[int], list[torch.Tensor]]:
    """Return the kept pairs and the results of each call of ``STEP``."""
    counts, tensors, queries = [], [], inputs_of(STEP[0][1], device).q
    for seed, (is_causal, rows) in enumerate(STEP):
        inputs: Inputs = inputs_of(rows, device, seed)
        out, lse = inputs.out.new_zeros(len(queries), *inputs.out.shape[1:]), inputs.lse.new_zeros(HEADS, len(queries))
        inputs = inputs._replace(q=queries, out=out, lse=lse)
        counts.append(inputs.attend(engine, engine.prepare(METHOD, rows, is_causal=is_causal)))
        tensors += [out, lse]
    return counts, tensors


def test_neither_parts_nor_earlier_layers_show(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and heads one at a time, and short spans of keys, give the same bits; so does a second layer."""
    engine = prefill(device)
    counts, tensors = run_step(engine, device)
    assert sum(counts) < HEADS * (NEW * (NEW + 1) // 2 + 200 * 201 // 2 + NEW * CONTEXT)
    again = run_step(engine, device)
    monkeypatch.setattr(selection, "SCRATCH_BYTES", 0)
    monkeypatch.setattr(products, "SPAN_TOKENS", 128)
    monkeypatch.setattr(prefill_module, "MOST_ROWS", 1)
    engine = prefill(device)
    assert engine._selection is not None
    assert engine._selection.heads_at_once == 1 < HEADS
    for other_counts, other_tensors in (again, run_step(engine, device)):
        assert other_counts == counts
        assert all(map(torch.equal, other_tensors, tensors))


def test_most_tokens_limits_blocks_for_their_mass(device: str) -> None:
    """Sinks and the diagonal are kept besides. The tile then drops more than its budget."""
    engine, step = prefill(device), row_of(128, 1280)
    for is_causal, rows in step:
        call = engine.prepare(TopP(kept_mass=0.99, most_tokens=160), rows, is_causal=is_causal)
        inputs = inputs_of(rows, device)
        kept = inputs.attend(engine, call)
    assert kept == HEADS * 128 * (SINK.value + 3 * BLOCK.value)  # 160 keys, in whole blocks of 64
    scored = reference.scored_queries(128, engine.device)
    assert (engine.sums.dropped[:, scored] / engine.sums.total[:, scored]).mean() > 0.02
