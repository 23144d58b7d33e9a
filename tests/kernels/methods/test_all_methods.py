# SPDX-License-Identifier: Apache-2.0
"""Guarantees of every method, including methods of installed packages: kernels and reference agree, and a row's
selection does not depend on the rest of its step.

Each method's own tests check it against its paper's equations, with margins that follow from the data.
"""

import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.helpers.batches import assert_close, every_head, new_index, random_batch, repaged
from tests.helpers.lined import lined_batch
from tests.helpers.masks import density_of
from tests.helpers.method_cases import DEVICE, F32, POISON, SMALL, all_lists, assert_agree, row_alone, select
from vllm_sparse_kernels.attention import PORTABLE
from vllm_sparse_kernels.engine_trial import expected_attention
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods import METHODS, name_of

CASES = [
    pytest.param(name, params, marks=pytest.mark.full if i else ())
    for name, spec in METHODS.items()
    for i, params in enumerate(SMALL.get(name, [dict(spec.demo)]))
]
LENGTHS = [(561, 70), (0, 63), (330, 1)]
LONG = [(0, 2049), (6143, 1000), (0, 63), (2999, 1)]

every_method = pytest.mark.parametrize(("name", "params"), CASES)


@every_method
def test_kernels_and_reference_keep_the_same(name: str, params: dict[str, Any]) -> None:
    """Both write valid lists over previous data."""
    batch = lined_batch(LENGTHS, 2, 1, 64, 16, F32, layout="HND", gap_tokens=3)
    method = METHODS[name].parameters(**params)
    ours, theirs = (select(method, replace(batch, rows=replace(batch.rows)), 64, None, way) for way in (False, True))
    assert_agree(ours, theirs)
    assert density_of(ours) < 1 or name == "dense" or params == METHODS[name].demo


@every_method
def test_neither_neighbours_nor_pages_nor_slots_matter(name: str, params: dict[str, Any]) -> None:
    """A row's lists are bitwise the same alone, among other rows, and on other pages."""
    batch = lined_batch(LENGTHS, 2, 1, 64, 16, torch.float16, gap_tokens=3)
    method = METHODS[name].parameters(**params)
    together = select(method, batch)
    for row, (page_size, layout) in ((0, (48, "HND")), (2, (64, "NHD"))):
        alone = select(method, row_alone(repaged(batch, page_size, layout), row))
        assert all_lists(alone) == all_lists(together, batch.rows.tiles_of(row))


@every_method
@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_only_the_heads_asked_for_are_written(name: str, params: dict[str, Any], by_reference: bool) -> None:
    batch = lined_batch([(100, 70)], 4, 2, 64, 16, F32)
    index = select(METHODS[name].parameters(**params), batch, 128, [3, 0], by_reference)
    assert bool((index.block_counts[[1, 2]] == POISON).all())
    assert bool((index.block_ids[[1, 2]] == POISON).all())
    assert bool((index.block_counts[[0, 3]] > 0).all())


@every_method
@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_heads_that_differ_select_what_they_select_alone(name: str, params: dict[str, Any], by_reference: bool) -> None:
    """Heads of two kv heads in an arbitrary order, of which some keep everything, select bitwise as alone."""
    spec = METHODS[name]
    if not spec.parameters.differing or spec.full.unshared != spec.full:
        pytest.skip(f"{name} has no settings that heads of one launch may differ in, each by itself")
    first = spec.parameters(**params)
    other = replace(first, **{field: getattr(spec.full, field) for field in first.differing})
    methods, heads = [first, other, spec.parameters(**params), first], [2, 0, 3, 1]
    assert len({method.group_key for method in methods}) == 1
    batch = lined_batch([(240, 65), (0, 5)], 4, 2, 64, 16, F32, gap_tokens=3)
    together = select(methods, batch, 64, heads, by_reference)
    for head, method in ((2, first), (0, other)):
        alone = select(method, batch, 64, [head], by_reference)
        assert all_lists(alone, heads=[head]) == all_lists(together, heads=[head])


@pytest.mark.parametrize("name", METHODS)
def test_heads_whose_other_fields_differ_are_selected_apart(name: str) -> None:
    default, full = METHODS[name].parameters(), METHODS[name].full
    shared = {item.name for item in fields(default) if item.init} - {*default.differing}
    assert default.summary([default, default]) == default.summary([default])
    if default.group_key == full.group_key:
        assert {name for name in default.summary([default, full]) if name in shared} == shared
    for field in shared & {"keep_sink", "whole_blocks"}:
        other = replace(default, **{field: not getattr(default, field)})
        assert len(layer_plan([default, other, default]).groups) == 2


NAN = math.nan
OUT_OF_RANGE: dict[str, dict[str, tuple[Any, ...]]] = {
    "a_shape": {"sink_tokens": (-1,), "local_tokens": (0,)},
    "anchor_attention": {
        "theta": (-0.5, NAN), "step_tiles": (0, -3, 2.5), "sample_tokens": (3, 256),
    },
    "block_sparse": {"top_blocks": (-1,)},
    "flex_vertical_slash": {
        "gamma": (0.0, 1.01, NAN), "max_stripes": (-1,), "last_queries": (257,), "estimating": ("first",),
    },
    "sale": {
        "tau": (-0.1, 1.0, NAN), "sink_tokens": (16, -32, 32.0), "local_tokens": (96, 130),
    },
    "share_prefill": {
        "max_sparsity": (-0.1,), "max_distance": (-0.1,), "gamma": (0.0, 1.1), "cluster": (-2,), "last_queries": (0,),
    },
    "sparge_attn": {
        "kept_mass": (0.0, 1.01, NAN), "min_similarity": (-1.5, 2.0), "skip_margin": (0.0, 1.0, -math.inf, NAN),
    },
    "top_p": {
        "kept_mass": (0.0, 1.01, NAN), "sink_tokens": (16, -32, 32.0), "local_tokens": (96, 130),
        "most_tokens": (0, -32, 33), "peak_share": (0.0, 1.01, NAN), "ramp_tokens": (0, -1),
    },
    "vertical_slash": {
        "vertical_tokens": (-1,), "slash_tokens": (-1,), "forced_verticals": (-1,), "forced_slashes": (-1,),
        "last_queries": (0, 65),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_parameters_out_of_range_are_refused(name: str) -> None:
    for field, values in OUT_OF_RANGE[name].items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{field}: given {re.escape(repr(value))}, expected"):
                METHODS[name].parameters(**{field: value})


@pytest.mark.parametrize(
    ("rows", "heads", "page_size", "dtype"),
    [
        pytest.param([(77, 150), (0, 1), (201, 63)], (2, 1, 64), 16, torch.float16, marks=pytest.mark.full),
        *(pytest.param(LONG, (8, 2, 128), size, torch.bfloat16, marks=pytest.mark.gpu) for size in (16, 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", METHODS)
def test_set_to_keep_everything_it_is_dense_attention(
    name: str, rows: list[tuple[int, int]], heads: tuple[int, int, int], page_size: int, dtype: Any
) -> None:
    """The error stays within attention's own budget."""
    num_heads, num_kv_heads, head_dim = heads
    method = METHODS[name].full
    batch = random_batch(rows, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, gap_tokens=5)
    index = select(method, batch, method.block_tokens)
    assert int(index.kept_pairs()) == num_heads * causal_pairs(batch.rows)
    out = batch.empty_out()
    PORTABLE.attend(batch.call(index), out)
    dense = new_index(batch.rows, num_heads, 64)
    METHODS["dense"].reference(batch.call(dense, every_head(METHODS["dense"].full, num_heads)))
    assert_close(expected_attention(batch, dense), out)


@pytest.mark.parametrize("name", METHODS)
def test_the_reference_set_to_keep_everything_is_dense(name: str) -> None:
    method = METHODS[name].full
    batch = random_batch([(150, 140), (0, 9)], 2, 1, 64, 16, F32, DEVICE)
    batch.q.mul_(40)  # scores so far apart that most weights underflow to 0
    assert density_of(select(method, batch, by_reference=True)) == 1


@pytest.mark.parametrize("name", METHODS)
def test_what_its_description_says(name: str) -> None:
    spec = METHODS[name]
    assert (spec.name, type(spec.full)) == (name, spec.parameters)
    for params in (spec.demo, *spec.ladder):
        assert name_of(spec.parameters(**params)) == name
    finest = spec.parameters().finest_block_tokens
    assert finest is None or 16 <= finest <= spec.parameters.block_tokens
