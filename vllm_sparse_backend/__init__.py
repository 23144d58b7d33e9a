# SPDX-License-Identifier: Apache-2.0
"""sparse-prefill: a vLLM attention backend that prefills long prompts sparsely, without training."""
