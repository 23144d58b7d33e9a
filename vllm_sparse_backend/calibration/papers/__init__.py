# SPDX-License-Identifier: Apache-2.0
"""The searches that papers describe, one module for each paper."""
