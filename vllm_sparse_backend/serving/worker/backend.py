# SPDX-License-Identifier: Apache-2.0
"""The backend that ``--attention-backend sparse-prefill`` selects: vLLM's dense backend with our builder and impl."""

from vllm_sparse_backend.serving.compat import DenseBackend


class SparsePrefillBackend(DenseBackend):
    """vLLM's dense backend with sparse prefill. Everything that is not overridden here is as in the dense backend."""

    @staticmethod
    def get_name() -> str:
        return "SPARSE_PREFILL"

    @staticmethod
    def get_impl_cls() -> type:
        """Return the class that computes the attention of a layer."""
        from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl

        return SparsePrefillImpl

    @staticmethod
    def get_builder_cls() -> type:
        """Return the class that builds the metadata of steps."""
        from vllm_sparse_backend.serving.worker.metadata import SparsePrefillMetadataBuilder

        return SparsePrefillMetadataBuilder
