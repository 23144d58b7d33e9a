# SPDX-License-Identifier: Apache-2.0
"""Compile the passes over the last queries for Hopper, without a GPU, and return figures by kernel."""

import re
from contextlib import ExitStack
from unittest.mock import patch

import torch

from tests.helpers.batches import every_head, random_batch, random_index
from tests.helpers.offline_compiler import Code, Recorder, compiling_for
from vllm_sparse_kernels.selection import last_queries

KERNELS = ("split_lse_kernel", "sums_kernel")


def sums_figures() -> dict[str, dict[str, int]]:
    batch = random_batch([(3000, 200)], 32, 8, 128, page_size=16, dtype=torch.bfloat16)
    call = batch.call(random_index(batch, 128, 0.2, 0, 0), every_head(None, 32))
    recorders = {name: Recorder(getattr(last_queries, name)) for name in (*KERNELS, "block_diagonals_kernel")}
    estimate = last_queries.Estimate(64, band=64)
    with ExitStack() as stack:
        stack.enter_context(compiling_for())
        for name, recorder in recorders.items():
            stack.enter_context(patch.object(last_queries, name, recorder))
        last_queries.last_query_sums(call, (0, 1), estimate)
    figures = {}
    for name in KERNELS:
        (compiled,) = recorders[name].compiled
        code = Code.of(compiled)
        # Copies that may still be in flight while a loop continues; after a loop, no copies are in flight.
        waits = [int(count) for count in re.findall(r"async_wait [^\n]*num = (\d+)", compiled.asm["ttgir"])]
        figures[name] = {"registers": code.registers, "shared_bytes": code.shared_bytes, "copies_ahead": max(waits)}
    return figures
