# SPDX-License-Identifier: Apache-2.0
"""Thresholds of long arrays by parallel passes.

A threshold is the k-th largest value, or the largest value t for which all values ≥ t add up to γ of the sum or more.

Values are sums of weights and never negative. They count as equal if their mantissas agree in ten bits, because
rounding of scores to bf16, which has seven, changes them by more. This leaves keys of 16 bits, processed as two digits
of 8 bits. A pass considers the values that agree with the threshold in its higher digit, and sums their weights by the
next digit, one program per chunk. A weight is 1 for the k-th largest, and the value itself for γ of a sum. The next
pass adds up the chunks, in order, and then knows one more digit. Nothing is copied to the host, and results are
deterministic.

Arrays are those of ``Sums``: column sums (kind 0) and sums of diagonals or bands (kind 1) of n heads and several rows;
job i is kind i // n of head i % n.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.selection.last_queries import Sums
from vllm_sparse_kernels.selection.last_query_kernels import sums_of
from vllm_sparse_kernels.vectors import load_vectors, store_vector

CHUNK = Constant(4096)
"""Values processed at a time. Arrays of up to 16 times as many values have chunks of this size, and longer
arrays have longer chunks."""

ALIGNED = Constant(64)
"""A row of sums has room for a multiple of this number, which allows wide loads."""

MOST_CHUNKS = Constant(16)
DIGITS = Constant(256)

PASSES = 2

EQUAL_BITS = Constant(13)
"""Values are equal for a threshold if all bits but the lowest 13 of the float agree: to 10 bits of the mantissa."""

HALF_EQUAL = Constant(1 << 12)
"""Half of the range of these bits."""

LEAST_KEY = Constant((127 - 57) << 10)
"""Values below 2⁻⁵⁷ also count as equal, which leaves 16 bits for keys of masses up to 2⁷."""

UNSPECIALIZED = ("num_selected", "first_row", "num_rows", "capacity", "chunks", "max_columns")
"""Kernel arguments that change from step to step and must not cause new variants of a kernel."""


class Digits(NamedTuple):
    """Results of the passes, undefined past an array's chunks. The sums of the last pass are not joined yet."""

    weights: torch.Tensor  # [passes, num_rows, 2 n, chunks, 256] by digit: int32 counts, or float32 masses
    above: torch.Tensor  # [num_rows, 2 n, chunks] int32: values of a chunk whose higher digit exceeds the threshold's
    high: torch.Tensor  # [num_rows, 2 n] int32: higher digit of the threshold
    remaining: torch.Tensor  # [num_rows, 2 n]: weight that the lower digit has to reach


def num_chunks(length: int) -> int:
    """Return the number of chunks of an array. A chunk has 4,096 values, or more to have at most 16 chunks."""
    blocks = ceil_div(length, CHUNK.value)
    return ceil_div(blocks, ceil_div(blocks, MOST_CHUNKS.value))


def digits_of(index: SparseIndex, sums: Sums, goals: torch.Tensor, forced: torch.Tensor | None = None) -> Digits:
    """Run the passes over all jobs: find the digits of each job's threshold.

    Without ``forced``, thresholds are those of the largest values that hold a share of the job's sum. An infinite share
    means all values.
    """
    num_rows, num_jobs, empty = sums.end_row - sums.first_row, 2 * sums.num_selected, index.workspace.empty
    chunks = max(map(num_chunks, index.rows.seq_lens[sums.first_row : sums.end_row]))
    dtype = torch.float32 if forced is None else torch.int32
    digits = Digits(
        empty(PASSES, num_rows, num_jobs, chunks, DIGITS.value, dtype=dtype),
        empty(num_rows, num_jobs, chunks, dtype=torch.int32),
        empty(num_rows, num_jobs, dtype=torch.int32),
        empty(num_rows, num_jobs, dtype=dtype),
    )
    for i in range(PASSES):
        _digits_kernel[(chunks, num_jobs, num_rows)](
            *sums.args(index.rows), goals, forced, digits, chunks, PASS=i, BAND=sums.band,
        )  # fmt: skip
    return digits


@triton.jit
def job_of(sums, num_selected, first_row, num_rows, capacity, BAND: tl.constexpr):
    """Return this program's job: its number is on axis 1, its row on axis 2, its chunk on axis 0."""
    i_chunk, i_job = tl.program_id(0), tl.program_id(1)
    place, length = sums_of(
        sums, i_job // num_selected, i_job % num_selected, num_selected, first_row + tl.program_id(2), first_row,
        num_rows, capacity, BAND,
    )  # fmt: skip
    blocks = tl.cdiv(length, CHUNK)
    span = tl.cdiv(blocks, MOST_CHUNKS) * CHUNK
    used = (length + span - 1) // tl.maximum(span, 1)
    i_row_job = tl.program_id(2) * tl.num_programs(1) + i_job
    return place, length, i_chunk * span, tl.minimum((i_chunk + 1) * span, length), used, i_row_job


@triton.jit
def _weights_of(digits, i_pass, i_row_job, chunks):
    """Return a pointer to the weights of a pass and a job."""
    i_state = i_pass * (tl.num_programs(1) * tl.num_programs(2)) + i_row_job
    return digits.weights + i_state.to(tl.int64) * chunks * DIGITS


@triton.jit
def _load_weights(digits, i_pass, i_row_job, chunks, used):
    """Load weights by chunk and digit [16, 256], with 0 past the ``used`` chunks."""
    o_c = tl.arange(0, MOST_CHUNKS)
    return load_vectors(_weights_of(digits, i_pass, i_row_job, chunks), o_c, o_c < used, DIGITS)


@triton.jit
def next_digit(b_weight, remaining):
    """Return the largest digit with at least ``remaining`` of the weight at it and above."""
    o_digit = tl.arange(0, DIGITS)
    b_reached = tl.cumsum(b_weight, 0, reverse=True)
    digit = tl.sum(((b_reached >= remaining) & (o_digit > 0)).to(tl.int32), 0)
    return digit, remaining - tl.sum(tl.where(o_digit > digit, b_weight, 0), 0)


@triton.jit
def _high_digit(digits, i_row_job, chunks, used, goal, RELATIVE: tl.constexpr):
    """Join the sums of the first pass: return the threshold's higher digit, and the weight that remains below it."""
    b_weight = tl.sum(_load_weights(digits, 0, i_row_job, chunks, used), 0)
    if RELATIVE:
        goal = goal * tl.sum(b_weight, 0)
    return next_digit(b_weight, goal)


@triton.jit
def threshold_of(digits, i_row_job, chunks, used):
    """Join the sums of the last pass: return the threshold, and the weight that remains for values equal to it.

    Also return its lower digit, and the weights by chunk and lower digit.
    """
    b_w = _load_weights(digits, 1, i_row_job, chunks, used)
    low, remaining = next_digit(tl.sum(b_w, 0), tl.load(digits.remaining + i_row_job))
    return tl.load(digits.high + i_row_job) * DIGITS + low, remaining, low, b_w


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _digits_kernel(
    sums, num_selected, first_row, num_rows, capacity, goals, forced, digits, chunks,
    PASS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Run one pass over one chunk: of counts, or of masses if ``forced`` is None.

    Grid: (chunks, 2 n jobs, rows). Bound by memory: it reads each value once a pass.

    Args:
        goals: [2 n] float32, number of each job's values, or share of their sum.
        forced: [2 n] float32, number of first values that count as infinite; None to sum masses.
    """
    place, length, first, end, used, i_row_job = job_of(sums, num_selected, first_row, num_rows, capacity, BAND)
    if first >= end:
        return
    goal = tl.load(goals + tl.program_id(1))
    if forced is not None:
        goal = tl.minimum(goal.to(tl.int32), length)
    high = 0
    if PASS > 0:
        high, remaining = _high_digit(digits, i_row_job, chunks, used, goal, forced is None)
        if tl.program_id(0) == 0:
            tl.store(digits.high + i_row_job, high)
            tl.store(digits.remaining + i_row_job, remaining)
    row = sums.totals + place
    if forced is not None:
        num_forced = tl.load(forced + tl.program_id(1)).to(tl.int32)
        b_weight, above = _counts_by_digit(row, first, end, num_forced, high, PASS)
        if PASS > 0:
            tl.store(digits.above + i_row_job * chunks + tl.program_id(0), above)
    elif PASS == 0:
        b_weight = masses_by_high_digit(row, first, end, 4, 128)
    else:
        b_weight = masses_by_low_digit(row, first, end, high, CHUNK)
    store_vector(_weights_of(digits, PASS, i_row_job, chunks), tl.program_id(0), b_weight)


@triton.jit
def _counts_by_digit(row, first, end, num_forced, high, PASS: tl.constexpr):
    """Count the values of row[first : end] by higher digit or, of those with the digit ``high``, by lower digit.

    Also count the values whose higher digit exceeds ``high``.
    """
    b_count = tl.zeros([DIGITS], tl.int32)
    above = 0
    for start in range(first, end, CHUNK):
        b_key = load_count_keys(row, start, end, num_forced)
        if PASS == 0:
            b_count += tl.histogram(b_key >> 8, DIGITS, mask=b_key != 0)
        else:
            b_agrees = (b_key >> 8 == high) & (b_key != 0)
            if tl.max(b_agrees.to(tl.int32), 0) > 0:
                b_count += tl.histogram(b_key & (DIGITS - 1), DIGITS, mask=b_agrees)
            above += tl.sum((b_key >> 8 > high).to(tl.int32), 0)
    return b_count, above


@triton.jit
def mass_keys(b_x):
    """Return keys of 16 bits that sort as values >= 0 do, equal where values are equal for a threshold."""
    b_key = (b_x.to(tl.int32, bitcast=True) >> EQUAL_BITS) - LEAST_KEY
    return tl.minimum(tl.maximum(b_key, 0), DIGITS * DIGITS - 2)


@triton.jit
def load_count_keys(row, start, end, forced):
    """Load ``mass_keys`` + 1 of a chunk: the maximum for the row's first ``forced`` values, 0 from ``end``."""
    o_n = start + tl.arange(0, CHUNK)
    b_x = tl.load(row + o_n, mask=o_n < tl.cdiv(end, ALIGNED) * ALIGNED, other=0.0)
    b_key = tl.where(o_n < forced, DIGITS * DIGITS - 1, mass_keys(b_x) + 1)
    return tl.where(o_n < end, b_key, 0)


@triton.jit
def masses_by_high_digit(row, first, end, WARPS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum masses row[first : end] by the upper digit of their keys."""
    o = tl.arange(0, WARPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    b_sum = tl.zeros([WARPS, 16, 16], tl.float32)
    for start in range(first, end, WARPS * WIDTH):
        b_sum = add_by_high_digit(b_sum, tl.load(row + start + o, mask=start + o < end, other=0.0))
    return tl.reshape(tl.sum(b_sum, 0), [DIGITS])


@triton.jit
def add_by_high_digit(b_sum, b_x):
    """Add masses to sums by the halves of a digit.

    The sum is a product of two matrices: one has the masses at the upper half i of their digit, and the other has a 1
    at the lower half j. Masses are rounded to TF32's ten bits of the mantissa, without bias.
    """
    o_half = tl.arange(0, 16)
    b_digit = mass_keys(b_x) >> 8
    b_round = (b_x.to(tl.int32, bitcast=True) + HALF_EQUAL) >> EQUAL_BITS << EQUAL_BITS
    b_is = (b_digit >> 4)[:, None, :] == o_half[None, :, None]
    b_low = ((b_digit & 15)[:, :, None] == o_half[None, None, :]).to(tl.float32)
    b_mass = tl.where(b_is, b_round.to(tl.float32, bitcast=True)[:, None, :], 0.0)
    return tl.dot(b_mass, b_low, b_sum, input_precision="tf32")


@triton.jit
def masses_by_low_digit(row, first, end, high, CHUNK: tl.constexpr):
    """Sum the masses row[first : end] whose keys have the upper digit ``high``, by the lower digit.

    Masses of one key agree in ten bits of the mantissa, and count as the middle of their range.
    """
    b_count = tl.zeros([DIGITS], tl.int32)
    for start in range(first, end, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_key = mass_keys(tl.load(row + o_n, mask=o_n < end, other=0.0))
        b_count += tl.histogram(b_key & (DIGITS - 1), DIGITS, mask=(b_key >> 8 == high) & (o_n < end))
    b_key = high * DIGITS + tl.arange(0, DIGITS)
    b_middle = ((b_key + LEAST_KEY) << EQUAL_BITS) + HALF_EQUAL
    return tl.where(b_key > 0, b_count.to(tl.float32) * b_middle.to(tl.float32, bitcast=True), 0.0)
