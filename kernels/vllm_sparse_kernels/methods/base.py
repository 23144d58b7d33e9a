# SPDX-License-Identifier: Apache-2.0
"""``Method``: the parameters of a selection method for one head.

A method's file defines one dataclass derived from ``Method`` per pattern. Its fields are the paper's parameters. Their
defaults are the paper's where it states any, and otherwise those of the authors' code. ``__post_init__`` refuses values
out of range. ``reference.py`` next to it implements the same selection in plain torch, and the folder's ``SPECS`` pairs
the two (``spec.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.index import StripeLayout
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import PORTABLE, SelectEngine, portable_refusal


@dataclass(frozen=True)
class Method(ABC):
    """Parameters of one selection method for one head.

    Heads of a layer whose methods have the same ``group_key`` are selected together (``HeadGroup``).

    Attributes:
        block_tokens: Widest index block, in keys, that does not make the method's selection coarser. Blocks of 128 keys
            are faster on Hopper than blocks of 64.
        differing: Names of the fields that may differ between heads that are selected together.
        leaves_width_to_others: Whether the method supports narrow blocks, but hardly benefits from them. Such heads do
            not affect whether a layer has narrow blocks.
    """

    block_tokens: ClassVar[int] = 64
    differing: ClassVar[tuple[str, ...]] = ()
    leaves_width_to_others: ClassVar[bool] = False

    @property
    def finest_block_tokens(self) -> int | None:
        """Narrowest index block, in keys, from which the selection still benefits (``block_width.py``).

        None if the method does not support blocks narrower than ``block_tokens``.
        """
        return None

    @property
    def shown_fields(self) -> dict[str, object]:
        """The method's parameters by name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.init}

    @property
    def group_key(self) -> Self:
        """Key of the heads that are selected together: the method with the defaults of the ``differing`` fields."""
        names = (item.name for item in fields(self) if item.init and item.name not in self.differing)
        return type(self)(**{name: getattr(self, name) for name in names})

    @property
    def skip_margin(self) -> float | None:
        """λ of ``AttendOptions.skip_margins`` for this head; None to skip nothing."""
        return None

    @property
    def int8_scores(self) -> bool:
        """Whether attention of this head uses 8-bit scores (``AttendOptions.int8_heads``)."""
        return False

    @property
    def sharing(self) -> "Method":
        """Key that is equal for methods whose heads share results with each other."""
        return self

    @property
    def unshared(self) -> "Method":
        """Method of a head if no other head of its rank, in any layer, has an equal ``sharing`` key."""
        return self

    @property
    def least_prompt_tokens(self) -> int:
        """Prompts of up to this many tokens lose no key under the method, regardless of queries and keys."""
        return 0

    @property
    def share_kept(self) -> float | None:
        """p, the share of attention mass that is kept, in (0, 1]; None if the method does not let requests set it."""
        return None

    @property
    def in_short_contexts(self) -> "Method":
        """The method with the rule of long contexts also in short ones, for trials of engines, which have few keys."""
        return self

    def with_kept_mass(self, share: float) -> "Method":
        """Return the method with the share p in (0, 1] of kept attention mass. Only ``differing`` fields may change."""
        return self

    @classmethod
    def objection(cls, methods: Sequence[Self]) -> str | None:
        """Return why the methods of this class on all heads of a model have no effect together; None if they have."""
        return None

    @classmethod
    def summary(cls, methods: Sequence[Self]) -> dict[str, object]:
        """Summarise methods with the same ``group_key``, at least one, for a log."""
        settings = set(methods)
        all_fields = [setting.shown_fields for setting in settings]
        common = {
            name: value
            for name, value in all_fields[0].items()
            if all(shown_fields.get(name) == value for shown_fields in all_fields)
        }
        return common if len(settings) == 1 else common | {"settings": len(settings)}

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        """Return the room that one head's stripes need. The default is for methods that keep only blocks."""
        return StripeLayout.none(rows)

    @property
    def select_engines(self) -> Sequence[SelectEngine]:
        """Engines that can run the selection, fastest first.

        The last engine is ``select``. A method with kernels for certain GPUs puts their engines before it
        (``selection/engine.py``).
        """
        return (SelectEngine(PORTABLE, portable_refusal, select_by_method),)

    def least_shared_bytes(self, head_dim: int) -> int:
        """Return the minimum shared memory of the portable engine's kernels, in bytes.

        0 if the kernels fit every GPU whose shared memory holds a block of keys.
        """
        return 0

    @abstractmethod
    def select(self, call: Call) -> None:
        """Fill the lists of the call's heads, for all tiles, without synchronising with the device.

        It runs on every device that Triton supports and that has ``least_shared_bytes``. This method is
        ``call.method``. Parameters that differ between heads are in ``call.heads``.
        """


def select_by_method(call: Call) -> None:
    """Fill the lists of the call's heads by their method."""
    call.method.select(call)
