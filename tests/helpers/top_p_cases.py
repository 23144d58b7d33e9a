# SPDX-License-Identifier: Apache-2.0
"""Batches for tests of ``top_p``."""

from dataclasses import replace
from typing import Any

import torch

from tests.helpers.batches import random_batch
from tests.helpers.lined import DEVICE
from vllm_sparse_kernels.engine_trial import Batch

LENGTHS = [(0, 1), (700, 63), (130, 140), (321, 1)]


def make_batch(
    lengths: Any = LENGTHS, heads: tuple[int, int, int] = (2, 1, 64), page_size: int = 16, dtype: Any = torch.float32,
    seed: int = 0,
) -> Batch:  # fmt: skip
    """Return a batch with keys around a mean far from zero, and queries that prefer some blocks of keys strongly."""
    batch = random_batch(lengths, *heads, page_size, dtype, DEVICE, seed, gap_tokens=3)
    generator = torch.Generator(DEVICE).manual_seed(seed + 1)
    batch.cache.keys.add_(3 * torch.randn(heads[1:], generator=generator, device=DEVICE).to(dtype))
    return replace(batch, q=batch.q * 2.5)
