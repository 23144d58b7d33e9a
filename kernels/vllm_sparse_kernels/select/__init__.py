"""The methods by name. A new one is a file here, its reference, its test, and one line of this table."""

from collections.abc import Callable
from typing import NamedTuple

from vllm_sparse_kernels.reference.anchor_attention import select_anchor_attention
from vllm_sparse_kernels.reference.dense import select_dense
from vllm_sparse_kernels.select.anchor_attention import AnchorAttention
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.select.dense import Dense


class Registered(NamedTuple):
    """A method's parameters, which select on a GPU, and the reference that does the same anywhere."""

    parameters: type[Method]
    reference: Callable[..., None]


METHODS: dict[str, Registered] = {
    "anchor_attention": Registered(AnchorAttention, select_anchor_attention),
    "dense": Registered(Dense, select_dense),
}


def name_of(method: Method) -> str:
    """The name under which a method's class is registered."""
    return next(name for name, entry in METHODS.items() if entry.parameters is type(method))
