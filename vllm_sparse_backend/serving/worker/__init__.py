# SPDX-License-Identifier: Apache-2.0
"""The GPU worker's process: from vLLM's batch to the attention output."""
