# SPDX-License-Identifier: Apache-2.0
"""The API server's process: request levels, /metrics, reports and the switch."""
