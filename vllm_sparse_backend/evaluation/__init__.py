# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill bench` and `eval`: speed and accuracy of sparse prefill on this machine, compared with stock vLLM.

Nothing here imports vLLM.
"""
