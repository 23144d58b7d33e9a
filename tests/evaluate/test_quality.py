# SPDX-License-Identifier: Apache-2.0
"""Plans measured on a capture, against the oracle; and the benchmark's command line on a small model."""

import itertools

import pytest
import torch

from benchmarks.kept import Asked, measure_plans, select_layer
from benchmarks.oracle import measure
from vllm_sparse_backend.profiling.capture import capture
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_kernels import PagedCache, Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plan(captured, method: str, **more) -> Plan:
    params = more.pop("params", {})
    return Plan.build(SparsePrefillConfig(method=method, params=params, **more), captured.shape)


@pytest.fixture
def captured(llama, prompt, tmp_path):
    # Queries and keys of random weights are short: made longer, attention is far from uniform.
    made = capture(llama(initializer_range=0.3, head_dim=64), prompt, tmp_path, DEVICE)
    assert made.num_tokens == 333
    return made


def test_chunks_are_measured_as_rows_of_their_own(captured):
    """Chunk by chunk, as the oracle sees one step with a row for each of them."""
    asked = plan(captured, "vertical_slash", params={"vertical_tokens": 20, "slash_tokens": 30})
    (kept,) = measure_plans(captured, [Asked(asked)], 130, DEVICE).kept
    q, k, v = captured.read(1, DEVICE)
    pages = torch.arange(3, dtype=torch.int32, device=DEVICE)
    cache = PagedCache(*(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 51)).unflatten(0, (3, 128)) for x in (k, v)))
    rows = Rows((0, 130, 260), (130, 130, 73), (0, 130, 260), pages.expand(3, 3).contiguous())
    index = select_layer(asked.layer(1), q, cache, rows, captured.scales[1])
    expected = measure(q, cache, index, captured.scales[1])
    assert kept.recall[1] == pytest.approx(expected.recall.tolist(), abs=1e-6)
    assert kept.density[1] == pytest.approx(expected.density.tolist(), abs=1e-12)
    assert 0 < min(kept.density[1]) < 1


LADDERS = {
    "a_shape": [{"sink_tokens": 0, "local_tokens": n} for n in (1, 200, 600)],
    "anchor_attention": [{"theta": x, "step_tiles": 1} for x in (0.0, 6.0)],
    "block_sparse": [{"top_blocks": n} for n in (0, 2, 6)],
    "flex_vertical_slash": [{"gamma": x} for x in (0.2, 0.5, 0.9)],
    "sale": [{"tau": x} for x in (0.9, 0.02)],
    "sparge_attn": [{"kept_mass": x, "min_similarity": -1.0} for x in (0.2, 0.5, 0.9)],
    "vertical_slash": [{"vertical_tokens": n, "slash_tokens": 2 * n} for n in (5, 50, 300)],
}


@pytest.mark.full
def test_looser_settings_keep_more_of_every_head(llama, tmp_path):
    token_ids = torch.randint(97, (900,), generator=torch.Generator().manual_seed(3)).tolist()
    captured = capture(llama(initializer_range=0.08, head_dim=64), token_ids, tmp_path, DEVICE)
    settings = [(method, params) for method, ladder in LADDERS.items() for params in ladder]
    plans = [Asked(plan(captured, method, params=params)) for method, params in settings]
    measured = iter(measure_plans(captured, plans, 500, DEVICE).kept)
    for method in LADDERS:
        ladder = [next(measured) for _ in LADDERS[method]]
        for less, more in itertools.pairwise(ladder):
            assert less.mean_density < more.mean_density, method
            for figure in ("recall", "density"):
                before, after = (torch.tensor(getattr(kept, figure)) for kept in (less, more))
                assert bool((before <= after + 1e-6).all()), (method, figure)
