# SPDX-License-Identifier: Apache-2.0
"""The workspace: what it hands out does not overlap, frames give back, and a full buffer says so."""

import pytest
import torch

from vllm_sparse_kernels import Workspace

CPU = torch.device("cpu")


def test_tensors_of_a_buffer_do_not_overlap_and_are_aligned() -> None:
    workspace = Workspace(CPU, torch.empty(4096, dtype=torch.uint8))
    assert workspace.buffer is not None
    first, second = workspace.empty(3, 5, dtype=torch.int32), workspace.empty(7, dtype=torch.float16)
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    assert (second.data_ptr() - workspace.buffer.data_ptr()) % 256 == 0
    assert first.shape == (3, 5)


def test_a_frame_gives_back_and_the_peak_stays() -> None:
    workspace = Workspace(CPU, torch.empty(1024, dtype=torch.uint8))
    with workspace.frame():
        before = workspace.empty(256, dtype=torch.uint8).data_ptr()
    assert workspace.empty(256, dtype=torch.uint8).data_ptr() == before
    assert workspace.peak_bytes == workspace.used_bytes == 256


def test_a_full_buffer_says_so() -> None:
    workspace = Workspace(CPU, torch.empty(512, dtype=torch.uint8))
    with pytest.raises(MemoryError, match="the buffer has 512"):
        workspace.empty(513, dtype=torch.uint8)
    assert workspace.used_bytes == 0


def test_without_a_buffer_bytes_are_counted_as_with_one() -> None:
    workspace = Workspace(CPU)
    assert workspace.empty(0, 4).shape == (0, 4)
    workspace.empty(65)
    assert workspace.peak_bytes == 512
