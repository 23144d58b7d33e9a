# SPDX-License-Identifier: Apache-2.0
"""The package's small trained model, which finds facts in its prompt. Its README.md describes how it was made."""

from pathlib import Path

BUNDLED = Path(__file__).parents[1] / "_models/needle"
