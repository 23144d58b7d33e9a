# SPDX-License-Identifier: Apache-2.0
"""Quality on real models, outside of vLLM: captured queries, keys and values, and what methods keep of them."""
