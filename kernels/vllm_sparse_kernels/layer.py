# SPDX-License-Identifier: Apache-2.0
"""One layer's prefill, from its plan to its output: the one way there, for serving, guard, profiling and lab.

    plan (which head has which method) → ``Layer.of``, once
    each step: ``run`` = ``Layer.index`` (room) → ``Layer.select`` (which keys) → ``Layer.attend`` (the output)

On a GPU methods select by their kernels and an engine attends; on a CPU the references do both, in plain torch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from vllm_sparse_kernels.attention import PORTABLE
from vllm_sparse_kernels.attention.engine import Engine
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.reference import attend as reference_attend
from vllm_sparse_kernels.block_width import index_block_tokens
from vllm_sparse_kernels.index import IndexLayout, SparseIndex, StripeLayout
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec, choose_select_engine
from vllm_sparse_kernels.workspace import Workspace


@dataclass(frozen=True)
class HeadGroup:
    """Query heads of one layer, numbered on this rank, whose methods are alike, and what selects them together."""

    heads: tuple[int, ...]
    method: Method

    def methods(self) -> list[Method]:
        """Each head's own method."""
        return list(self.method.of_heads(len(self.heads)))


LayerPlan = tuple[HeadGroup, ...]
"""One layer's part of a plan: its groups cover each query head of this rank once."""


def layer_plan(methods: Sequence[Method], others: Iterable[Method] = ()) -> LayerPlan:
    """The groups of a layer whose heads have these methods; ``others`` are those of heads of other layers."""
    return group_heads(methods, Counter(method.sharing for method in (*methods, *others)))


def group_heads(methods: Sequence[Method], counts: Mapping[Method, int]) -> LayerPlan:
    """Heads that select alike, in the order of each group's first head; ``counts``: how many heads may share."""
    heads: dict[Method, list[int]] = {}
    selections = [method if counts[method.sharing] > 1 else method.unshared for method in methods]
    for head, selection in enumerate(selections):
        heads.setdefault(selection.group_key, []).append(head)
    return tuple(HeadGroup(tuple(ids), alike.merged([selections[i] for i in ids])) for alike, ids in heads.items())


def methods_by_head(groups: LayerPlan) -> list[Method]:
    """Each head's own method, as it was before methods were merged."""
    methods: dict[int, Method] = {}
    for group in groups:
        methods.update(zip(group.heads, group.methods(), strict=True))
    return [methods[head] for head in sorted(methods)]


def attend_options(methods: Sequence[Method], device: torch.device) -> AttendOptions | None:
    """What the heads of a layer, each with its method, ask of ``attend``; None where it is nothing."""
    return AttendOptions.from_heads([m.skip_margin for m in methods], [m.int8_scores for m in methods], device)


def stripes_of(method: Method, rows: Rows) -> StripeLayout:
    """Room for the stripes of one head, or of the head of a merged method that needs most."""
    return rows.once(method, lambda: method.stripe_layout(rows))


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer does in every step, made once before the first: layers of one plan may be one object."""

    groups: LayerPlan
    head_ids: tuple[torch.Tensor, ...]  # of each group, int32, on the device
    options: AttendOptions | None
    block_tokens: int  # of the index
    by_kernels: bool
    """On a GPU; else the references select and attend."""
    select_engines: tuple[SelectEngine, ...]
    """What selects each group where kernels do."""

    engine: Engine = PORTABLE
    """What attends where kernels do."""

    @staticmethod
    def of(groups: LayerPlan, head_dim: int, device: torch.device, engine: str = "auto") -> "Layer":
        """The layer as it runs before any trial. Waits for the device: not for a step.

        Args:
            groups: Its heads and their methods.
            head_dim: Of its heads.
            device: Where it runs.
            engine: Name of the attention engine that the operator asked for; it decides how wide blocks are. The layer
                attends on ``portable`` until another engine is chosen (``dataclasses.replace``).

        Returns:
            The layer; each group selects on the first engine that does not refuse it.
        """
        methods = methods_by_head(groups)
        specs = [SelectSpec(group.method, device, head_dim) for group in groups]
        return Layer(
            groups,
            tuple(torch.tensor(group.heads, dtype=torch.int32, device=device) for group in groups),
            attend_options(methods, device),
            index_block_tokens(methods, head_dim, device, engine),
            by_kernels=device.type == "cuda",
            select_engines=tuple(choose_select_engine(spec).engine for spec in specs),
        )

    @property
    def num_heads(self) -> int:
        return sum(len(group.heads) for group in self.groups)

    @property
    def attention_name(self) -> str:
        """What computes its attention."""
        return self.engine.name if self.by_kernels else "torch"

    def index(self, rows: Rows, workspace: Workspace | None = None) -> SparseIndex:
        """Room for what the layer selects of these rows. Where lists lie is worked out once for the rows."""
        return rows.once(self, lambda: self._layout(rows)).allocate(workspace or Workspace(rows.device))

    def _layout(self, rows: Rows) -> IndexLayout:
        stripes = {head: stripes_of(method, rows) for head, method in enumerate(methods_by_head(self.groups))}
        return IndexLayout.build(rows, self.num_heads, self.block_tokens, stripes)

    def select(self, query: torch.Tensor, cache: PagedCache, index: SparseIndex, scale: float) -> None:
        """Fill ``index`` for all heads. On a GPU nothing here waits for it.

        Raises ValueError where the index has room for other heads than the query's.
        """
        if index.num_heads != query.shape[1]:
            raise ValueError(f"index: given room for {index.num_heads} heads, expected the query's {query.shape[1]}")
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
        """Attention over ``index`` into ``out``, as ``attend.engine.Attend`` has it."""
        attend = self.engine.attend if self.by_kernels else reference_attend
        with index.workspace.frame():
            attend(query, cache, index, out, scale, options=self.options, sinks=sinks)


@lru_cache(maxsize=1024)
def keeping(layer: Layer, share: float) -> Layer:
    """The layer with this p in all heads whose method has one: it takes the same room, kernels and engine."""
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
    """Select and attend: write the output of the rows' queries into ``out``, and leave its other tokens untouched.

    Args:
        layer: Its heads' methods and its engines.
        inputs: Queries [num_tokens, num_heads, head_dim], cache, rows and scale.
        out: Of the queries' shape.
        workspace: Where the index and temporary tensors lie; None asks torch for each.
        sinks: [num_heads], a learnt logit for each head (``attend.engine.Attend``). They join the softmax, not the
            selection: a sink scales a query's output, and the order of its blocks stays. A share or a threshold is of
            what the sink leaves.
        check: Wait for the device and check the index, for debugging.

    Returns:
        What was selected. It lies in the workspace.
    """
    query, cache, rows, scale = inputs
    index = layer.index(rows, workspace)
    layer.select(query, cache, index, scale)
    if check:
        index.check()
    layer.attend(query, cache, index, out, scale, sinks)
    return index
