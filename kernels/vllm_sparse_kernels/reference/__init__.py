# SPDX-License-Identifier: Apache-2.0
"""The kernels' specification in plain float32 torch: slow, readable, and never the library under test."""
