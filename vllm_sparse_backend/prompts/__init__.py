# SPDX-License-Identifier: Apache-2.0
"""Texts, and lookups in them, from which every process makes its prompts."""
