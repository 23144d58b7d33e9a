# SPDX-License-Identifier: Apache-2.0
"""Building blocks of selection kernels: lists, thresholds, sums over the last queries, pooled blocks, memory bounds."""
