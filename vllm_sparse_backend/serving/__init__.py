# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside vLLM's processes. No other folder of the package imports vLLM."""
