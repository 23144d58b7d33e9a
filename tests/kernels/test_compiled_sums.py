# SPDX-License-Identifier: Apache-2.0
"""The passes over the last queries, compiled for Hopper without one: what their speed hangs on."""

import json
import os
import subprocess
import sys

import pytest

THREADS = {"split_lse_kernel": 512, "sums_kernel": 128}
REGISTERS, SHARED_BYTES = 1 << 16, 228 << 10
"""Of a multiprocessor, which keeps 1 KB of the latter for each program."""


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_sums"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[0])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kernel", THREADS)
def test_keys_are_copied_a_tile_ahead(figures: dict[str, dict[str, int]], kernel: str) -> None:
    """A look-up that a tile's address waits for would have each tile wait for its whole way from memory."""
    assert figures[kernel]["copies_ahead"] >= 1


@pytest.mark.parametrize("kernel", THREADS)
def test_two_programs_fit_a_multiprocessor(figures: dict[str, dict[str, int]], kernel: str) -> None:
    """One's exponentials hide behind the other's products."""
    assert 2 * (figures[kernel]["shared_bytes"] + 1024) <= SHARED_BYTES
    assert 2 * THREADS[kernel] * figures[kernel]["registers"] <= REGISTERS
