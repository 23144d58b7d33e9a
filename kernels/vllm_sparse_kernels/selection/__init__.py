# SPDX-License-Identifier: Apache-2.0
"""What selection kernels are built of: lists, thresholds, sums over the last queries, pooled blocks, sizes."""
