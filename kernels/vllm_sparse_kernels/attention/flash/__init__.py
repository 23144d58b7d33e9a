# SPDX-License-Identifier: Apache-2.0
"""Engine `flash`: FlashAttention's own kernel over block tables made from the index."""
