# SPDX-License-Identifier: Apache-2.0
"""Settings, profiles and plans: how they are read, checked and resolved. Pure Python; nothing here imports vLLM."""
