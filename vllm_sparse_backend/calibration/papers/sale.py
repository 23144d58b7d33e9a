# SPDX-License-Identifier: Apache-2.0
"""SALE's τ for each head (Ji et al., arXiv:2505.24179, section 3.3 and appendix C).

τ begins at 0.008 and is halved until Err(τ) = ‖O − Õ‖₁ / N (``HeadErrors.absolute``) is below the bound on every
prompt: 0.4 for Llama-3.1-8B, 2.0 for Qwen2.5-32B. The authors' code stops at 0.0001: a head that misses the bound at
every larger τ is dense. So is a head that leaves out too few pairs, because a smaller τ keeps more.
"""

from vllm_sparse_kernels.methods.sale.method import Sale

SPACES = tuple((Sale(tau=0.008 / 2**halvings),) for halvings in range(7))
"""Settings in the order in which they are tried, one at a time; the next τ would be below 0.0001."""
