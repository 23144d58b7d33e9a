# SPDX-License-Identifier: Apache-2.0
"""The backend that ``--attention-backend sparse-prefill`` selects: vLLM's dense backend with our builder and impl."""

from typing import TYPE_CHECKING, Any

from vllm_sparse_backend.serving.compat import (
    BULK_PAGE_TOKENS,
    DenseBackend,
    hybrid_page_sizes,
    prefers_bulk_pages,
)

if TYPE_CHECKING:
    from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
    from vllm_sparse_backend.serving.worker.metadata_builder import SparsePrefillMetadataBuilder


class SparsePrefillBackend(DenseBackend):
    """vLLM's dense backend with sparse prefill. Everything that is not overridden here is as in the dense backend."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend.

        Returns:
            The name, as vLLM logs it.
        """
        return "SPARSE_PREFILL"

    @staticmethod
    def get_impl_cls() -> type["SparsePrefillImpl"]:
        """Return the class that computes the attention of a layer.

        Returns:
            The class.
        """
        from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl

        return SparsePrefillImpl

    @staticmethod
    def get_builder_cls() -> type["SparsePrefillMetadataBuilder"]:
        """Return the class that builds the metadata of steps.

        Returns:
            The class.
        """
        from vllm_sparse_backend.serving.worker.metadata_builder import SparsePrefillMetadataBuilder

        return SparsePrefillMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return False: selection depends on the scheduler's chunks of a prompt, and these depend on other requests.

        Returns:
            False.
        """
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """Return False: dense rows of a mixed batch run without the prompt lengths that R-SWA needs.

        Returns:
            False.
        """
        return False

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the dense backend's preferred page size, but at least the size for bulk copies on this device.

        Args:
            default_block_size: vLLM's default page size in tokens.

        Returns:
            Page size in tokens.
        """
        preferred = super().get_preferred_block_size(default_block_size)
        return max(preferred, BULK_PAGE_TOKENS) if prefers_bulk_pages() else preferred

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes that kernels accept, and that vLLM aligns the pages of hybrid models to.

        vLLM makes a hybrid's pages as long as a recurrent state, in multiples of the smallest size that the backend
        names. ``--block-size`` may raise that multiple, but not lower it. Pages that bulk copies read therefore need no
        splitting: blocks of keys lie within any page whose size is a multiple of 128 tokens.

        Args:
            kv_cache_spec: The layers' cache spec; None where vLLM does not have it yet, and in all calls of vLLM 0.26.

        Returns:
            The dense backend's sizes; for hybrids on Hopper multiples of 128 tokens.
        """
        spec_if_passed = () if kv_cache_spec is None else (kv_cache_spec,)  # 0.26's method takes no argument
        sizes = super().get_supported_kernel_block_sizes(*spec_if_passed)
        return hybrid_page_sizes(sizes, getattr(kv_cache_spec, "block_size", None))

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return whether the dense backend accepts a ``--block-size``, which vLLM may still align for hybrids.

        Args:
            block_size: Page size in tokens; None if vLLM chooses.

        Returns:
            True if it does.
        """
        return DenseBackend.supports_block_size(block_size)
