# SPDX-License-Identifier: Apache-2.0
"""The methods by name. One added here is a folder, its test and a line of FOLDERS."""

from functools import lru_cache
from importlib import import_module

from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.registry import Registry

FOLDERS = ("anchor_attention", "dense", "flex_prefill", "minference", "sale", "share_prefill", "sparge_attn", "top_p")

METHODS = Registry(spec for folder in FOLDERS for spec in import_module(f"{__name__}.{folder}").SPECS)


def sparse_names() -> list[str]:
    """Names of the methods that leave something out: all but ``dense``."""
    return [name for name in METHODS if name != "dense"]


@lru_cache(maxsize=4096)
def name_of(method: Method) -> str:
    """The name under which a method's class is registered, or that of the methods that were merged into it.

    Args:
        method: the method and its parameters.
    """
    return next(name for name, spec in METHODS.items() if spec.parameters is type(method.alike))
