# SPDX-License-Identifier: Apache-2.0
"""Prefill of one layer, for serving, calibration and evaluation.

    at start-up: plan (method of each head) → ``Layer.of``
    each step:   ``run`` = ``Layer.allocate_index`` (allocate) → ``Layer.select`` (keys) → ``Layer.attend`` (output)

On a GPU, kernels select and an engine attends. On a CPU, the references do both in plain torch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from vllm_sparse_kernels.attention import PORTABLE, widest_block
from vllm_sparse_kernels.attention.engine import AttendEngine
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.reference import attend as reference_attend
from vllm_sparse_kernels.block_width import index_block_tokens
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.index import IndexLayout, SparseIndex, StripeLayout
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec, choose_select_engine, portable_refusal
from vllm_sparse_kernels.workspace import Workspace


@dataclass(frozen=True)
class HeadGroup:
    """Query heads of a layer that are selected together.

    Attributes:
        heads: Numbers of the query heads on this rank.
        method: The merged method of these heads.
    """

    heads: tuple[int, ...]
    method: Method

    def methods(self) -> list[Method]:
        """Return the method of each head."""
        return list(self.method.of_heads(len(self.heads)))


LayerPlan = tuple[HeadGroup, ...]
"""The plan of one layer: its groups contain each query head of this rank once."""


def layer_plan(methods: Sequence[Method], others: Iterable[Method] = ()) -> LayerPlan:
    """Group the heads of a layer by method.

    Args:
        methods: The method of each head.
        others: Methods of heads in other layers; heads of this layer may share results with these heads.
    """
    return group_heads(methods, Counter(method.sharing for method in (*methods, *others)))


def group_heads(methods: Sequence[Method], counts: Mapping[Method, int]) -> LayerPlan:
    """Group heads whose methods have the same ``group_key``.

    Args:
        methods: The method of each head.
        counts: By ``Method.sharing``, the number of heads in all layers that may share results.
    """
    heads: dict[Method, list[int]] = {}
    selections = [method if counts[method.sharing] > 1 else method.unshared for method in methods]
    for head, selection in enumerate(selections):
        heads.setdefault(selection.group_key, []).append(head)
    return tuple(HeadGroup(tuple(ids), key.merged([selections[i] for i in ids])) for key, ids in heads.items())


def methods_by_head(groups: LayerPlan) -> list[Method]:
    """Return the method of each head of a layer.

    Args:
        groups: The plan of the layer.
    """
    methods: dict[int, Method] = {}
    for group in groups:
        methods.update(zip(group.heads, group.methods(), strict=True))
    return [methods[head] for head in sorted(methods)]


def fits_shared_memory(groups: LayerPlan, head_dim: int, device: torch.device) -> bool:
    """Return whether the device's shared memory has room for the kernels of a layer.

    Args:
        groups: The plan of the layer.
        head_dim: Elements of a head's query or key.
        device: Device of the layer.

    Returns:
        False if the attention kernel cannot hold a block of keys, or if a method's selection does not fit.
    """
    if widest_block(head_dim, shared_bytes(device)) is None:
        return False
    specs = (SelectSpec(group.method, device, head_dim) for group in groups)
    return all(portable_refusal(spec) is None for spec in specs)


def attend_options(methods: Sequence[Method], device: torch.device) -> AttendOptions | None:
    """Collect the approximations that the heads of a layer request from ``attend``."""
    return AttendOptions.from_heads([m.skip_margin for m in methods], [m.int8_scores for m in methods], device)


def stripes_of(method: Method, rows: Rows) -> StripeLayout:
    """Return the room that a head's stripes need, computed once for all layers of the pass.

    Args:
        method: The method of a head, or a merged method.
        rows: The rows of a step.
    """
    return rows.once(method, lambda: method.stripe_layout(rows))


@dataclass(frozen=True, eq=False)
class Layer:
    """The prefill of a layer, prepared before the first step. Layers with equal plans may share one object.

    Attributes:
        groups: The plan of the layer.
        head_ids: Per group, the numbers of its heads: int32 on the device.
        options: Approximations that heads request from ``attend``; None without any.
        block_tokens: Keys of an index block.
        by_kernels: Whether kernels select and attend, as on a GPU; otherwise the references do.
        select_engines: Per group, the engine that selects if ``by_kernels``.
        engine: The engine that attends if ``by_kernels``.
    """

    groups: LayerPlan
    head_ids: tuple[torch.Tensor, ...]
    options: AttendOptions | None
    block_tokens: int
    by_kernels: bool
    select_engines: tuple[SelectEngine, ...]
    engine: AttendEngine = PORTABLE

    @staticmethod
    def of(
        groups: LayerPlan, head_dim: int, device: torch.device, engine: str = "auto", block_tokens: int | None = None
    ) -> "Layer":
        """Build the layer as it runs before any trial. Synchronises with the device: call it outside of steps.

        Args:
            groups: The plan of the layer.
            head_dim: Elements of a head's query or key.
            device: Device of the layer.
            engine: Name of the configured attention engine, on which the width of index blocks depends. The layer
                attends on ``portable`` until another engine is chosen (``dataclasses.replace``).
            block_tokens: Keys of an index block; None for the width that suits the methods (``block_width``).
        """
        methods = methods_by_head(groups)
        specs = [SelectSpec(group.method, device, head_dim) for group in groups]
        return Layer(
            groups,
            tuple(torch.tensor(group.heads, dtype=torch.int32, device=device) for group in groups),
            attend_options(methods, device),
            block_tokens or index_block_tokens(methods, head_dim, device, engine),
            by_kernels=device.type == "cuda",
            select_engines=tuple(choose_select_engine(spec).engine for spec in specs),
        )

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return sum(len(group.heads) for group in self.groups)

    @property
    def attention_name(self) -> str:
        """Name of the engine that computes attention."""
        return self.engine.name if self.by_kernels else "torch"

    def allocate_index(self, rows: Rows, workspace: Workspace | None = None) -> SparseIndex:
        """Allocate the layer's index for some rows. Equal layers share the layout of their indices.

        Args:
            rows: The rows of a step.
            workspace: Memory of the index; None for a workspace without a buffer.
        """
        return rows.once(self, lambda: self._layout(rows)).allocate(workspace or Workspace(rows.device))

    def _layout(self, rows: Rows) -> IndexLayout:
        stripes = {head: stripes_of(method, rows) for head, method in enumerate(methods_by_head(self.groups))}
        return IndexLayout.build(rows, self.num_heads, self.block_tokens, stripes)

    def select(self, query: torch.Tensor, cache: PagedCache, index: SparseIndex, scale: float) -> None:
        """Fill the index of all heads, without synchronising with a GPU.

        Args:
            query: [num_tokens, num_heads, head_dim] queries of the step.
            cache: Keys and values of the layer.
            index: The index from ``allocate_index``; its lists are overwritten.
            scale: Factor from q·k to scores.

        Raises:
            ValueError: The index and the queries have different numbers of heads, or tokens of the index's rows are
                missing in the queries.
        """
        if index.num_heads != query.shape[1]:
            raise ValueError(f"index: given room for {index.num_heads} heads, expected the query's {query.shape[1]}")
        index.rows.check_tokens("query", query)
        for group, heads, engine in zip(self.groups, self.head_ids, self.select_engines, strict=True):
            select = engine.select if self.by_kernels else METHODS[name_of(group.method)].reference
            with index.workspace.frame():
                select(group.method, query, cache, index, heads, scale)

    def attend(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        index: SparseIndex,
        out: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Compute attention over the index; see ``attention.engine.Attend``.

        Args:
            query: [num_tokens, num_heads, head_dim] queries of the step.
            cache: Keys and values of the layer.
            index: The index, filled by ``select``.
            out: Like ``query``; written for the tokens of the index's rows.
            scale: Factor from q·k to scores.
            sinks: [num_heads] learnt sinks; None without sinks.
        """
        attend = self.engine.attend if self.by_kernels else reference_attend
        with index.workspace.frame():
            attend(query, cache, index, out, scale, options=self.options, sinks=sinks)


@lru_cache(maxsize=1024)
def with_kept_mass(layer: Layer, share: float) -> Layer:
    """Return the layer with another share of kept attention mass in all heads whose method has such a share.

    Args:
        layer: The layer.
        share: p, in (0, 1].
    """
    return replace(
        layer, groups=tuple(replace(group, method=group.method.with_kept_mass(share)) for group in layer.groups)
    )


def run(
    layer: Layer,
    inputs: LayerInputs,
    out: torch.Tensor,
    workspace: Workspace | None = None,
    sinks: torch.Tensor | None = None,
    check: bool = False,
) -> SparseIndex:
    """Select keys and compute attention for the rows' queries. Other tokens of ``out`` stay untouched.

    Args:
        layer: The layer.
        inputs: Queries, cache, rows and scale.
        out: Like the queries; written.
        workspace: Memory of the index and of temporary tensors; None to let torch allocate every tensor.
        sinks: [num_heads] learnt sinks (``attention.engine.Attend``); None without sinks. Sinks do not affect
            selection: a sink scales a query's output and leaves the order of its blocks unchanged. Shares and
            thresholds of methods refer to the attention that remains for keys.
        check: Whether to synchronise with the device and check the index, for debugging.
    """
    query, cache, rows, scale = inputs
    index = layer.allocate_index(rows, workspace)
    layer.select(query, cache, index, scale)
    if check:
        index.check()
    layer.attend(query, cache, index, out, scale, sinks)
    return index
