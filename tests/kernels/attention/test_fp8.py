# SPDX-License-Identifier: Apache-2.0
"""Caches in fp8: every method and engine that reads them, against the same elements in fp16 and the references."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.batches import in_fp8, random_batch, random_index, widened
from tests.helpers.engine_cases import ENGINES, check, flash_attention, run, same
from tests.helpers.lined import lined_batch
from tests.helpers.masks import density_of, mask_of
from tests.helpers.method_cases import SMALL, select
from vllm_sparse_kernels.attention import AttendSpec
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.reference import attend as reference
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import FP8, PagedCache

SCALES = (0.03, 0.05, 0.2)
"""Scales of queries, keys and values: products of the elements far exceed the range of fp16."""

READS_FP8 = [name for name in ENGINES if name != "hopper"]

METHODS_ASKED = [
    METHODS[name].parameters(**params)
    for name in METHODS
    if name not in ("a_shape", "dense")  # which read no keys
    for params in SMALL.get(name, [{}])
]


def apart(method: Method, batch: Batch, other: Batch, by_reference: bool = False) -> float:
    """Return the share of pairs that only one of two selections keeps. Each selection is independent of the other."""
    runs = ((batch, False), (other, by_reference))
    kept = [select(method, b, method.block_tokens, None, way, replace(b.rows)) for b, way in runs]
    assert 0.05 < float(density_of(kept[0])) < 0.98 or len(batch.q) > 1000
    return float((mask_of(kept[0], 0) != mask_of(kept[1], 0)).float().mean())


ON_GPU = [((2047, 1100), page_size, (8, 2, head_dim)) for page_size in (16, 128) for head_dim in (64, 128)]


@pytest.mark.parametrize(
    ("lengths", "page_size", "shape"),
    [
        pytest.param((561, 170), 16, (2, 1, 64), marks=pytest.mark.full),
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU),
    ],
)
@pytest.mark.parametrize("method", METHODS_ASKED, ids=str)
def test_methods_keep_what_they_keep_of_the_same_elements_in_fp16(method, lengths, page_size, shape, device):
    """The selections are equal in the interpreter; matrix units add up products of fp8 less exactly."""
    batch = in_fp8(lined_batch([lengths], *shape, page_size), *SCALES)
    assert apart(method, batch, widened(batch)) <= (0.0 if device == "cpu" else 0.01)
    assert apart(method, batch, batch, by_reference=True) <= (0.01 if lengths == (561, 170) else 0.02)


@pytest.mark.parametrize("engine", READS_FP8)
@pytest.mark.parametrize(
    ("page_size", "layout", "stripes", "sinks"), [(16, "NHD", 50, None), (64, "HND", 0, [2.0, 5.0])]
)
def test_engines(engine, stripes, page_size, layout, sinks, device):
    lengths = [(200, 90), (0, 63), (0, 1)]
    batch = random_batch(lengths, 2, 2, 64, page_size, device=device, gap_tokens=3, layout=layout)
    batch = replace(in_fp8(batch, *SCALES), sinks=None if sinks is None else torch.tensor(sinks, device=device))
    check(ENGINES[engine], batch, random_index(batch, 64, 0.4, stripes))


def test_eight_bit_scores_and_skips(device):
    """Scores are rounded again, from fp8 as from fp16, so results are equally far from the reference."""
    batch = in_fp8(random_batch([(300, 100)], 2, 1, 64, 16, device=device), *SCALES)
    index = random_index(batch, 64, 0.6, 20)
    options = AttendOptions.from_heads([-3.0, None], [True, False], torch.device(device))
    outputs, truth = [], batch.empty_out().float()
    reference(batch.call(index), truth, options=options)
    for variant in (batch, widened(batch)):
        outputs.append(run(ENGINES["portable"], variant, index, options).float())
    assert float((outputs[0] - truth).abs().max()) <= 1.5 * float((outputs[1] - truth).abs().max()) + 1e-3


def test_scales_are_what_elements_count(device):
    """Scales that are powers of two change nothing, unless elements are so small that fp8 stores fewer bits."""
    exact = random_batch([(100, 130)], 2, 1, 64, 16, device=device)
    for x in (exact.q, exact.cache.keys, exact.cache.values):
        x.mul_(4).round_().div_(4)
    first = in_fp8(exact, 1.0, 1.0, 1.0)
    other = in_fp8(exact, 0.5, 2.0, 0.25)
    assert other.cache.score_scale == 1.0
    assert other.cache.value_scale == 0.25
    index = random_index(first, 64, 0.5, 20)
    assert same(*(run(ENGINES["portable"], batch, index) for batch in (first, other)))
    untold = PagedCache(first.cache.keys, first.cache.values)
    assert (untold.score_scale, untold.value_scale) == (1.0, 1.0)


def test_who_reads_fp8(device):
    batch = in_fp8(random_batch([(0, 40)], 2, 1, 64, 16, device=device))
    spec = AttendSpec.of(batch.cache, random_index(batch, 64, 1.0))
    assert spec.dtype == FP8
    assert ENGINES["portable"].refusal(spec) is None
    assert ENGINES["hopper"].refusal(spec) is not None
    if "flash" in ENGINES:
        assert "not a multiple of 16" in (ENGINES["flash"].refusal(replace(spec, head_dim=72)) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", READS_FP8)
@pytest.mark.parametrize("block_tokens", [32, 64, 128])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
def test_engines_on_gpu(engine, block_tokens, head_dim, dtype):
    if head_dim == 256 and block_tokens == 128:
        pytest.skip("no engine has room for two buffers of such blocks")
    batch = random_batch([(3000, 900), (0, 1), (127, 63), (0, 2049)], 8, 2, head_dim, 128, dtype, "cuda", gap_tokens=3)
    batch = in_fp8(batch, *SCALES)
    for stripes, sinks in ((0, None), (300, torch.linspace(-5, 9, 8, device="cuda"))):
        batch = replace(batch, sinks=sinks)
        check(ENGINES[engine], batch, random_index(batch, block_tokens, 0.2, stripes))


@pytest.mark.gpu
def test_flash_is_as_far_from_exact_as_flash_attention_itself():
    """The index keeps everything, and scales that are not powers of two also go to vLLM's function."""
    if flash_attention() is None:
        pytest.skip("no FlashAttention here")
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    exact = lined_batch([(7168, 1024)], 8, 2, 128, 128, torch.bfloat16)
    for side in (exact.cache.keys, exact.cache.values):
        side.nan_to_num_()
    batch = in_fp8(exact, *SCALES)
    ours = run(ENGINES["flash"], batch, random_index(batch, 128, 1.0))
    truth = torch.full_like(exact.q, float("nan"), dtype=torch.float32)
    reference(exact.call(random_index(exact, 128, 1.0)), truth)
    descales = [torch.full((1, 2), scale, device="cuda") for scale in SCALES]
    rows, stock = batch.rows, torch.empty_like(exact.q)
    flash_attn_varlen_func(
        q=batch.q, k=batch.cache.keys, v=batch.cache.values, out=stock,
        cu_seqlens_q=torch.tensor([0, 1024], dtype=torch.int32, device="cuda"), max_seqlen_q=1024,
        seqused_k=torch.tensor([8192], dtype=torch.int32, device="cuda"), max_seqlen_k=8192,
        softmax_scale=exact.scale, causal=True, block_table=rows.block_table[:, :64].contiguous(), fa_version=3,
        q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
    )  # fmt: skip
    our_error, stock_error = (float((out.float() - truth).norm() / truth.norm()) for out in (ours, stock))
    assert our_error <= 1.05 * stock_error
    assert float((ours.float() - stock.float()).norm() / truth.norm()) <= 0.5 * stock_error
