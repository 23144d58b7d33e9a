# SPDX-License-Identifier: Apache-2.0
"""The backend that ``--attention-backend sparse-prefill`` selects: vLLM's dense backend with our builder and impl."""

from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config

from vllm_sparse_backend.serving.compat import DenseBackend, current_device, hybrid_page_sizes, prefers_bulk_pages
from vllm_sparse_backend.serving.startup import fast_page_tokens

if TYPE_CHECKING:
    from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
    from vllm_sparse_backend.serving.worker.metadata import SparsePrefillMetadataBuilder


class SparsePrefillBackend(DenseBackend):
    """vLLM's dense backend with sparse prefill. Everything that is not overridden here is as in the dense backend."""

    @staticmethod
    def get_name() -> str:
        return "SPARSE_PREFILL"

    @staticmethod
    def get_impl_cls() -> type["SparsePrefillImpl"]:
        """Return the class that computes the attention of a layer."""
        from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl

        return SparsePrefillImpl

    @staticmethod
    def get_builder_cls() -> type["SparsePrefillMetadataBuilder"]:
        """Return the class that builds the metadata of steps."""
        from vllm_sparse_backend.serving.worker.metadata import SparsePrefillMetadataBuilder

        return SparsePrefillMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the dense backend's preferred page size, but at least the size for bulk copies on this device."""
        preferred = super().get_preferred_block_size(default_block_size)
        if not prefers_bulk_pages():
            return preferred
        return max(preferred, fast_page_tokens(get_current_vllm_config(), current_device()))

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes that kernels accept, and that vLLM aligns the pages of hybrid models to."""
        spec_if_passed = () if kv_cache_spec is None else (kv_cache_spec,)  # 0.30's method takes no argument
        sizes = super().get_supported_kernel_block_sizes(*spec_if_passed)
        # vLLM makes a hybrid's pages as long as a recurrent state, in multiples of the smallest of these sizes, which
        # --block-size can raise but not lower. Blocks of keys lie within any page of a multiple of 128 tokens.
        return hybrid_page_sizes(sizes, getattr(kv_cache_spec, "block_size", None))

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return whether the dense backend accepts a ``--block-size``, which vLLM may still align for hybrids."""
        return DenseBackend.supports_block_size(block_size)
