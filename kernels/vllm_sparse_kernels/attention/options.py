# SPDX-License-Identifier: Apache-2.0
"""``AttendOptions``: approximations that heads may request from ``attend``, beyond the sparsity of their index."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttendOptions:
    """Options per query head of a layer, on the device.

    A head's margin λ < 0 is in natural units of the scaled scores. For a tile of 128 queries, the P·V product of a step
    (a block, or 64 stripes) is skipped if no query's maximum in the step comes within −λ of its running maximum. The
    softmax's sum still includes the step, so that the log-sum-exp stays exact. −∞ skips nothing.

    Heads with 8-bit scores multiply int8 queries and keys as SageAttention does (``smooth_keys``); values keep their
    dtype.

    Attributes:
        skip_margins: [num_heads] float32, λ of each head; None if no head skips products.
        int8_heads: [num_heads] uint8, 1 for heads with 8-bit scores; None if no head has them.
        all_int8: Whether every head has 8-bit scores. The host knows it, so that the kernel can omit the other path.
    """

    skip_margins: torch.Tensor | None
    int8_heads: torch.Tensor | None
    all_int8: bool = False

    @staticmethod
    def from_heads(
        skip_margins: Sequence[float | None], int8_heads: Sequence[bool], device: torch.device
    ) -> "AttendOptions | None":
        """Build the options from one value for each head. Synchronises with the device: call it outside of steps.

        ``skip_margins`` has each head's λ; None for heads that skip nothing.
        """
        margins_tensor, int8_tensor = None, None
        if any(margin is not None for margin in skip_margins):
            margins = [-math.inf if margin is None else margin for margin in skip_margins]
            margins_tensor = torch.tensor(margins, dtype=torch.float32, device=device)
        if any(int8_heads):
            int8_tensor = torch.tensor(int8_heads, dtype=torch.uint8, device=device)
        if margins_tensor is None and int8_tensor is None:
            return None
        return AttendOptions(margins_tensor, int8_tensor, all(int8_heads))

    @property
    def skips(self) -> bool:
        """Whether any head skips products."""
        return self.skip_margins is not None
