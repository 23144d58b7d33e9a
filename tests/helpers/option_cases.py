# SPDX-License-Identifier: Apache-2.0
"""Batches and margins on which attend's options have a visible effect: skipped products and 8-bit scores."""

import dataclasses
import math

import torch

from tests.helpers.batches import assert_close, random_batch
from vllm_sparse_kernels.attention import reference
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.portable import engine as portable
from vllm_sparse_kernels.engine_trial import Batch, Expected, expected_attention
from vllm_sparse_kernels.index import SparseIndex

INT8_STEP, RUN = 64, 128

PROGRAM_QUERIES = 32
"""The fewest queries that a program has in the tests. They share one 8-bit scale."""

CLEAR = 1e-3
"""Distance between λ and every step's margin: larger than the kernels' error in scores."""


def lossless_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, device, layout="NHD") -> Batch:
    """Return a batch that 8 bits represent exactly: 8-bit scores are then exact, and attend's usual budget applies.

    Keys minus their mean, and queries, are integers from −127 to 127 times a power of two. Every second block of keys
    uses another power, alternating by kv head. Each block of keys contains 127, and so do the queries of each program.
    Runs of 128 keys alternately point towards the queries and away from them, so some steps matter less than others.
    """
    batch = random_batch(
        lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, device, 3, layout=layout, gap_tokens=3
    )
    generator = torch.Generator(device).manual_seed(7)
    lean = torch.randint(0, 2, (num_kv_heads, head_dim), generator=generator, device=device) * 36 - 18
    bias = torch.randint(-60, 61, (num_kv_heads, head_dim), generator=generator, device=device)

    def whole(length: int, heads: int) -> torch.Tensor:
        return torch.randint(-90, 91, (length, heads, head_dim), generator=generator, device=device)

    rows = batch.rows
    for row, (token, query_len, seq_len) in enumerate(zip(rows.query_starts, rows.query_lens, rows.seq_lens)):
        keys = whole(seq_len, num_kv_heads) + lean
        keys[::INT8_STEP, :, 0] = 127
        paired = seq_len // (2 * RUN) * (2 * RUN)
        runs = keys[:paired].unflatten(0, (-1, 2, RUN))
        runs[:, 1] = -runs[:, 0]
        last_keys = keys[paired : paired + (seq_len - paired) // 2 * 2].unflatten(0, (-1, 2))
        last_keys[:, 1] = -last_keys[:, 0]
        keys[seq_len - seq_len % 2 :] = 0
        assert not keys.sum(0).any()
        positions = torch.arange(seq_len, device=device)
        unit = 1 - 0.5 * ((positions[:, None] // INT8_STEP + torch.arange(num_kv_heads, device=device)) % 2)
        pages = rows.block_table[row, positions // page_size].long()
        batch.cache.keys[pages, positions % page_size] = ((keys * unit[..., None] + bias) / 32).to(dtype)
        queries = whole(query_len, num_heads) + lean.repeat_interleave(num_heads // num_kv_heads, 0)
        queries[::PROGRAM_QUERIES, :, 0] = 127
        batch.q[token : token + query_len] = (queries / 128).to(dtype)
    return dataclasses.replace(batch, scale=1.3 * batch.scale)


def margins_of(batch: Batch, index: SparseIndex, head: int) -> torch.Tensor:
    """Return the margin of each step of each tile, in float64."""
    margins = []
    for i_tile, tile in enumerate(batch.rows.tile_list):
        k, _ = batch.cache.gather(batch.rows.block_table[tile.row], batch.rows.seq_lens[tile.row])
        kept, steps = reference.walk(index, head, i_tile)
        q = batch.q[tile.token : tile.token + tile.length_tokens, head].double()
        scores = q @ k[kept, head * k.shape[1] // batch.num_heads].double().T * batch.scale
        positions = tile.position + torch.arange(tile.length_tokens, device=q.device)
        margins.append(reference.step_margins(scores.masked_fill(kept > positions[:, None], -torch.inf), steps))
    return torch.cat(margins)


def clear_margin(margins: torch.Tensor) -> float:
    """Return λ in the widest gap between margins with 0.6 to 0.9 of the negative margins below it, so its effect is
    visible."""
    ordered = torch.cat((margins[margins < -CLEAR].sort().values, margins.new_zeros(1)))
    near = ordered[min(int(0.6 * len(ordered)), len(ordered) - 2) : int(0.9 * len(ordered)) + 2]
    widest = int(near.diff().argmax())
    assert float(near.diff()[widest]) > 2 * CLEAR
    return float(near[widest : widest + 2].mean())


def run(batch: Batch, index: SparseIndex, options: AttendOptions | None) -> torch.Tensor:
    out = batch.empty_out()
    portable.attend(batch.call(index), out, options, batch.sinks)
    return out


def check(batch: Batch, index: SparseIndex, options: AttendOptions) -> None:
    """Check the output against the reference with the same options, within the budget of attention without options."""
    exact, expected = expected_attention(batch, index), expected_attention(batch, index, options)
    assert_close(Expected(expected.out, exact.budget), run(batch, index, options))
    if (margins := options.skip_margins) is not None:
        moved = (expected.out - exact.out)[:, margins > -math.inf].nan_to_num().abs().max()
        assert float(moved) > 1.5 * exact.budget, "what is skipped does not show: the case shows nothing"


def mixed_options(batch: Batch, index: SparseIndex, skips: bool = True, int8: bool = True) -> AttendOptions:
    """Return options for four heads in turn: both options, each option alone, and none."""
    heads = range(batch.num_heads)
    margins = [clear_margin(margins_of(batch, index, h)) if skips and h % 4 in (0, 1) else None for h in heads]
    options = AttendOptions.from_heads(margins, [int8 and h % 4 in (0, 2) for h in heads], batch.q.device)
    assert options is not None
    return options
