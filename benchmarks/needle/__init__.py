# SPDX-License-Identifier: Apache-2.0
"""The recipe of the needle model that this package brings along: `python -m benchmarks.needle.train --help`."""
