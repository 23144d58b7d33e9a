# SPDX-License-Identifier: Apache-2.0
"""The host's work for a sparse layer of a step, as counts, because times depend on the machine."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from benchmarks.host_time import Pass, counted_operations, decode_parts, hopper_paths
from tests.helpers.offline_compiler import without_launches
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_kernels.index import IndexLayout

VIEWS = {"aten.transpose.int", "aten.chunk.default"}
"""Operations that a layer may call: views of its cache, which launch nothing."""


def pass_of(num_layers: int) -> Callable[[], None]:
    """Return a chunk's pass through the layers of a small model on the engine for Hopper."""
    shape = ModelShape("LlamaForCausalLM", num_layers, num_heads=9, num_kv_heads=3, head_dim=64)
    run = Pass.of(shape, "", context_len=24_576, query_len=8_192).step()
    run()  # fills the caches of the process
    return run


@pytest.fixture
def no_kernels() -> Iterator[None]:
    with hopper_paths(), without_launches():
        yield


@pytest.mark.usefixtures("no_kernels")
def test_layers_share_what_follows_from_the_rows() -> None:
    step = pass_of(4)
    with patch.object(IndexLayout, "build", side_effect=IndexLayout.build) as build:
        step()
    assert build.call_count == 1, "built once for all layers of a step"


@pytest.mark.usefixtures("no_kernels")
def test_a_further_layer_makes_views_of_its_cache_and_nothing_else() -> None:
    few, more = (counted_operations(pass_of(num_layers)) for num_layers in (2, 7))
    assert dict(more - few) == dict.fromkeys(VIEWS, 5)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_all_parts_of_a_step_of_decodes_are_timed(num_rows: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    with patch("benchmarks.host_time.CALLS", 1), patch("benchmarks.host_time.REPETITIONS", 1):
        parts = dict(decode_parts(num_rows, tmp_path_factory.mktemp("model") / "model"))
    assert len(parts) == 4
    assert all(us > 0 for us in parts.values())
