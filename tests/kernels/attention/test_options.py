# SPDX-License-Identifier: Apache-2.0
"""attend's options: SpargeAttn's skip of products, SageAttention's 8-bit scores; kernel and reference."""

import dataclasses
import math

import pytest
import torch

from tests.helpers.batches import random_batch, random_index
from tests.helpers.engine_cases import DTYPES, FULL, independent, same
from tests.helpers.option_cases import (
    INT8_STEP,
    check,
    lossless_batch,
    mixed_options,
    run,
)
from vllm_sparse_kernels.attention import PORTABLE, reference
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.smooth_keys import smooth_keys
from vllm_sparse_kernels.engine_trial import expected_attention
from vllm_sparse_kernels.workspace import Workspace

# lengths (context, new), heads, kv heads, head dim, page, block, stripes, layout
CASES = {
    "one": ([(1000, 1), (700, 63)], 2, 2, 64, 16, 64, 40, "NHD"),
    "2049": ([(1920, 129)], 2, 1, 64, 64, 128, 0, "NHD"),
    "mixed": ([(301, 150), (500, 40), (1000, 30)], 4, 2, 64, 16, 64, 90, "HND"),
    "group": ([(571, 40)], 8, 1, 64, 48, 64, 0, "NHD"),
    "wide": ([(700, 130)], 2, 2, 128, 128, 128, 70, "HND"),
    "odd-head": ([(1100, 77)], 4, 1, 96, 32, 128, 0, "NHD"),
    "short": ([(0, 1), (0, 63), (60, 5), (641, 129)], 2, 1, 64, 16, 64, 20, "NHD"),
    "long": ([(0, 1000)], 2, 1, 64, 16, 64, 20, "NHD"),
    "widest-head": ([(640, 20)], 2, 1, 256, 64, 64, 30, "NHD"),
}


@pytest.mark.parametrize(
    ("case", "dtype", "kinds"),
    [
        ("mixed", torch.float16, {}),
        *(pytest.param(case, dtype, {}, marks=FULL) for case in CASES for dtype in DTYPES),
        *(
            pytest.param(case, torch.float16, kinds, marks=FULL)
            for case in ("short", "long")
            for kinds in ({"int8": False}, {"skips": False})
        ),
    ],
)
def test_heads_of_all_kinds_in_one_launch(device, case, dtype, kinds):
    *sizes, block_tokens, stripes, layout = CASES[case]
    batch = lossless_batch(*sizes, dtype, device, layout)
    index = random_index(batch, block_tokens, 0.7, stripes)
    options = mixed_options(batch, index, **kinds)
    check(batch, index, options)
    if case == "mixed":  # sinks that weigh about as much as all keys: heads add what smoothing took off their scores
        sinks = torch.full((batch.num_heads,), 6.4, device=device)
        check(dataclasses.replace(batch, sinks=sinks), index, options)


@pytest.mark.full
def test_what_asks_for_nothing_changes_nothing(device):
    """λ → −∞ equals no options, and flags of all heads equal a launch without other variants: bitwise."""
    batch = random_batch([(333, 140), (0, 70)], 2, 1, 64, 16, DTYPES[0], device, gap_tokens=3)
    index = random_index(batch, 64, 0.6, stripes=90)
    plain = run(batch, index, None)
    for margin in (-math.inf, -1e30):
        skip_margins = torch.full((2,), margin, device=device)
        result = run(batch, index, AttendOptions(skip_margins, None))
        assert same(plain, result)
    flags = torch.ones(2, dtype=torch.uint8, device=device)
    result, other = (run(batch, index, AttendOptions(None, flags, all_int8=known)) for known in (False, True))
    assert same(result, other)
    assert not same(result, plain)


@pytest.mark.full
def test_a_row_does_not_depend_on_its_neighbours(device):
    batch = random_batch([(333, 140), (530, 1), (200, 30)], 2, 1, 64, 16, DTYPES[0], device, gap_tokens=3)
    options = AttendOptions.from_heads([-1.0, -2.0], [True, False], batch.q.device)
    independent(PORTABLE, batch, random_index(batch, 64, 1.0), range(3), options)


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (96, 128)])
def test_keys_in_8_bits(device, head_dim, page_size):
    """Compared with float64: values may round the other way only if float32 cannot decide. Zeros follow a row's end."""
    batch = random_batch([(0, 1), (500, 133), (0, 64)], 4, 2, head_dim, page_size, DTYPES[0], device, gap_tokens=1)
    rows = batch.rows
    smooth = smooth_keys(batch.cache, rows, Workspace(rows.device))
    for row, (start, seq_len) in enumerate(zip(rows.key_starts, rows.seq_lens)):
        keys, _ = batch.cache.gather(rows.block_table[row], seq_len)
        integers, scales, means = reference.smooth_keys(keys.double())
        torch.testing.assert_close(smooth.means[row, :, :head_dim].double(), means, rtol=0, atol=1e-6)
        got = smooth.integers[:, start : start + seq_len, :head_dim]
        exact = (keys.double() - means[None]).transpose(0, 1) / scales[..., None]
        assert float((got - exact).abs().max()) <= 0.5 + 1e-4
        assert int((got != integers).sum()) <= 1e-3 * got.numel()
        first, num_blocks = start // INT8_STEP, -(-seq_len // INT8_STEP)
        key_scales = smooth.scales[:, first : first + num_blocks].double()
        torch.testing.assert_close(key_scales, scales[:, ::INT8_STEP], rtol=1e-5, atol=1e-9)
        end = start + -(-seq_len // 64) * 64
        assert not smooth.integers[:, start + seq_len : end].any()
        assert not smooth.integers[:, start:end, head_dim:].any()
        assert smooth.scales[:, first : end // INT8_STEP].isfinite().all()


def accuracy(out: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return SageAttention's cosine similarity and relative L1 of whole outputs."""
    out, exact = out.double(), exact.double()
    return float((out * exact).sum() / out.norm() / exact.norm()), float((out - exact).abs().sum() / exact.abs().sum())


def test_8_bit_scores_are_as_accurate_as_sage_attention(device):
    """On normal q, k, v, SageAttention's table 9 has a cosine of 1.0 and a relative L1 of 0.021 for its kernel B."""
    batch = random_batch([(0, 700)], 1, 1, 128, 16, DTYPES[1], device)
    index = random_index(batch, 64, 1.0)
    options = AttendOptions.from_heads([None], [True], batch.q.device)
    exact = expected_attention(batch, index)
    wanted = expected_attention(batch, index, options).out
    out = run(batch, index, options)
    for result in (out, wanted):
        cosine, relative = accuracy(result, exact.out)
        assert cosine > 0.9995
        assert 0.001 < relative < 0.021
    # Few values round differently than in float64, and few of these have a visible effect.
    assert accuracy(out, wanted)[1] < 0.001


# Tests of the references.


@pytest.mark.parametrize("margin", [-math.inf, -2.0, -0.3])
def test_the_reference_is_an_online_softmax_step_by_step(margin):
    """Algorithm 1, lines 12 to 16, with a test over all queries together."""
    generator = torch.Generator().manual_seed(4)
    scores, values = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((5, 70), (70, 8)))
    scores[:, 20:50] -= 4
    steps = torch.arange(70) // 10
    online_max, total, acc = torch.full((5,), -5e6).double(), torch.zeros(5).double(), torch.zeros(5, 8).double()
    skipped = 0
    for s, v in zip(scores.split(10, 1), values.split(10)):
        before, local = online_max, s.amax(1)
        online_max = torch.maximum(before, local)
        p, decay = (s - online_max[:, None]).exp(), (before - online_max).exp()
        keep = bool((local - online_max).max() >= margin)
        total = total * decay + p.sum(1)
        acc = acc * decay[:, None] + (p @ v if keep else 0)
        skipped += not keep
    assert (skipped > 0) == (margin > -math.inf)
    left_out = (reference.step_margins(scores, steps) < margin)[steps]
    torch.testing.assert_close((scores.softmax(-1) * ~left_out) @ values, acc / total[:, None], rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.logsumexp(-1), online_max + total.log(), rtol=0, atol=1e-12)


def test_options_that_nobody_asks_for():
    device = torch.device("cpu")
    assert AttendOptions.from_heads([None, None], [False, False], device) is None
    assert AttendOptions.from_heads([None], [True], device).all_int8
    assert AttendOptions.from_heads([-3.0], [False], device).int8_heads is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(128, 64), (128, 128), (64, 128), (256, 64)])
@pytest.mark.parametrize("lengths", [[(1000, 2049)], [(4000, 1000), (700, 63), (1300, 129)]], ids=str)
def test_on_gpu(lengths, head_dim, block_tokens, dtype):
    batch = lossless_batch(lengths, 8, 2, head_dim, 128, dtype, "cuda")
    index = random_index(batch, block_tokens, 0.5, stripes=200)
    check(batch, index, mixed_options(batch, index))
    check(batch, index, mixed_options(batch, index, int8=False))
