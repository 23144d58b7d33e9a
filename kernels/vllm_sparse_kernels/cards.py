# SPDX-License-Identifier: Apache-2.0
"""The GPUs that this package knows: the single source for documents, ``doctor``, start-up and the compile tests.

A GPU whose compute capability is not listed may run the kernels, because Triton compiles them on the spot. Its status
is unknown, as ``status_note`` reports.
"""

from typing import NamedTuple

import torch
from triton.compiler.compiler import max_shared_mem

HOPPER_CAPABILITY = (9, 0)
"""Compute capability of H100 and H200, the only one on which the Hopper kernels run."""


class Card(NamedTuple):
    """GPUs of one compute capability."""

    capability: tuple[int, int]
    names: str
    shared_bytes: int

    @property
    def is_measured(self) -> bool:
        """Whether the kernels ran on such a GPU. Tests only compile them for the others."""
        return self.capability == HOPPER_CAPABILITY


CARDS = (
    Card((8, 0), "A100, A30", 163 << 10),
    Card((8, 6), "A10, A40, RTX A6000, RTX 3090", 99 << 10),
    Card((8, 9), "L4, L40S, RTX 4090", 99 << 10),
    Card(HOPPER_CAPABILITY, "H100, H200", 227 << 10),
    Card((10, 0), "B200, GB200", 227 << 10),
    Card((12, 0), "RTX 5090, RTX PRO 6000", 99 << 10),
)
"""All GPUs for which tests compile the kernels, by compute capability."""


def find_card(capability: tuple[int, int]) -> Card | None:
    """Return the GPUs of a compute capability."""
    return next((card for card in CARDS if card.capability == tuple(capability)), None)


def status_note(capability: tuple[int, int]) -> str | None:
    """Return a note for operators on the status of GPUs of this (major, minor) compute capability."""
    card = find_card(capability)
    if card is not None and card.is_measured:
        return None
    measured = ", ".join(card.names for card in CARDS if card.is_measured)
    number = ".".join(map(str, capability))
    advice = f"compare speed and answers with the stock backend before production, or use one of {measured}"
    if card is None:
        return f"compute capability {number} is unknown to this release: no kernel was compiled or run for it; {advice}"
    return (
        f"compute capability {number} ({card.names}): the kernels were compiled for it but never run on one; {advice}"
    )


def shared_bytes(device: torch.device) -> int:
    """Return the maximum shared memory of a program."""
    if device.type != "cuda":
        return 1 << 62
    return int(max_shared_mem(torch.cuda.current_device() if device.index is None else device.index))
