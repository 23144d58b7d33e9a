# SPDX-License-Identifier: Apache-2.0
"""An attention layer on vLLM's own cache: mixed batches against vLLM's attention, methods against their references."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.folders import profile_file
from tests.helpers.masks import density_of, mask_of
from tests.helpers.mixed_batches import CLOSE, MIN_TOKENS, MIXED, SPARSE_ROWS, dense_tokens, reference, sparse_part
from tests.helpers.vllm_objects import make_builder, make_layers, make_step, recorder_of
from vllm_sparse_backend.config.profile import load_profile
from vllm_sparse_backend.serving import compat
from vllm_sparse_kernels import PagedCache
from vllm_sparse_kernels.methods import METHODS

SETTINGS: dict[str, dict[str, Any]] = {
    "a_shape": {"sink_tokens": 64, "local_tokens": 128},
    "anchor_attention": {"theta": 1.5, "step_tiles": 2},
    "block_sparse": {"top_blocks": 3},
    "dense": {},
    "flex_vertical_slash": {"gamma": 0.1},
    "sale": {"tau": 0.2, "int8_scores": True},
    "share_prefill": {"gamma": 0.5, "cluster": 0, "max_sparsity": 2.0, "max_distance": 2.0},
    "sparge_attn": {"kept_mass": 0.4, "min_similarity": -1.0, "skip_margin": -0.5, "int8_scores": True},
    "top_p": {"kept_mass": 0.3, "ramp_tokens": 1, "sink_tokens": 0, "local_tokens": 128, "peak_share": 0.2},
    "vertical_slash": {"vertical_tokens": 40, "slash_tokens": 104},
}
BY_HEAD = (
    ("share_prefill", "sale", "sparge_attn", "share_prefill"),
    ("dense", "anchor_attention", "share_prefill", "share_prefill"),
    ("share_prefill", "block_sparse", "flex_vertical_slash", "share_prefill"),
    ("vertical_slash", "top_p", "a_shape", "sale"),
)
"""The methods of each layer's heads."""
LEAVE_NOTHING_OUT = {"dense"}
QUICK = {"block_sparse", "sale"}
"""A method that keeps blocks, and the default."""


class TestCache:
    def test_another_layout_is_an_error(self, configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        config = configured()
        spec = make_layers(config, [0])[0].get_kv_cache_spec(config)
        compat.check_cpu_layout("vec", spec)

        def as_on_a_gpu(kv_cache: torch.Tensor, head_dim: int) -> PagedCache:
            return PagedCache(*kv_cache.transpose(1, 2).split(head_dim, dim=-1))

        monkeypatch.setattr(compat, "paged_cache", as_on_a_gpu)
        with pytest.raises(RuntimeError, match="cache layout for instruction set 'vec' and dtype"):
            compat.check_cpu_layout("vec", spec)


class TestMixedBatches:
    @pytest.mark.parametrize("in_cache", [True, False], ids=["keys in the cache alone", "keys given too"])
    def test_at_full_density_it_is_vllms_attention(self, built: Callable[..., Any], in_cache: bool) -> None:
        (layer,), builder = built(2, min_tokens=MIN_TOKENS, check_index=True)
        step = make_step(layer, MIXED)
        metadata = builder.build(0, step.common)
        (slab,) = metadata.sparse.slabs
        assert slab.rows.num_rows == len(SPARSE_ROWS)
        assert len(metadata.sparse.dense_runs) == 4
        new = [torch.cat([x[-q:] for x, (_, q) in zip(side, MIXED)]) for side in (step.keys, step.values)]
        out = step.forward(layer, metadata, **({} if in_cache else dict(zip(("key", "value"), new))))
        torch.testing.assert_close(out, step.by_dense_backend(layer, builder), **CLOSE)

    def test_learnt_sinks_join_the_softmax_as_in_vllms(self, configured: Callable[..., Any]) -> None:
        """Everything is kept, so rows that run sparse equal rows on vLLM's own implementation."""
        config = configured(method="dense", min_tokens=MIN_TOKENS, min_query_tokens=1)
        layers = make_layers(config, [0], sinks=torch.tensor([-20.0, 0.0, 4.0, 9.0]))
        builder, step = make_builder(config, layers), make_step(layers[0], MIXED)
        metadata = builder.build(0, step.common)
        assert metadata.sparse.slabs[0].rows.num_rows == len(SPARSE_ROWS)
        out = step.forward(layers[0], metadata)
        torch.testing.assert_close(out, step.by_dense_backend(layers[0], builder), **CLOSE)
        layers[0].impl.sinks = None
        without = step.forward(layers[0], metadata)
        left = (out.norm(dim=-1) / without.norm(dim=-1)).mean(0)  # of each head
        assert float(left[0]) == pytest.approx(1, abs=1e-4)
        assert left.diff().max() < 0, "the larger the sink, the less is left"


class TestMethods:
    def test_all_are_here(self) -> None:
        assert set(SETTINGS) == set(METHODS) == {name for names in BY_HEAD for name in names}

    def test_every_head_runs_the_method_that_the_profile_names(self, built: Callable[..., Any], tmp_path: Path) -> None:
        """Heads of a layer have different methods; SharePrefill's patterns span layers. The reference has no groups."""
        specs = [[{"method": name, **SETTINGS[name]} for name in names] for names in BY_HEAD]
        specs[1][3]["cluster"] = specs[2][0]["cluster"] = 1
        layers = {i: {"heads": dict(enumerate(heads))} for i, heads in enumerate(specs)}
        path = profile_file(tmp_path, default={"method": "dense"}, layers=layers)
        profile = load_profile(path)
        made, builder = built(*range(4), profile=path, min_tokens=MIN_TOKENS, check_index=True)
        step = make_step(made[0], MIXED)
        metadata = builder.build(0, step.common)
        parts = {row: sparse_part(step, row) for row in SPARSE_ROWS}
        for number, layer in enumerate(made):
            out = step.forward(layer, metadata)
            methods = profile.methods_of(number, 4)
            for row, part in parts.items():
                expected, _ = reference(step, row, methods, layer.impl.scale, part)
                torch.testing.assert_close(out[step.tokens(row)][dense_tokens(step, row) :], expected, **CLOSE)

    @pytest.mark.parametrize(
        "method", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SETTINGS]
    )
    def test_sparse_rows_are_the_reference_of_each_row_alone(self, built: Callable[..., Any], method: str) -> None:
        """Other rows, pages and other layers of the step do not change a row's selection and output.

        Heads use the options of their methods, and the counted pairs are exactly the pairs that the references keep.
        """
        layers, builder = built(0, 1, method=method, params=SETTINGS[method], min_tokens=MIN_TOKENS, check_index=True)
        step = make_step(layers[0], MIXED)
        metadata, dense = builder.build(0, step.common), step.by_dense_backend(layers[0], builder)
        first, second = (step.forward(layer, metadata) for layer in layers)
        density, kept = [], 0
        for row in range(len(MIXED)):
            tokens = step.tokens(row)
            if row in SPARSE_ROWS:
                expected, index = reference(step, row, layers[0].impl.layer.plan.methods, layers[0].impl.scale)
                cut = dense_tokens(step, row)
                assert torch.equal(first[tokens][:cut], dense[tokens][:cut])
                torch.testing.assert_close(first[tokens][cut:], expected, **CLOSE)
                density.append(density_of(index))
                kept += int(mask_of(index, 0).sum())
            else:
                assert torch.equal(first[tokens], dense[tokens])
        assert (min(density) == 1) if method in LEAVE_NOTHING_OUT else (min(density) < 0.8), density
        if method != "share_prefill":  # a layer's heads read those of earlier layers here
            assert torch.equal(first, second)
        counted = {(name, *labels): count for (name, labels), count in recorder_of(builder).samples().items()}
        spans = [(max(MIXED[row][0], MIN_TOKENS), sum(MIXED[row])) for row in SPARSE_ROWS]
        causal = layers[0].impl.num_heads * sum(sum(range(start + 1, end + 1)) for start, end in spans)
        assert counted["kept_pairs", "0", "on"] == kept
        assert [counted["causal_pairs", layer, "on"] for layer in "01"] == [causal] * 2
