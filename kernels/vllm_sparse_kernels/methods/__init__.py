# SPDX-License-Identifier: Apache-2.0
"""Selection methods by name. A new method needs a folder here, a test, and its name in FOLDERS."""

from functools import lru_cache
from importlib import import_module

from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.registry import Registry

FOLDERS = ("anchor_attention", "dense", "flex_prefill", "minference", "sale", "share_prefill", "sparge_attn", "top_p")

METHODS = Registry(spec for folder in FOLDERS for spec in import_module(f"{__name__}.{folder}").SPECS)


@lru_cache(maxsize=4096)
def name_of(method: Method) -> str:
    """Return the name under which a method's class is registered."""
    return next(name for name, spec in METHODS.items() if spec.parameters is type(method))
