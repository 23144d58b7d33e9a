# SPDX-License-Identifier: Apache-2.0
"""The recipe of the bundled needle model: `python -m benchmarks.needle.train --help`."""
