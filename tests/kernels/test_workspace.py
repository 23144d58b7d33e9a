# SPDX-License-Identifier: Apache-2.0
"""The workspace: its allocations do not overlap, frames release memory, and a full buffer raises an error."""

import pytest
import torch

from vllm_sparse_kernels import Workspace, workspace as module

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


def test_who_asks_again_gets_the_same_tensor_and_may_write_it() -> None:
    """A view costs the host more than a look-up, and inference mode must not stay with tensors created in it."""
    workspace = Workspace(CPU, torch.empty(1 << 16, dtype=torch.uint8))
    with workspace.frame(), torch.inference_mode():
        first = workspace.empty(2, 8)
    with workspace.frame():
        assert workspace.empty(2, 8).zero_() is first
    with workspace.frame():
        other = workspace.empty(4, 4)
        assert (other is first, other.data_ptr(), other.shape) == (False, first.data_ptr(), (4, 4))
    for i in range(2 * module.MAX_VIEWS):  # it does not grow without end
        workspace.empty(0, i)
    assert len(workspace._views) <= module.MAX_VIEWS


def test_a_full_buffer_says_so() -> None:
    workspace = Workspace(CPU, torch.empty(512, dtype=torch.uint8))
    with pytest.raises(MemoryError, match="expected at most 512 bytes"):
        workspace.empty(513, dtype=torch.uint8)
    assert workspace.used_bytes == 0
