# SPDX-License-Identifier: Apache-2.0
"""The agreement of selection engines, with stand-ins for the engine of a card."""

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("stand-ins select in Triton's interpreter here", allow_module_level=True)

from benchmarks.selection_agreement import least_agreement
from tests.helpers.batches import random_batch
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels.engine_trial import sharpened
from vllm_sparse_kernels.methods.top_p.method import TopP, select_on_portable
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec

BATCHES = [sharpened(random_batch([(3000, 140)], 2, 1, 64, 32, torch.float32, seed=seed)) for seed in (0, 1)]


def never_refuses(spec: SelectSpec) -> str | None:
    return None


PORTABLE = SelectEngine("portable", never_refuses, select_on_portable)


def keep_all_in_second_batch(method, q, cache, index, heads, scale) -> None:
    """Select as the portable engine does, but keep every causal block of the second batch."""
    select_on_portable(method, q, cache, index, heads, scale)
    if q is BATCHES[1].q:
        for i_tile, tile in enumerate(index.rows.tile_list):
            kept = torch.ones(index.num_causal_blocks(tile), dtype=torch.bool)
            for head in heads.tolist():
                index.set_blocks(head, i_tile, kept)


def test_the_least_share_of_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopP, "select_engines", (PORTABLE, PORTABLE))
    assert least_agreement("top_p", 64, BATCHES) == 1.0
    other = SelectEngine("hopper", never_refuses, keep_all_in_second_batch)
    monkeypatch.setattr(TopP, "select_engines", (other, PORTABLE))
    assert least_agreement("top_p", 64, BATCHES[:1]) == 1.0
    assert 0 < least_agreement("top_p", 64, BATCHES) < 1.0


def test_an_engine_that_the_device_has_not_is_refused() -> None:
    with pytest.raises(BenchError, match="top_p: the selection engine hopper is not usable here"):
        least_agreement("top_p", 64, BATCHES)
