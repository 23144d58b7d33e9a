# SPDX-License-Identifier: Apache-2.0
"""What operators write and what it means: configuration, profiles and plans. Pure Python, no vLLM."""
