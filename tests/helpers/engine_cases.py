# SPDX-License-Identifier: Apache-2.0
"""Attention engines as tests run them: with poisoned outputs, and in the dtypes that a device supports."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from tests.helpers.batches import assert_close
from tests.helpers.method_cases import row_alone
from tests.helpers.paged_varlen import STAND_IN
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, FlashAttention, engines
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.engine_trial import Batch, expected_attention
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import FP8

# Triton's interpreter multiplies bf16 tiles incorrectly, without an error; on a GPU, vLLM's caches are bf16 or fp16.
DTYPES = [torch.bfloat16, torch.float16] if torch.cuda.is_available() else [torch.float32, torch.float16]

FULL = pytest.mark.full

READS_PAST_THE_END = {"flash"}
"""Engines that multiply values past a row's end, on its last page, by zero, so these values must be finite."""


def flash_attention() -> FlashAttention | None:
    """Return vLLM's function if it has a GPU, otherwise the stand-in."""
    if not torch.cuda.is_available():
        return STAND_IN
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as interface
    except ImportError:
        return None
    if interface.FA3_AVAILABLE and torch.cuda.get_device_capability()[0] == 9:
        return FlashAttention.of_version(3, interface.flash_attn_varlen_func)
    return FlashAttention.of_version(2, interface.flash_attn_varlen_func) if interface.FA2_AVAILABLE else None


ENGINES = engines(flash_attention())


def skip_if_refused(
    engine: AttendEngine, batch: Batch, index: SparseIndex, options: AttendOptions | None = None
) -> None:
    """Skip the test, with the reason, if the engine refuses the batch."""
    why = engine.refusal(AttendSpec.of(batch.cache, index, options, batch.sinks))
    if why is not None:
        pytest.skip(f"{engine.name}: {why}")


def run(engine: AttendEngine, batch: Batch, index: SparseIndex, options: AttendOptions | None = None) -> torch.Tensor:
    """Return the output of an engine, poisoned first. Skip the test if the engine refuses."""
    skip_if_refused(engine, batch, index, options)
    if engine.name in READS_PAST_THE_END:
        pages = batch.rows.block_table[batch.rows.block_table < len(batch.cache.keys)].long().unique()
        for side in (batch.cache.keys, batch.cache.values):
            if side.dtype == FP8:  # torch does not replace NaN here; 1e3 would be replaced
                side.copy_(side.float().nan_to_num(nan=256.0))
            else:  # only the batch's pages: a cache may reserve far more addresses than memory
                side[pages] = side[pages].nan_to_num(nan=1e3)
    out = batch.empty_out()
    engine.attend(batch.call(index), out, options, batch.sinks)
    return out


def check(engine: AttendEngine, batch: Batch, index: SparseIndex, options: AttendOptions | None = None) -> None:
    """Check an engine's output against exact attention over the index, within the budget."""
    index.check()
    skip_if_refused(engine, batch, index, options)
    assert_close(expected_attention(batch, index, options), run(engine, batch, index, options))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors are equal to the bit, NaN included."""
    return torch.equal(first.nan_to_num(nan=7), second.nan_to_num(nan=7))


def part_of(batch: Batch, index: SparseIndex, row: int) -> tuple[Batch, SparseIndex]:
    """Return a single row of a batch, and the index of that row."""
    alone, row_tiles = row_alone(batch, row), batch.rows.tiles_of(row)
    tiles = slice(row_tiles.start, row_tiles.stop)
    names = ("block_counts", "stripe_counts", "stripe_offsets")
    lists = {name: getattr(index, name)[:, tiles].contiguous() for name in names}
    return alone, dataclasses.replace(index, rows=alone.rows, block_offsets=index.block_offsets[tiles], **lists)


def independent(
    engine: AttendEngine, batch: Batch, index: SparseIndex, chosen: Sequence[int], options: AttendOptions | None = None
) -> None:
    """Check that the chosen rows give bitwise the same results alone as in the batch."""
    together = run(engine, batch, index, options)
    for row in chosen:
        tokens = slice(batch.rows.query_starts[row], batch.rows.query_starts[row] + batch.rows.query_lens[row])
        assert same(run(engine, *part_of(batch, index, row), options)[tokens], together[tokens])
