# SPDX-License-Identifier: Apache-2.0
"""The API server's process: request levels and /metrics."""
