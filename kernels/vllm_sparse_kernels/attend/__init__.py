"""Attention over a SparseIndex: one contract, whatever engine fulfils it."""

from vllm_sparse_kernels.attend.portable import attend, shared_bytes, supports_bulk, widest_block, workspace_bytes

__all__ = ["attend", "shared_bytes", "supports_bulk", "widest_block", "workspace_bytes"]
