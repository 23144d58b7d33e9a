# SPDX-License-Identifier: Apache-2.0
"""A layer's figures against dense masks worked out by hand."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.helpers.calibration_cases import HEAD_DIM, HEADS, KV_HEADS, LinedCapturer, make_job
from tests.helpers.masks import mask_of
from vllm_sparse_backend.calibration.capture import Capture, LayerTensors
from vllm_sparse_backend.calibration.judge import (
    Bound,
    CapturedLayer,
    HeadErrors,
    HeadResult,
    LayerPrompt,
    Served,
    error_quantile,
    extrapolate_unseen,
    summarize_errors,
)
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.streaming_heads import streaming_method
from vllm_sparse_kernels.attention import PORTABLE
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

SERVED = Served(128, 100)


@pytest.fixture
def layer(tmp_path, request):
    job = make_job(tmp_path / "work", num_tokens=getattr(request, "param", 400), num_prompts=2)
    captures = job.capturer(job.prompts, tmp_path)
    return captures, captured_layer(captures, SERVED)


def captured_layer(captures: Sequence[Capture], served: Served) -> CapturedLayer:
    """Return layer 1 of some captures."""
    return CapturedLayer([LayerPrompt.read(captured, 1, served, torch.device("cpu")) for captured in captures])


def by_hand(captured, prompt, methods) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each head's errors of queries, density and SALE's error (section 3.3), from whole matrices in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in captured.read(1))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    errors, absolute, kept, causal = [], 0, 0, 0
    for _, index in prompt.passes(prompt.layer(methods)):
        (first,), (last,), mask = index.rows.context_lens, index.rows.seq_lens, mask_of(index, 0)
        whole = torch.ones_like(mask).tril(first)
        scores = q[:, first:last] @ k[:, :last].mT * captured.scales[1]
        out, dense = (
            scores.masked_fill(~kept_mask, -torch.inf).softmax(-1) @ v[:, :last] for kept_mask in (mask, whole)
        )
        errors.append((out - dense).abs().sum(-1) / dense.abs().sum(-1))
        absolute = absolute + (out - dense).abs().sum((1, 2))
        kept, causal = kept + mask.sum((1, 2)), causal + whole.sum((1, 2))
    return torch.cat(errors, 1), kept / causal, absolute / captured.num_tokens


@pytest.mark.parametrize("layer", [700], indirect=True)
def test_figures_are_those_of_whole_matrices(layer):
    captures, judged = layer
    method = AShape(sink_tokens=64, local_tokens=64)
    outcomes = judged.judge([method] * HEADS)
    expected = [by_hand(captured, prompt, [method] * HEADS) for captured, prompt in zip(captures, judged.prompts)]
    for head, result in enumerate(outcomes):
        errors = [errors[head] for errors, _, _ in expected]
        assert len(errors[0]) == 600  # the first hundred positions are dense
        assert result.seen.error == pytest.approx(
            max(float(prompt_errors.mean()) for prompt_errors in errors), rel=1e-3
        )
        # Six of 600 queries have larger errors.
        assert result.seen.p99 == pytest.approx(
            max(float(prompt_errors.sort().values[-7]) for prompt_errors in errors), rel=1e-3
        )
        most, other = sorted((float(prompt_errors.mean()) for prompt_errors in errors), reverse=True)
        assert result.unseen.error == pytest.approx(2 * most - other, rel=1e-3)
        assert result.density == pytest.approx(float(expected[0][1][head]))
        largest = max(float(absolute[head]) for _, _, absolute in expected)
        assert result.seen.absolute == result.unseen.absolute == pytest.approx(largest, rel=1e-3)
        assert 0.3 < result.density < 0.9
    assert max(result.seen.error for result in outcomes) > 0.01


def test_each_head_has_its_own_method_and_dense_loses_nothing(layer, monkeypatch):
    monkeypatch.setitem(vars(PORTABLE), "attend", lambda *_, **__: pytest.fail("references attend on a CPU"))
    _, judged = layer
    tight, loose = SpargeAttn(kept_mass=0.3), SpargeAttn(kept_mass=0.9)
    alike, mixed = judged.judge([tight] * HEADS), judged.judge([tight, Dense(), loose, tight])
    assert mixed[1].density == 1
    assert mixed[1].seen.error < 1e-5
    assert mixed[2].density > alike[2].density
    # The dense head has blocks of the same width, so the other heads' results do not change.
    assert (mixed[0], mixed[3]) == (alike[0], alike[3])
    assert judged.judge([tight] * HEADS) == alike


def test_a_bound_limits_errors_in_their_order() -> None:
    assert Bound._fields == HeadErrors._fields


SEEN = HeadErrors(error=0.01, p99=0.5, of_default=1.2, absolute=0.3)


@pytest.mark.parametrize(
    ("bound", "seen", "unseen", "share", "holds"),
    [
        (Bound(0.05), SEEN, SEEN, 0.2, True),
        (Bound(0.05, 0.4), SEEN, SEEN, 1.25, False),
        (Bound(0.005, 0.9), SEEN, SEEN, 2, False),
        (Bound(0.05), SEEN._replace(error=math.nan), SEEN._replace(error=math.nan), math.nan, False),
        # The bound includes unseen prompts; the share covers only the prompts themselves.
        (Bound(0.1, 0.55), SEEN, SEEN._replace(p99=0.6), 0.5 / 0.55, False),
        (Bound(0.1, 0.6), SEEN, SEEN._replace(p99=0.6), 0.5 / 0.6, True),
        (Bound(of_default=1.5), SEEN, SEEN, 0.8, True),
        (Bound(of_default=1.5), SEEN, SEEN._replace(of_default=1.6), 0.8, False),
        (Bound(absolute=0.4), SEEN, SEEN, 0.75, True),
        (Bound(absolute=0.25), SEEN, SEEN, 1.2, False),
    ],
)
def test_bounds(bound, seen, unseen, share, holds):
    figures = HeadResult(seen, unseen, density=0.1)
    assert bound.holds(figures) is holds
    assert bound.used_fraction(figures) == pytest.approx(share, nan_ok=True)
    halved = {name: number / (1 if name in ("of_default", "absolute") else 2) for name, number in bound.numbers.items()}
    assert bound.with_margin(0.5).numbers == halved


def test_what_a_head_loses_beside_the_default():
    """A thousandth of 2,000 queries is two. If the tail is full of queries that the default also loses, a method may
    lose two lookups that the default keeps, but not three."""
    default = torch.full((2000, 3), 0.1)
    default[:100] = 0.8
    errors = default.clone()
    errors[500:503, 0], errors[500:502, 1], errors[1000:, 2] = 0.7, 0.7, 0.25
    assert summarize_errors(errors, default)[2].tolist() == pytest.approx([1.6, 1.0044, 1.555], abs=1e-3)
    assert torch.equal(error_quantile(errors, 0.01), error_quantile(default, 0.01))
    # Very small errors count as a small constant.
    assert summarize_errors(errors * 1e-3, default * 1e-4)[2].tolist() == pytest.approx([1.0, 1.0, 1.0], abs=2e-3)
    assert math.isnan(summarize_errors(errors * math.nan, default)[2, 0])


def test_methods_are_compared_with_the_default(layer):
    _, judged = layer
    default, method = make_method("default", {}), AShape(sink_tokens=64, local_tokens=64)
    lost, by_default, by_dense = (
        [result.seen.of_default for result in judged.judge([other] * HEADS)] for other in (method, default, Dense())
    )
    assert by_default == [1.0] * HEADS
    assert max(by_dense) <= 1 + 1e-6 < min(lost)  # dense attention's errors are rounding only


def test_what_unseen_prompts_may_have_is_told_by_leaving_one_out():
    """The largest prompt is 0.1 above the next, equal to it, or 0 like all others."""
    prompts = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.2, 0.0], [0.2, 0.1, 0.0]], dtype=torch.float64)
    assert extrapolate_unseen(prompts).tolist() == pytest.approx([0.4, 0.2, 0.0])
    assert extrapolate_unseen(prompts[:1]).tolist() == prompts[0].tolist()


class NearAndFarCapturer(LinedCapturer):
    """A capture in which even heads attend to the nearest keys only, and odd heads to one far key as well."""

    def layer(self, num_tokens: int, seed: int) -> tuple[LayerTensors, float]:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.zeros(num_tokens, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        v += torch.randn(v.shape, generator=generator)
        angles = torch.arange(num_tokens) * (torch.pi / num_tokens)
        k[..., 0], k[..., 1] = angles.cos()[:, None], angles.sin()[:, None]
        q[..., 0], q[..., 1] = 4e4 * angles.cos()[:, None], 4e4 * angles.sin()[:, None]
        k[200, :, :3] = torch.tensor([0.0, 0.0, 1.0])
        q[2500:, 1::2, 2] = 4e4 + 4  # more than the nearest key has
        return LayerTensors(q, k, v), 1.0


def test_the_default_has_streaming_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_sparse_backend.calibration.judge.PROMPT_TOKENS", 4096)
    job = make_job(tmp_path / "work", num_tokens=4096, num_prompts=2, capturer=NearAndFarCapturer())
    captures = job.capturer(job.prompts, tmp_path)
    judged, without = (captured_layer(captures, Served(1024, 100, finds)) for finds in (True, False))
    even = dict.fromkeys(range(0, HEADS, 2), 256)
    assert [prompt.windows for prompt in judged.prompts] == [even, even]
    assert [prompt.windows for prompt in without.prompts] == [None] * 2
    with_a_short_prompt = CapturedLayer([judged.prompts[0], without.prompts[1]])
    assert torch.equal(with_a_short_prompt._errors_of_default[0], judged._errors_of_default[0])
    streaming = [streaming_method(256) if head in even else make_method("default", {}) for head in range(HEADS)]
    for prompt, errors in zip(judged.prompts, judged._errors_of_default, strict=True):
        assert torch.allclose(errors, prompt.outcome(prompt.layer(streaming)).errors, atol=1e-6)
    # A head that keeps its window costs no more than the default, whatever its window loses.
    assert judged.judge(streaming)[0].seen.of_default <= without.judge(streaming)[0].seen.of_default
