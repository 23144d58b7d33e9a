# SPDX-License-Identifier: Apache-2.0
"""What a selection method is: a frozen set of parameters that can fill rows of a SparseIndex.

A method's file defines one dataclass derived from ``Method`` per pattern. Its fields are the paper's parameters with
the paper's defaults; ``__post_init__`` refuses values out of range. ``reference.py`` beside it has the same in plain
torch, and the folder's ``SPECS`` pairs the two (``spec.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch

from vllm_sparse_kernels.index import LayerShape, SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select.engine import PORTABLE, SelectEngine, never_refuses
from vllm_sparse_kernels.select.footprint import most_bytes
from vllm_sparse_kernels.select.parameters import require


@dataclass(frozen=True)
class Method(ABC):
    """Parameters of one selection method; heads of a layer whose methods are alike are selected together."""

    block_tokens: ClassVar[int] = 64
    """Widest block of an index that keeps the method's selection as narrow as it is; 128 runs faster on Hopper."""

    @property
    def finest_block_tokens(self) -> int | None:
        """Narrowest block by which the method's selection still gains, where engines take such blocks (``width.py``).

        None: it takes no blocks narrower than ``block_tokens``.
        """
        return None

    @property
    def shown_fields(self) -> dict[str, object]:
        """The method's parameters by name."""
        return {parameter.name: getattr(self, parameter.name) for parameter in fields(self) if parameter.init}

    @property
    def alike(self) -> "Method":
        """Equal for methods that ``merged`` joins. What is alike has one name."""
        return self

    @property
    def sized(self) -> "Method":
        """Equal for methods, merged or not, that take as much room in an index and a workspace."""
        return self.alike

    @classmethod
    def merged(cls, methods: Sequence[Self]) -> "Method":
        """What selects the heads of one layer that have these methods, all alike; its ``heads`` come in their order.

        Args:
            methods: each head's own method.
        """
        return methods[0]

    def of_heads(self, num_heads: int) -> Sequence[Self]:
        """The methods of the ``num_heads`` heads that this one, maybe merged of theirs, selects; in their order.

        Args:
            num_heads: query heads.
        """
        return (self,) * num_heads

    @property
    def skip_margin(self) -> float | None:
        """λ, by which the head asks ``attend`` to skip products (``AttendOptions``); None does not ask."""
        return None

    @property
    def int8_scores(self) -> bool:
        """Whether the head asks ``attend`` for 8-bit scores."""
        return False

    @property
    def sharing(self) -> "Method":
        """Equal for methods whose heads are not ``unshared``."""
        return self

    @property
    def unshared(self) -> "Method":
        """What a head does instead if no other head of its rank, in any layer, has an equal ``sharing``."""
        return self

    @property
    def share_kept(self) -> float | None:
        """p, the share of attention that is kept, of a method that lets requests set it."""
        return None

    def keeping(self, share: float) -> "Method":
        """The method, maybe merged of several, with this p; itself if it has none.

        Args:
            share: p.
        """
        return self

    @classmethod
    def objection(cls, methods: Sequence[Self]) -> str | None:
        """Why these methods, those of this class on all heads of a model, would not do what they are for.

        Args:
            methods: each head's own method.
        """
        return None

    @classmethod
    def summary(cls, methods: Sequence[Self]) -> dict[str, object]:
        """What a log shows of many heads whose methods, merged or not, are alike: what they have in common.

        Args:
            methods: each head's own method.
        """
        settings = {setting for m in methods for setting in (getattr(m, "settings", ()) or (m,))}
        all_fields = [setting.shown_fields for setting in settings]
        common = {name: value for name, value in all_fields[0].items() if all(f.get(name) == value for f in all_fields)}
        return common if len(settings) == 1 else common | {"settings": len(settings)}

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        """Room that one head's stripes need; of merged methods, enough for any of theirs.

        Methods that keep blocks alone keep this.

        Args:
            rows: the rows of a step.
        """
        return StripeLayout.none(rows)

    def workspace_bytes(self, rows: Rows, shape: LayerShape, num_selected: int, stripe_capacity: int) -> int:
        """At least what ``select`` of ``num_selected`` heads takes from the workspace at a time, for these rows, with
        any of the ``select_engines``.

        ``stripe_capacity``: of the method's ``stripe_layout`` for them. A method that takes more than any of those in
        ``footprint.py`` says so here. More tiles or keys never make it less, but for rounding: an arena is sized by the
        longest row.

        Args:
            rows: the rows of a step.
            shape: the layer's heads and blocks.
            num_selected: query heads that are selected.
            stripe_capacity: stripes of one head, of all tiles.
        """
        return most_bytes(rows, shape, num_selected, stripe_capacity)

    @property
    def select_engines(self) -> Sequence[SelectEngine]:
        """What can run the selection, the fastest first; the last one runs wherever Triton does.

        A method with kernels for some card alone overrides this, and ``select`` with it (``select/engine.py``).
        """
        return (SelectEngine(PORTABLE, never_refuses, type(self).select),)

    @abstractmethod
    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        """Fill the rows of ``index`` that belong to ``heads``, for all of its tiles, on the device, without waiting.

        q [num_tokens, num_heads, head_dim] holds the step's queries at the tokens that ``index.rows`` names; heads
        [n] int32 lists query heads (on the device); ``scale`` multiplies q·k, usually 1/√head_dim.

        Args:
            q: [num_tokens, num_heads, head_dim], in the cache's dtype.
            cache: keys and values, pages of [page_size, num_kv_heads, head_dim].
            index: the SparseIndex that is filled.
            heads: [n] int32 on the device, the query heads that are selected.
            scale: takes products of elements to scores, in natural units; > 0.
        """


@dataclass(frozen=True)
class PerHead(Method):
    """A method that selects heads together which differ in some of its fields, those of ``differing``.

    ``select`` asks ``of_heads`` for the method of each of the heads that it is given.
    """

    differing: ClassVar[tuple[str, ...]]

    settings: tuple[Any, ...] = field(default=(), init=False, repr=False)
    """Of methods that were merged: these, head by head."""

    @property
    def alike(self) -> Self:
        """The method without what its heads may differ in."""
        kept = (parameter.name for parameter in fields(self) if parameter.init and parameter.name not in self.differing)
        return type(self)(**{name: getattr(self, name) for name in kept})

    @classmethod
    def merged(cls, methods: Sequence[Self]) -> Self:
        """Return one method for several heads that differ in ``differing``: see ``Method.merged``.

        Args:
            methods: each head's own method.

        Returns:
            A method whose settings are the heads', if they differ.
        """
        merged = methods[0].alike
        require(all(m.alike == merged for m in methods), "methods", methods, f"methods alike {merged}")
        if len(set(methods)) == 1:
            return methods[0]
        object.__setattr__(merged, "settings", tuple(methods))
        return merged

    def of_heads(self, num_heads: int) -> Sequence[Any]:
        """Return each head's own method: see ``Method.of_heads``.

        Args:
            num_heads: query heads.

        Returns:
            ``num_heads`` methods.
        """
        if not self.settings:
            return (self,) * num_heads
        require(len(self.settings) == num_heads, "settings", self.settings, f"one for each of the {num_heads} heads")
        return self.settings
