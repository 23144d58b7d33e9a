# SPDX-License-Identifier: Apache-2.0
"""Shares of attention time by class of heads, worked out by hand."""

from types import SimpleNamespace

import pytest

from vllm_sparse_backend.calibration.class_times import head_times, times_of_classes
from vllm_sparse_backend.calibration.head_costs import Cost, LayerCost
from vllm_sparse_backend.cli.profile_commands import class_table
from vllm_sparse_backend.config.head_figures import HeadFigures
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import Level, Provenance
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.top_p.method import TopP

PLAIN, SPARSE = TopP(channels="all"), TopP(kept_mass=0.7, most_share=0.1, channels="all")
SCORED = TopP(kept_mass=0.7, most_share=0.1, channels="all", queries="all")


class TimeTable:
    """A layer of four heads takes 48 ms dense, and 4 ms for almost nothing."""

    layer = LayerCost(base_ms=4.0, dense_ms=48.0)

    def of(self, method: Method) -> Cost:
        match method:
            case TopP(queries="all"):
                return Cost(3.0, 2.0, 10.0)
            case TopP():
                return Cost(2.0, 1.0, 10.0)
            case Sale():
                return Cost(4.0, 3.0, 10.0)
        return Cost(100.0, 0.0, 10.0)  # a dense head needs no selection


def test_heads_divide_the_time_that_they_share():
    heads = head_times([PLAIN, SCORED, Sale(), Dense()], [0.1, 0.2, 0.3, 1.0], TimeTable())
    assert [head.dense_ms for head in heads] == [12.0] * 4
    # The head's time: 1/4 of the fixed 4 ms, its part of the selection's fixed time, its selection, and its pairs.
    expected = [1 + 2 + 1 + 1, 1 + 3 + 2 + 2, 1 + 4 + 3 + 3, 1 + 10]
    assert [head.ms for head in heads] == pytest.approx(expected)
    dense = head_times([Dense()] * 4, [1.0] * 4, TimeTable())
    assert [(head.dense_ms, head.ms) for head in dense] == [(12.0, 12.0)] * 4


LAYERS = [[PLAIN, SPARSE, SCORED, Sale()], [Dense()] * 4, [PLAIN] * 4, [Dense()] * 4]


@pytest.fixture
def classes():
    """Layer 1 is dense by choice, and layer 3 cannot run sparse."""
    shape = ModelShape(architecture="LlamaForCausalLM", num_layers=4, num_heads=4, num_kv_heads=2, head_dim=128)
    figures = HeadFigures.of_heads(density=[[0.1, 0.2, 0.3, 0.4], None, [0.1] * 4, None])
    job = SimpleNamespace(shape=shape, layers=[0, 1, 2], costs=TimeTable())
    return times_of_classes(job, Level.of_heads(LAYERS, Provenance(figures=figures)))


def test_classes_are_the_heads_of_a_kind(classes):
    assert [(row.kind, row.num_heads, row.num_settings) for row in classes] == [
        (PLAIN, 6, 2),
        (Dense(), 4, 1),
        (TopP(channels="all", queries="all"), 1, 1),
        (Sale(), 1, 1),
    ]
    assert [row.density for row in classes] == pytest.approx([0.7 / 6, 1.0, 0.3, 0.4])
    assert [row.share_before for row in classes] == pytest.approx([6 / 12, 4 / 12, 1 / 12, 1 / 12])
    plain = [1 + 1 + 1 + 1, 1 + 1 + 1 + 2, *[1 + 0.5 + 1 + 1] * 4]
    after = [sum(plain), 48.0, 1 + 3 + 2 + 3, 1 + 4 + 3 + 4]
    assert [row.share_after for row in classes] == pytest.approx([ms / 144 for ms in after])


def test_the_table_has_a_class_in_a_row_and_a_quantity_in_a_column(classes):
    lines = [line.strip("|").split("|") for line in class_table("high: a title", classes).splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells[0] == ["high: a title"]
    assert cells[2] == ["heads", "method", "settings", "density", "before, %", "after, %"]
    assert cells[4] == ["6", 'top_p channels="all"', "2", "0.117", "50.0", "16.0"]
    assert cells[6] == ["1", 'top_p channels="all" queries="all"', "1", "0.300", "8.3", "6.2"]
    assert cells[-1] == ["12", "all", "5", "0.450", "100.0", "63.9"]
