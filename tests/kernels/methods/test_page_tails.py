# SPDX-License-Identifier: Apache-2.0
"""Selection does not depend on what a page holds past its sequence's end.

Other backends let such values into their results: NaN from a page that another request had used (vllm#27264), and
finite values in sums over whole pages (torch-spyre#4517).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.batches import random_batch
from tests.helpers.lined import DEVICE
from tests.helpers.method_cases import DTYPES, VARIANTS, all_lists, select
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.methods import METHODS

TAILS = (0.0, 1e3, -65504.0)
CASES = [(name, params) for name in METHODS for params in VARIANTS.get(name, [{}])]
IN_SHORT = ("a_shape", "block_sparse", "sparge_attn", "top_p")


def fresh(batch: Batch) -> Batch:
    """The batch in a pass of its own: SharePrefill keeps patterns from layer to layer of a pass."""
    return replace(batch, rows=replace(batch.rows))


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize(
    ("name", "params"),
    [pytest.param(*case, marks=() if case[0] in IN_SHORT and not case[1] else pytest.mark.full) for case in CASES],
    ids=str,
)
def test_selection_ignores_page_tails(name: str, params: dict[str, Any], by_reference: bool) -> None:
    method = make_method(name, params)
    # A short last tile, a row in its first page, and pages of which most is tail.
    batch = random_batch([(333, 130), (0, 63), (128, 1)], 2, 1, 64, 128, DTYPES[1], DEVICE)
    is_tail = batch.cache.keys.isnan()
    assert is_tail.any()
    expected = all_lists(select(method, fresh(batch), by_reference=by_reference))
    tails = torch.tensor(TAILS, dtype=DTYPES[1], device=DEVICE)
    tails = tails[torch.arange(is_tail.numel(), device=DEVICE) % len(TAILS)].view(is_tail.shape)
    keys, values = (torch.where(is_tail, tails, half) for half in (batch.cache.keys, batch.cache.values))
    filled = replace(fresh(batch), cache=replace(batch.cache, keys=keys, values=values))
    assert all_lists(select(method, filled, by_reference=by_reference)) == expected
