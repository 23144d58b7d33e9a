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

    A head may have such steps dropped instead (``drop_margins``, λ < 0 again, the same test): neither exponents nor sum
    are computed either, so that the step might as well not be in the index. Weights of what is left sum up to one, and
    the log-sum-exp is of what is left.

    8-bit heads take SageAttention's scores of int8 queries and keys (``smooth_keys``); values stay as they are.
    """

    skip_margins: torch.Tensor | None  # [num_heads] float32
    int8_heads: torch.Tensor | None  # [num_heads] uint8
    all_int8: bool = False
    """Whether every head is an 8-bit one: known to the host, it spares the kernel the other half."""

    drop_margins: torch.Tensor | None = None  # [num_heads] float32

    @staticmethod
    def of(
        skip_margins: Sequence[float | None],
        int8_heads: Sequence[bool],
        device: torch.device,
        drop_margins: Sequence[float | None] = (),
    ) -> "AttendOptions | None":
        """From one value for each head; None where no head asks for anything. Waits for the device: not for a step."""
        skips, drops = (_margins(margins, device) for margins in (skip_margins, drop_margins))
        if skips is None and drops is None and not any(int8_heads):
            return None
        flags = torch.tensor(int8_heads, dtype=torch.uint8, device=device) if any(int8_heads) else None
        return AttendOptions(skips, flags, all(int8_heads), drops)

    @property
    def skips(self) -> bool:
        """Whether any head has products skipped, or whole steps."""
        return self.skip_margins is not None or self.drop_margins is not None

    def check(self, num_heads: int) -> None:
        """Raise ValueError where there is not one value for each head."""
        for name in ("skip_margins", "int8_heads", "drop_margins"):
            given = getattr(self, name)
            if given is not None and given.shape != (num_heads,):
                raise ValueError(f"AttendOptions: {name} is {tuple(given.shape)}, expected ({num_heads},)")


def _margins(margins: Sequence[float | None], device: torch.device) -> torch.Tensor | None:
    """float32, −∞ of a head that has none; None where no head has one."""
    if all(margin is None for margin in margins):
        return None
    return torch.tensor([-math.inf if m is None else m for m in margins], dtype=torch.float32, device=device)
