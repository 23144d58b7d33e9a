# SPDX-License-Identifier: Apache-2.0
"""Gluon kernels without a GPU, warp by warp: their own source, under schedules that a GPU shows once in a million.

Each warp is a thread of which one runs at a time. At every access to memory and every barrier another may go on: which,
a seed decides. Bulk copies and matrix products are tasks of their own, done as late or as early as the schedule has it;
what a copy is to fill holds NaN from the moment that it is asked for. So a kernel that reads too early, hands a buffer
back too early, or waits for the wrong phase computes something wrong, or nothing at all, under some seed.

What is taken for granted: a matrix product begins when all four warps of a group have asked for it, products of a group
run one after the other, and each is over for all four warps at once. (Each warp waits for its own part; Triton has them
meet after that, before a buffer is handed back. test_hopper_compiles looks for places where it does not.) Nothing else
holds the warps of a group together, not even a change of layout, which may go through shared memory. Fences are taken
to be in place, and registers to be each warp's own: what ptxas makes of them other tests look at.

What is right here need not be right on a card: of two variants that overlap items, both of which gave NaN there beside
other processes, schedules show what is wrong with the first and find nothing in the second. test_beside_others decides.

A tensor's rows are shared out among the warps of a group in equal parts, in order; vectors and numbers each warp has
whole. Only what ``hopper_kernel`` uses of Gluon is here.
"""

from tests.kernels.warps.gluon import Fault, Gluon, Kernel
from tests.kernels.warps.schedule import Barrier, Deadlock
from tests.kernels.warps.tensors import Matrix

__all__ = ["Barrier", "Deadlock", "Fault", "Gluon", "Kernel", "Matrix"]
