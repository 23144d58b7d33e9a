# SPDX-License-Identifier: Apache-2.0
"""The plan: every head of a rank in a single group, a profile's heads divided among ranks, and precedence."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.folders import profile_file
from vllm_sparse_backend.config.crossover_table import NEVER, Lengths
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON, LayerProfile
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.call import HeadGroup
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64)
DENSE = make_method("dense", {})
WIDE = make_method("vertical_slash", {"last_queries": 64})
NARROW = make_method("vertical_slash", {"last_queries": 16})

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a profile, and return its path."""
    return partial(profile_file, tmp_path, default=WIDE)


def every(heads: Sequence[int], method: Method) -> HeadGroup[Method]:
    """Return heads with one method."""
    return HeadGroup(tuple(heads), (method,) * len(heads))


def test_equal_methods_are_one_group_in_order_of_their_first_heads(write: Write) -> None:
    layers = {(1,): LayerProfile(heads={(0, 3): NARROW, (7,): NARROW, (2,): DENSE})}
    plan = Plan.by_level(SparsePrefillConfig(profile=write(layers=layers)), SHAPE)[ON]
    assert plan.layer(1).groups == (every((0, 3, 7), NARROW), every((1, 4, 5, 6), WIDE), every((2,), DENSE))
    assert plan.layer(0).groups == (every(range(8), WIDE),)


# SharePrefill, whose heads depend on each other


def share(cluster: int = -1, **params: Any) -> SharePrefill:
    return SharePrefill(cluster=cluster, **params)


def clusters_of(plan: Plan, layer: int) -> tuple[int, ...]:
    return tuple(method.cluster for method in plan.layer(layer).methods)


def test_heads_that_share_are_one_group_that_knows_their_clusters(write: Write) -> None:
    more = {"last_queries": 30}
    layers = {
        (0,): LayerProfile(heads={(0, 3): share(7), (1,): DENSE, (2,): share(7, **more), (5,): share(2)}),
        (2,): LayerProfile(heads={(3,): share(2, gamma=0.8), (6,): share(7, **more)}),
    }
    plan = Plan.by_level(SparsePrefillConfig(profile=write(default=share(), layers=layers)), SHAPE)[ON]
    assert plan.layer(0).groups == (
        HeadGroup((0, 3, 4, 5, 6, 7), tuple(share(c) for c in (7, 7, -1, 2, -1, -1))),
        every((1,), DENSE),
        every((2,), share(7, **more)),
    )
    assert clusters_of(plan, 1) == (-1,) * 8
    assert plan.layer(2).groups[0].methods == (*[share()] * 3, share(2, gamma=0.8), *[share()] * 3)


def test_head_left_alone_in_its_cluster_on_a_rank_is_noise_there(write: Write) -> None:
    """This also holds if the other members are in dense layers. Cluster numbers stay those of the profile."""
    layers = {
        (0,): LayerProfile(heads={(0, 4, 5): share(0), (1,): share(1), (2, 6): share(2), (3,): share(3)}),
        (1,): LayerProfile(heads={(0,): share(1), (7,): share(2)}),
        (2,): LayerProfile(heads={(3,): share(3)}),
    }
    path = write(default=share(), layers=layers)
    ranks = [Plan.by_level(SparsePrefillConfig(profile=path, dense_layers=(2,)), SHAPE, rank, 2)[ON] for rank in (0, 1)]
    assert [clusters_of(ranks[0], layer) for layer in (0, 1)] == [(-1, 1, -1, -1), (1, -1, -1, -1)]
    assert [clusters_of(ranks[1], layer) for layer in (0, 1)] == [(0, 0, 2, -1), (-1, -1, -1, 2)]
    whole = Plan.by_level(SparsePrefillConfig(profile=path), SHAPE)[ON]
    assert clusters_of(whole, 0) == (0, 1, 2, 3, 0, 0, 2, -1)
    assert clusters_of(whole, 2) == (-1, -1, -1, 3, -1, -1, -1, -1)


# Precedence and its messages


def test_dense_layers_of_configuration_and_profile_add_up(write: Write) -> None:
    plan = Plan.by_level(SparsePrefillConfig(profile=write(dense_layers=[0]), dense_layers=(2, 0)), SHAPE)[ON]
    assert [layer is None for layer in plan.layers] == [True, False, True, False]
    assert plan.layer(0) is None
    assert plan.layer(2) is None
    assert plan.layer(1) == plan.layer(3) == LayerPlan((WIDE,) * 8)


def test_files_are_read_once_and_travel(write: Write, tmp_path: Path) -> None:
    """Other processes get the content that the first process read, even if the file has changed or is gone."""
    path, table = Path(write()), tmp_path / "crossover.json"
    table.write_text('{"format": 1, "entries": []}')
    additional_config = {
        "sparse_prefill": {"profile": str(path), "crossover": str(table), "dense_layers": [2]},
        "other": 1,
    }
    first = Resolved.from_additional_config(additional_config, SHAPE, None, "cpu")
    travelled = json.loads(json.dumps(first.carried.into(additional_config)))
    assert travelled.items() >= additional_config.items()
    path.unlink()
    table.write_text("broken")
    again = Resolved.from_additional_config(travelled, SHAPE, None, "cpu", 1, 2)
    assert (again.config, again.table, again.carried) == (first.config, first.table, first.carried)
    assert again.plan.source == first.plan.source == f"profile {path}"
    assert Resolved.from_additional_config(travelled, SHAPE, None, "cpu").plans == first.plans


def test_a_plan_without_a_sparse_layer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="name all 4 layers, expected fewer"):
        Plan.by_level(SparsePrefillConfig(method="dense", dense_layers=(0, 1, 2, 3)), SHAPE)[ON]


def test_description_says_what_runs_how(write: Write) -> None:
    layers = {(2, 3): LayerProfile(heads={(0, 1): DENSE, (2,): NARROW})}
    path = write(layers=layers, dense_layers=[0], min_tokens=4096)
    lengths = Lengths(4096, 300, notes=("a note",))
    assert Plan.by_level(SparsePrefillConfig(profile=path), SHAPE)[ON].describe(lengths) == [
        f"sparse prefill with profile {path}, for rows of more than 4096 tokens, at least 300 of them new",
        "a note",
        "layers 0: dense",
        "layers 1-3: vertical_slash (2 settings) on 20 heads of this rank",
        "layers 2-3: dense() on 4 heads of this rank",
    ]
    config = SparsePrefillConfig(method="a_shape", params={"sink_tokens": 1, "local_tokens": 2})
    assert Plan.by_level(config, SHAPE, 1, 2)[ON].describe(NEVER) == [
        "sparse prefill with method a_shape, for no rows",
        "layers 0-3: a_shape(sink_tokens=1, local_tokens=2) on 16 heads of this rank",
    ]
