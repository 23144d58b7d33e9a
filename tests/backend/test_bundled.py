# SPDX-License-Identifier: Apache-2.0
"""Bundled profiles of models serve: plan, layers, and what each head attends to, at those models' layers and heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.backend.cpu_build  # noqa: F401 — skips where there is none
from tests.backend.served import CPU, Step, make_builder, make_layers, make_step
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import bundled_profiles, load_profile
from vllm_sparse_kernels import Rows, SparseIndex
from vllm_sparse_kernels.attend.reference import attend
from vllm_sparse_kernels.layer import methods_by_head
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.width import index_block_tokens

HEAD_DIM = 32
LOCAL_HEADS = 4
"""Of the last tensor-parallel rank."""
CONTEXT, QUERY = 150, 20

OF_MODELS = [name for name in bundled_profiles() if load_profile(name).model is not None]


def expected(step: Step, methods: tuple[Method, ...], scale: float) -> torch.Tensor:
    """Each head by itself through the reference of the method that the profile gives it."""
    query, cache, block_table = step.alone(0)
    rows = Rows((0,), (QUERY,), (CONTEXT,), block_table)
    layouts = {head: method.stripe_layout(rows) for head, method in enumerate(methods)}
    index = SparseIndex.allocate(rows, len(methods), index_block_tokens(methods, HEAD_DIM, CPU), layouts)
    for head, method in enumerate(methods):
        own = torch.tensor([head], dtype=torch.int32)
        METHODS[name_of(method)].reference(method, query, cache, index, own, scale)
    out = torch.full_like(query, float("nan"))
    attend(query, cache, index, out, scale)
    return out


@pytest.mark.parametrize(
    "name", [*OF_MODELS[:1], *(pytest.param(name, marks=pytest.mark.full) for name in OF_MODELS[1:])]
)
def test_every_layer_adopts_its_part_and_runs_it(
    name: str, configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = load_profile(name)
    assert profile.model is not None
    shape = ModelShape(**(vars(profile.model) | {"head_dim": HEAD_DIM}))
    (path := tmp_path / "tiny.yaml").write_text(profile.model_copy(update={"model": shape}).to_yaml())
    config = configured(profile=str(path), min_tokens=0, min_query_tokens=1)
    monkeypatch.setattr(compat, "model_shape", lambda config: shape)
    monkeypatch.setattr(config.model_config, "get_layers_start_end_indices", lambda parallel: (0, shape.num_layers))
    size = shape.num_heads // LOCAL_HEADS
    monkeypatch.setattr(compat, "tensor_parallel", lambda config: (size - 1, size))
    sizes = {"num_heads": LOCAL_HEADS, "num_kv_heads": 1, "head_size": HEAD_DIM}
    layers = make_layers(config, range(shape.num_layers), **sizes)
    builder = make_builder(config, layers)
    assert builder.sparse_layers == tuple(set(range(shape.num_layers)) - set(profile.dense_layers))
    methods = [profile.methods_of(layer, shape.num_heads)[-LOCAL_HEADS:] for layer in range(shape.num_layers)]
    most = max(builder.sparse_layers, key=lambda layer: len(set(methods[layer])))
    for layer in builder.sparse_layers:
        assert methods_by_head(layers[layer].impl.layer.groups) == list(methods[layer])
    step = make_step(layers[most], [(CONTEXT, QUERY)])
    out = step.forward(layers[most], builder.build(0, step.common))
    wanted = expected(step, methods[most], layers[most].impl.scale)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)


def test_auto_knows_what_the_served_model_is_called(configured: Callable[..., Any]) -> None:
    assert compat.model_shape(configured(profile="auto")).names == ("default",)
