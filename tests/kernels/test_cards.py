# SPDX-License-Identifier: Apache-2.0
"""Every kernel of every method compiles for every card of the table, without the card, and fits its shared memory."""

import os
from typing import Any

import pytest
import torch

from tests.helpers.compiled_methods import HEAD_DIMS, compiled, problems
from tests.helpers.offline_compiler import BY_TARGET
from vllm_sparse_kernels import layer
from vllm_sparse_kernels.attention import AttendSpec, widest_block
from vllm_sparse_kernels.attention.portable import engine as portable
from vllm_sparse_kernels.cards import CARDS, find_card, status_note
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.selection import engine as selection

WHOLE = bool(os.environ.get("ALL_CARDS"))
"""Whether every method is compiled for every card and head dim."""


def make_method(name: str, **parameters: Any) -> Method:
    return METHODS[name].parameters(**parameters)


REFUSED_METHODS = {(target, 512): ("anchor_attention", "sale") for target in (90, 100)}
"""Methods without any setting that runs, by target and head dim: their selection needs more shared memory."""


@pytest.mark.full
def test_kernels_with_the_most_shared_memory_fit_small_cards() -> None:
    table = compiled(89, 128, "share_prefill")
    assert table["share_prefill"].keys() >= {"decide_kernel", "split_lse_kernel", "sums_kernel", "attend_kernel"}
    assert not problems(table, BY_TARGET[89].shared_bytes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "head_dim"), [*((target, 128) for target in BY_TARGET), (80, 256), (89, 256), (90, 256)]
)
def test_the_default_compiles_and_fits_every_card(target: int, head_dim: int) -> None:
    table = compiled(target, head_dim, "top_p")
    assert table["top_p"]["_scores_kernel"]["shared_bytes"] > 0
    assert table["top_p"]["attend_kernel"]["registers"] > 0
    assert not problems(table, BY_TARGET[target].shared_bytes)


@pytest.mark.full
@pytest.mark.skipif(not WHOLE, reason="compiles for an hour of a core: set ALL_CARDS=1")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("target", BY_TARGET)
def test_every_method_compiles_and_fits_every_card(target: int, head_dim: int, method: str) -> None:
    card = BY_TARGET[target]
    table = compiled(target, head_dim, method)
    if widest_block(head_dim, card.shared_bytes) is None:
        assert not table, "layers that stay dense launch no kernel"
        return
    if method in REFUSED_METHODS.get((target, head_dim), ()):
        assert not table[method]
        return
    assert table[method]["attend_kernel"]["shared_bytes"] > 0
    assert not problems(table, card.shared_bytes)


@pytest.mark.parametrize(
    ("target", "head_dim", "widest"), [(80, 256, 64), (89, 256, 64), (90, 512, 64), (80, 512, None), (89, 512, None)]
)
def test_layers_that_do_not_fit_are_refused_with_the_reason(
    target: int, head_dim: int, widest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = BY_TARGET[target].shared_bytes
    monkeypatch.setattr(portable, "shared_bytes", lambda device: limit_bytes)
    strides = 128 * 4 * head_dim, 4 * head_dim, 2 * head_dim
    spec = AttendSpec(torch.device("cuda"), torch.bfloat16, head_dim, 128, strides, 64, has_stripes=False)
    assert widest_block(head_dim, limit_bytes) == widest
    refused = f"blocks of 64 keys of {head_dim} do not fit the {limit_bytes} bytes of shared memory"
    assert portable.refusal(spec) == (None if widest else refused)


@pytest.mark.parametrize(
    ("method", "head_dim", "limit_kib", "fits"),
    [
        (make_method("top_p"), 256, 99, True),
        (make_method("anchor_attention"), 256, 99, True),
        (make_method("anchor_attention"), 512, 227, False),
        (make_method("top_p"), 512, 227, False),
        (make_method("sale"), 128, 99, True),
        (make_method("sale"), 256, 99, True),
        (make_method("sale"), 512, 227, False),
        (make_method("flex_vertical_slash", last_queries=128), 256, 99, True),
        (make_method("flex_vertical_slash", last_queries=256), 128, 99, True),
        (make_method("flex_vertical_slash", last_queries=256), 256, 99, False),
        (make_method("share_prefill", last_queries=256), 256, 99, False),
        (make_method("share_prefill", last_queries=256), 256, 163, True),
    ],
    ids=str,
)
def test_a_selection_that_does_not_fit_is_refused_with_the_reason(
    method: Method, head_dim: int, limit_kib: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (selection, layer):
        monkeypatch.setattr(module, "shared_bytes", lambda device: limit_kib << 10)
    cpu, plan = torch.device("cpu"), layer.layer_plan([method] * 4)
    assert layer.fits_shared_memory(plan, head_dim, cpu) == fits
    if fits:
        assert selection.choose_select_engine(selection.SelectSpec(method, cpu, head_dim)).engine.name == "portable"
    else:
        with pytest.raises(ValueError, match=rf"shared memory at head_dim {head_dim}, the GPU has {limit_kib << 10}"):
            selection.choose_select_engine(selection.SelectSpec(method, cpu, head_dim))


def test_notes_tell_measured_compiled_and_unknown_cards_apart() -> None:
    assert status_note((9, 0)) is None
    assert "L4, L40S, RTX 4090): the kernels were compiled for it but never run" in str(status_note((8, 9)))
    assert "8.9" in str(status_note((8, 9)))
    assert "compute capability 10.3 is unknown" in str(status_note((10, 3)))
    assert find_card((10, 3)) is None
    assert len(BY_TARGET) == len(CARDS)
