# SPDX-License-Identifier: Apache-2.0
"""References of four methods against independent statements of the papers' rules and the released code."""

import pytest
import torch

from tests.helpers.paper_overlaps import AnchorOverlap, SaleOverlap, ShareOverlap, VerticalSlashOverlap
from tests.helpers.paper_rules import overlap, sale_local_blocks

LEAST = 0.999


@pytest.fixture(scope="module")
def anchor() -> AnchorOverlap:
    """Return a prompt of three heads with a tail of 188 queries."""
    return AnchorOverlap.measure(num_tokens=1724, num_heads=3, num_kv_heads=1, head_dim=64, theta=8.0, step_tiles=3)


@pytest.fixture(scope="module")
def sale() -> SaleOverlap:
    return SaleOverlap.measure(num_tokens=1209, num_heads=3, num_kv_heads=1, head_dim=64, tau=0.02)


def test_anchor_attention_keeps_what_the_paper_keeps(anchor: AnchorOverlap) -> None:
    assert anchor.paper >= LEAST
    assert 0.2 < anchor.paper_density < 0.9


def test_anchor_attention_with_its_options_keeps_what_the_released_code_keeps(anchor: AnchorOverlap) -> None:
    """Except the block of keys before a group, which the released code never visits, and which votes here."""
    assert anchor.released_but_for_skipped >= LEAST
    assert anchor.released < 1
    assert anchor.kept_of_skipped > 0.1


def test_neither_rule_is_the_other(anchor: AnchorOverlap) -> None:
    """This shows that the comparison can fail: with one option or none, the method does not match the released code."""
    assert anchor.paper_against_released < 0.95
    assert max(anchor.dense_tail_alone, anchor.first_group_alone) < LEAST


def test_sale_keeps_what_the_paper_keeps(sale: SaleOverlap) -> None:
    assert sale.paper >= LEAST
    assert 0.1 < sale.paper_density < 0.9


def test_sale_keeps_what_the_released_code_keeps(sale: SaleOverlap) -> None:
    """Except for roundings, which the module's docstring lists, and which change a few of a hundred blocks."""
    assert sale.released_but_for_rounding >= LEAST
    assert 0.9 < sale.released < LEAST


@pytest.fixture(scope="module")
def vertical_slash() -> VerticalSlashOverlap:
    """Return a prompt whose last tile has 21 queries."""
    return VerticalSlashOverlap.measure(
        num_tokens=1301, num_heads=3, num_kv_heads=1, head_dim=64, num_verticals=60, num_slashes=10
    )


def test_vertical_slash_keeps_what_the_paper_keeps(vertical_slash: VerticalSlashOverlap) -> None:
    """Except that the diagonal is always kept, and that slashes are whole blocks."""
    assert vertical_slash.paper >= LEAST
    assert 0.02 < vertical_slash.paper_density < 0.5
    assert vertical_slash.paper_pairs < 0.9


def test_forced_lines_are_not_the_papers(vertical_slash: VerticalSlashOverlap) -> None:
    """This shows that the comparison can fail: with lines that the paper does not force, the masks differ."""
    assert vertical_slash.released < 0.99


@pytest.fixture(scope="module")
def share() -> ShareOverlap:
    """Return a prompt with a last tile of 21 queries, whose estimate starts inside the previous tile."""
    return ShareOverlap.measure(num_tokens=1301, num_heads=4, num_kv_heads=2, head_dim=64, gamma=0.8, max_distance=0.3)


def test_share_prefill_keeps_what_the_paper_keeps(share: ShareOverlap) -> None:
    """Except the blocks on the diagonal, which are always kept here."""
    assert share.paper >= LEAST
    assert 0.05 < share.paper_density < 0.9
    assert share.paper_without_diagonal < LEAST


def test_share_prefill_decides_as_the_paper_does(share: ShareOverlap) -> None:
    """One pivot is dense, some heads share, others are too far from the pivot."""
    assert (share.pivots, share.as_decided) == (1, 4)
    assert 0 < share.shared < 3


def test_the_local_region_has_four_to_seven_blocks() -> None:
    assert [sale_local_blocks(number) for number in (1, 2, 5, 6, 8, 9, 10, 13)] == [0, 1, 4, 5, 7, 4, 5, 4]


def test_overlap() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert overlap(a, b) == pytest.approx(1 / 3)
    assert overlap(a, a) == overlap(~a & a, ~b & b) == 1
