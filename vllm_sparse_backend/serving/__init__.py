# SPDX-License-Identifier: Apache-2.0
"""All that runs inside vLLM's processes, and the only folder of the package that imports vLLM."""
