# SPDX-License-Identifier: Apache-2.0
"""The engine core's process: block hashes by level."""
