# SPDX-License-Identifier: Apache-2.0
"""Offline work that a profile comes from: what differs from head to head, found on prompts."""
