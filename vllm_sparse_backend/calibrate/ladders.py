"""Settings for all heads alike, by a name for each way to select, from the sparsest to what loses next to nothing.

What a head may choose from where all methods compete, and what a search by heads is held against: the single setting of
its method with the same error. Names of ``METHODS`` are methods as their papers have them; the others, which a name
with ``+`` says, go beyond their paper. SharePrefill is not among them: its heads depend on other heads, of other layers
too, so that no layer can be judged by itself (``share_prefill.ladder``).
"""

from collections.abc import Mapping
from types import MappingProxyType

from vllm_sparse_backend.calibrate import anchor_attention, flex_vertical_slash, minference, sale, sparge_attn
from vllm_sparse_kernels.select.base import Method
from vllm_sparse_kernels.select.sale import Sale

LADDERS: Mapping[str, tuple[Method, ...]] = MappingProxyType({
    **minference.ladders(),
    "sparge_attn": sparge_attn.ladder(),
    "sale": sale.ladder(),
    "sale+half": sale.ladder(Sale(channels="half")),
    "anchor_attention": anchor_attention.ladder(),
    "anchor_attention+sampled": anchor_attention.ladder(anchor_attention.SAMPLED),
    "flex_vertical_slash": flex_vertical_slash.ladder(),
    "flex_vertical_slash+spread": flex_vertical_slash.ladder(flex_vertical_slash.SPREAD),
})  # fmt: skip
