"""What one step of the engine is to this backend: its sparse rows, and the runs of rows that the delegate takes."""

from dataclasses import dataclass, field

from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.settings.plan import LayerPlan, methods_by_head
from vllm_sparse_kernels import Rows, SparseIndex, StripeLayout
from vllm_sparse_kernels.select.base import Method


@dataclass(frozen=True)
class Delegated:
    """Neighbouring rows that the delegate runs: their tokens, and metadata as if they were the whole batch."""

    rows: slice
    tokens: slice
    metadata: compat.DelegateMetadata


@dataclass
class SparseStep:
    """The part of a step that prefills sparsely."""

    rows: Rows
    delegated: tuple[Delegated, ...]
    _indices: dict[tuple[int, tuple[StripeLayout, ...]], SparseIndex] = field(default_factory=dict)
    _layouts: dict[Method, StripeLayout] = field(default_factory=dict)

    def index(self, groups: LayerPlan, num_heads: int, block_tokens: int) -> SparseIndex:
        """Room for one layer's selection. Layers run one after the other, and those that need equal room share it."""
        layouts = {head: self._layout(method) for head, method in enumerate(methods_by_head(groups))}
        key = (block_tokens, tuple(layouts[head] for head in range(num_heads)))
        if key not in self._indices:
            self._indices[key] = SparseIndex.allocate(self.rows, num_heads, block_tokens, layouts)
        return self._indices[key]

    def _layout(self, method: Method) -> StripeLayout:
        if method not in self._layouts:
            self._layouts[method] = method.stripe_layout(self.rows)
        return self._layouts[method]


@dataclass
class SparsePrefillMetadata(compat.DelegateMetadata):
    """The delegate's metadata of the whole batch, for layers that stay dense, and the sparse part of the step."""

    sparse: SparseStep | None = None
