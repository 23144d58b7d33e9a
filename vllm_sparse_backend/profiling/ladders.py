# SPDX-License-Identifier: Apache-2.0
"""Settings for all heads alike, and searches by heads, by a name for each way to select.

A ladder goes from the sparsest setting to what loses next to nothing: what a head may choose from where all methods
compete, and what a search is held against, which is the single setting of its method with the same error.

Names of ``METHODS``, and ``minference`` for its three patterns, are what their papers have; what a name with ``+`` adds
goes beyond its paper, or is an option of it. SharePrefill is not among them: its heads depend on other heads, of other
layers too, so that no layer can be judged by itself (``clustered.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from vllm_sparse_backend.profiling import anchor_attention, flex_vertical_slash, minference, sale, sparge_attn
from vllm_sparse_backend.profiling.measure import Bound, LayerJudge
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.sale.method import Sale

HALF = Sale(channels="half")

LADDERS: Mapping[str, tuple[Method, ...]] = MappingProxyType({
    **minference.ladders(),
    "sparge_attn": sparge_attn.ladder(),
    "sale": sale.ladder(),
    "sale+half": sale.ladder(HALF),
    "anchor_attention": anchor_attention.ladder(),
    "anchor_attention+sampled": anchor_attention.ladder(anchor_attention.SAMPLED),
    "flex_vertical_slash": flex_vertical_slash.ladder(),
    "flex_vertical_slash+spread": flex_vertical_slash.ladder(flex_vertical_slash.SPREAD),
})  # fmt: skip


def settings_of(method: str) -> list[Method]:
    """What a method's heads may choose from together: all its ladders, by halved steps, without and with means.

    By a name with ``+`` from that ladder alone.
    """
    ladders = [of for name, of in LADDERS.items() if method in (name, name.split("+")[0])]
    plain = [one for ladder in ladders for one in halved(ladder)]
    return plain + [replace(one, block_means=True) for one in plain]


def halved(ladder: Sequence[Method]) -> list[Method]:
    """A setting more between two that differ in one number."""
    found = list(ladder[:1])
    for before, one in pairwise(ladder):
        differing = [field.name for field in fields(one) if getattr(before, field.name) != getattr(one, field.name)]
        ends = [getattr(method, differing[0]) for method in (before, one)]
        if len(differing) == 1 and isinstance(ends[0], float):
            found.append(replace(one, **{differing[0]: round(sum(ends) / 2, 6)}))
        found.append(one)
    return found


SEARCHES: Mapping[str, Callable[[LayerJudge, Bound], list[Method]]] = MappingProxyType({
    "minference": minference.search,
    "sparge_attn": sparge_attn.search,
    "sparge_attn+skip": partial(sparge_attn.search, skipping=True),
    "sale": sale.search,
    "sale+wide": partial(sale.search, first_tau=sale.BEYOND_TAU),
    "sale+half": partial(sale.search, base=HALF, first_tau=sale.BEYOND_TAU),
    "anchor_attention": anchor_attention.search,
    "anchor_attention+sampled": partial(anchor_attention.search, base=anchor_attention.SAMPLED),
    "flex_vertical_slash": flex_vertical_slash.search,
    "flex_vertical_slash+spread": partial(flex_vertical_slash.search, base=flex_vertical_slash.SPREAD),
})  # fmt: skip
