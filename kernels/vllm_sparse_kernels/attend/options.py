# SPDX-License-Identifier: Apache-2.0
"""What a head may ask of ``attend`` beyond exact attention over its index."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttendOptions:
    """Per query head of a layer, on the device. All options are approximations, and None where no head asks.

    A head's margin is λ < 0, in natural units of the scaled scores: for a tile of 128 queries, the product of P and V
    of a step (a block, or 64 stripes) is left out where none of the queries' maxima in it comes within −λ of its
    running maximum. The softmax's sum still counts the step, and the log-sum-exp stays exact. −∞ skips nothing.

    8-bit heads take SageAttention's scores of int8 queries and keys (``smooth_keys``); values stay as they are.
    """

    skip_margins: torch.Tensor | None  # [num_heads] float32
    int8_heads: torch.Tensor | None  # [num_heads] uint8
    all_int8: bool = False
    """Whether every head is an 8-bit one: known to the host, it spares the kernel the other half."""

    @staticmethod
    def of(
        skip_margins: Sequence[float | None], int8_heads: Sequence[bool], device: torch.device
    ) -> "AttendOptions | None":
        """Return the options of a layer's heads; None where no head asks for anything.

        Waits for the device: not for a step.

        Args:
            skip_margins: each head's λ, or None.
            int8_heads: whether each head has 8-bit scores.
            device: where the options lie.

        Returns:
            Options on the device, or None.
        """
        skips, flags = None, None
        if any(margin is not None for margin in skip_margins):
            margins = [-math.inf if margin is None else margin for margin in skip_margins]
            skips = torch.tensor(margins, dtype=torch.float32, device=device)
        if any(int8_heads):
            flags = torch.tensor(int8_heads, dtype=torch.uint8, device=device)
        return None if skips is None and flags is None else AttendOptions(skips, flags, all(int8_heads))

    @property
    def skips(self) -> bool:
        """Whether any head has products skipped."""
        return self.skip_margins is not None

    def check(self, num_heads: int) -> None:
        """Check that there is one value for each head.

        Args:
            num_heads: query heads of the layer.

        Raises:
            ValueError: a tensor is not of ``num_heads`` heads.
        """
        for name in ("skip_margins", "int8_heads"):
            values = getattr(self, name)
            if values is not None and values.shape != (num_heads,):
                raise ValueError(f"AttendOptions: {name} is {tuple(values.shape)}, expected ({num_heads},)")
