# SPDX-License-Identifier: Apache-2.0
"""The package's small trained model, which finds facts in its prompt. Its README.md describes how it was made."""

from pathlib import Path

BUNDLED = Path(__file__).parents[1] / "_models/needle"
FINDING_LAYER = 1
"""Layer of the bundled model in which the answer's tokens attend to the fact."""
CANNOT_FIND = ("a_shape", "anchor_attention", "block_sparse", "sparge_attn")
"""Methods that lose the fact in that layer, so that the demo leaves the layer dense.

With the methods' defaults, 64, 15, 74 and 31 of 79 answers in a prompt of 8,192 tokens are correct (dense attention:
78). If that layer is dense, 78, 78, 78 and 77 answers are correct.
"""
