# SPDX-License-Identifier: Apache-2.0
"""The backend that ``--attention-backend sparse-prefill`` selects: vLLM's own, with our metadata builder and impl."""

from typing import TYPE_CHECKING

from vllm_sparse_backend.serving.compat import BULK_PAGE_TOKENS, DenseBackend, prefers_bulk_pages

if TYPE_CHECKING:
    from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
    from vllm_sparse_backend.serving.worker.metadata_builder import SparsePrefillMetadataBuilder


class SparsePrefillBackend(DenseBackend):
    """Everything that vLLM asks of a backend is its own backend's answer, but for the parts below."""

    @staticmethod
    def get_name() -> str:
        return "SPARSE_PREFILL"

    @staticmethod
    def get_impl_cls() -> type["SparsePrefillImpl"]:
        from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl

        return SparsePrefillImpl

    @staticmethod
    def get_builder_cls() -> type["SparsePrefillMetadataBuilder"]:
        from vllm_sparse_backend.serving.worker.metadata_builder import SparsePrefillMetadataBuilder

        return SparsePrefillMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Selection depends on how the scheduler cuts a prompt into chunks, and that on other requests."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """Rows that the dense backend runs one by one would lose their prompts' lengths."""
        return False

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        preferred = super().get_preferred_block_size(default_block_size)
        return max(preferred, BULK_PAGE_TOKENS) if prefers_bulk_pages() else preferred
