# SPDX-License-Identifier: Apache-2.0
"""Prefill of one layer, for serving, calibration and evaluation.

    at start-up: plan (method of each head) → ``Layer.of``
    each step:   ``Layer.new_call`` (allocate) → ``run`` = ``Layer.select`` (keys) → ``Layer.attend`` (output)

On a GPU, kernels select and an engine attends. On a CPU, the references do both in plain torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from vllm_sparse_kernels.attention import PORTABLE, widest_block
from vllm_sparse_kernels.attention.engine import AttendEngine
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.reference import attend as reference_attend
from vllm_sparse_kernels.block_width import index_block_tokens
from vllm_sparse_kernels.call import Call, HeadGroup
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.index import IndexLayout, SparseIndex, StripeLayout
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec, choose_select_engine, portable_refusal
from vllm_sparse_kernels.workspace import Workspace


@dataclass(frozen=True)
class LayerPlan:
    """The method of each query head of a layer on this rank."""

    methods: tuple[Method, ...]

    @staticmethod
    def of(methods: Sequence[Method], counts: Mapping[Method, int]) -> "LayerPlan":
        """Build the plan of a layer from its heads' methods.

        ``counts`` has, by ``Method.sharing``, the number of heads in all layers that may share results.
        """
        return LayerPlan(tuple(method if counts[method.sharing] > 1 else method.unshared for method in methods))

    @cached_property
    def distinct_methods(self) -> tuple[Method, ...]:
        """The methods, each once."""
        return tuple(dict.fromkeys(self.methods))

    @cached_property
    def groups(self) -> tuple[HeadGroup[Method], ...]:
        """The heads that are selected together: those whose methods have the same ``group_key``."""
        heads: dict[Method, list[int]] = {}
        for head, method in enumerate(self.methods):
            heads.setdefault(method.group_key, []).append(head)
        return tuple(HeadGroup(tuple(ids), tuple(self.methods[head] for head in ids)) for ids in heads.values())


def layer_plan(methods: Sequence[Method]) -> LayerPlan:
    """Build the plan of a model's only layer from the method of each head."""
    return LayerPlan.of(methods, Counter(method.sharing for method in methods))


def fits_shared_memory(plan: LayerPlan, head_dim: int, device: torch.device) -> bool:
    """Return whether the device's shared memory holds a block of keys for attention, and each method's selection."""
    if widest_block(head_dim, shared_bytes(device)) is None:
        return False
    specs = (SelectSpec(group.method, device, head_dim) for group in plan.groups)
    return all(portable_refusal(spec) is None for spec in specs)


def attend_options(methods: Sequence[Method], device: torch.device) -> AttendOptions | None:
    """Collect the approximations that the heads of a layer request from ``attend``."""
    return AttendOptions.from_heads([m.skip_margin for m in methods], [m.int8_scores for m in methods], device)


@dataclass(frozen=True, eq=False)
class Layer:
    """The prefill of a layer, prepared before the first step. Layers with equal plans may share one object.

    Attributes:
        plan: The plan of the layer.
        options: Approximations that heads request from ``attend``; None without any.
        block_tokens: Keys of an index block.
        by_kernels: Whether kernels select and attend, as on a GPU; otherwise the references do.
        select_engines: Per group, the engine that selects if ``by_kernels``.
        engine: The engine that attends if ``by_kernels``.
    """

    plan: LayerPlan
    options: AttendOptions | None
    block_tokens: int
    by_kernels: bool
    select_engines: tuple[SelectEngine, ...]
    engine: AttendEngine = PORTABLE

    @staticmethod
    def of(
        plan: LayerPlan, head_dim: int, device: torch.device, engine: str = "auto", block_tokens: int | None = None
    ) -> "Layer":
        """Build the layer as it runs before any trial. Synchronises with the device: call it outside of steps.

        Args:
            engine: Name of the configured attention engine, on which the width of index blocks depends. The layer
                attends on ``portable`` until another engine is chosen (``dataclasses.replace``).
            block_tokens: Keys of an index block; None for the width that suits the methods (``block_width``).
        """
        specs = [SelectSpec(group.method, device, head_dim) for group in plan.groups]
        return Layer(
            plan,
            attend_options(plan.methods, device),
            block_tokens or index_block_tokens(plan.methods, head_dim, device, engine),
            by_kernels=device.type != "cpu",
            select_engines=tuple(choose_select_engine(spec).engine for spec in specs),
        )

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return len(self.plan.methods)

    @property
    def attention_name(self) -> str:
        """Name of the engine that computes attention."""
        return self.engine.name if self.by_kernels else "torch"

    def allocate_index(self, rows: Rows, workspace: Workspace | None = None) -> SparseIndex:
        """Allocate the layer's index for some rows; without ``workspace``, torch allocates every tensor.

        Layers share the layout of their indices if they are equal, or if no head has stripes.
        """
        has_stripes = any(rows.once(_stripe_layout, method).capacity for method in self.plan.distinct_methods)
        layout = rows.once(_index_layout, self.num_heads, self.block_tokens, self if has_stripes else None)
        return layout.new_index(workspace or Workspace(rows.device))

    def new_call(
        self, q: torch.Tensor, cache: PagedCache, rows: Rows, scale: float, workspace: Workspace | None = None
    ) -> Call:
        """Allocate the layer's index for some rows, and return the arguments of ``select`` and ``attend``.

        ``Call`` describes ``q`` and ``scale``. Without ``workspace``, torch allocates every tensor.
        """
        return Call(q, cache, self.allocate_index(rows, workspace), scale)

    def select(self, call: Call) -> None:
        """Fill the index of all heads, without synchronising with a GPU.

        Raises ValueError if tokens of the index's rows are missing in the queries.
        """
        index = call.index
        index.rows.check_tokens("query", call.q)
        for group, engine in zip(self.plan.groups, self.select_engines, strict=True):
            select = engine.select if self.by_kernels else METHODS[name_of(group.method)].reference
            with index.workspace.frame():
                select(replace(call, heads=group))

    def attend(self, call: Call, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        """Compute attention over the index, which ``select`` has filled; see ``AttendEngine``.

        ``out`` is like the queries. ``sinks`` has the learnt sinks [num_heads], if the layer has them.

        Raises ValueError if tokens of the index's rows are missing in ``out``.
        """
        call.rows.check_tokens("output", out)
        attend = self.engine.attend if self.by_kernels else reference_attend
        with call.workspace.frame():
            attend(call, out, options=self.options, sinks=sinks)


def _stripe_layout(rows: Rows, method: Method) -> StripeLayout:
    return method.stripe_layout(rows)


def _index_layout(rows: Rows, num_heads: int, block_tokens: int, layer: Layer | None) -> IndexLayout:
    """Lay out the index of a layer or, without ``layer``, of all layers without stripes."""
    stripes = [StripeLayout.none(rows)] * num_heads
    if layer is not None:
        stripes = [rows.once(_stripe_layout, method) for method in layer.plan.methods]
    return IndexLayout.build(rows, block_tokens, stripes)


@lru_cache(maxsize=1024)
def with_kept_mass(layer: Layer, share: float) -> Layer:
    """Return the layer with the share p in (0, 1] of kept attention mass in all heads whose method has such a share."""
    plan = LayerPlan(tuple(method.with_kept_mass(share) for method in layer.plan.methods))
    return replace(layer, plan=plan)


def run(layer: Layer, call: Call, out: torch.Tensor, sinks: torch.Tensor | None = None, check: bool = False) -> None:
    """Select keys and compute attention for the rows' queries. Other tokens of ``out`` stay untouched.

    Args:
        call: The result of ``layer.new_call``.
        out: Like the queries; written.
        sinks: [num_heads] learnt sinks (``AttendEngine``). They do not affect selection: a sink scales a
            query's output and leaves the order of its blocks unchanged. Shares and thresholds of methods refer to
            the attention that remains for keys.
        check: Whether to synchronise with the device and check the index, for debugging.
    """
    layer.select(call)
    if check:
        call.index.check()
    layer.attend(call, out, sinks)
