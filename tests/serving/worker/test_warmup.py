# SPDX-License-Identifier: Apache-2.0
"""Warm-up launches every kernel of a mixed load: compared by Triton's own keys on a CPU, by counts on a GPU."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.helpers.kernel_keys import HOPPER, Key, recorded_keys
from tests.helpers.method_cases import uncomputed
from tests.helpers.worker_layers import CPU, HAS_CUDA, LARGEST_CHUNK, LONGEST, SHAPE, make_impls
from vllm_sparse_backend.config.profile import ON, SHARE
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import compile_monitor, engine_picker
from vllm_sparse_backend.serving.worker.arena import consecutive_rows
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.owner import LayerLevel
from vllm_sparse_backend.serving.worker.rows import copy_block_table_rows
from vllm_sparse_backend.serving.worker.warmup import warm_up
from vllm_sparse_backend.streaming_heads import streaming_method
from vllm_sparse_kernels import PagedCache
from vllm_sparse_kernels.attention import AttendEngine, FlashAttention
from vllm_sparse_kernels.call import HeadGroup
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import Layer, layer_plan, run
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.paged import FP8
from vllm_sparse_kernels.selection.engine import SelectEngine

DTYPE = torch.float16
TOKENS_FIRST = (0, 2, 1, 3)
"""The usual order in memory: pages, then tokens, then heads."""

PARAMS: dict[str, list[dict[str, Any]]] = {
    "share_prefill": [{"cluster": 0}],
    "sparge_attn": [{}, {"skip_margin": -5.0, "int8_scores": True}],
    "sale": [{}, {"int8_scores": True}],
    "top_p": [{}],
    "vertical_slash": [{}],
}
CASES = [(name, params) for name in METHODS for params in PARAMS.get(name, [{}])]
OF_FP8 = ("anchor_attention", "sale", "share_prefill", "sparge_attn", "top_p", "vertical_slash")
IN_FP8 = [(name, PARAMS.get(name, [{}])[0]) for name in OF_FP8]

Steps = Sequence[Sequence[tuple[int, int]]]


# Steps of a single token, of a multiple of 16, and of neither; with and without room for stripes.
SINGLE: Steps = [[(4097, n)] for n in (1, 160, 129)] + [[(0, n)] for n in (1, 32, 65)]


def random_steps(seed: int, number: int) -> Steps:
    """Return steps of 1 to 64 rows of (context_len, query_len): odd chunks, prefix hits, single tokens."""
    generator = random.Random(seed)
    steps = []
    for _ in range(number):
        num_rows = generator.choice([1, 1, 2, 3, 7, 16, 64])
        contexts = [generator.choice([0, 0, 128, 1000, 4097, generator.randrange(20_000)]) for _ in range(num_rows)]
        queries = [
            generator.choice([1, 16, 63, 128, 129, generator.randrange(1, LARGEST_CHUNK)]) for _ in range(num_rows)
        ]
        steps.append(list(zip(contexts, queries)))
    return steps


def make_spec(page_size: int, dtype: torch.dtype = DTYPE) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=page_size, num_kv_heads=SHAPE.num_kv_heads, head_size=SHAPE.head_dim, dtype=dtype
    )


def run_steps(
    impls: Sequence[SparsePrefillImpl], page_size: int, steps: Steps, device: torch.device, in_fp8: bool = False
) -> None:
    """Run steps like a server: queries are part of a fused projection, with the runner's block tables and cache views.

    In fp8, queries are rounded into a separate tensor, and results are in bf16. Divided into slabs, every step fits the
    arena, and nothing is allocated outside of it.
    """
    memory = impls[0].worker.memory
    assert memory is not None
    arena = memory.arena
    assert arena.buffer is not None
    arena.overflows = arena.peak_bytes = 0  # discards those of warm-up
    num_heads, num_kv_heads, head_dim = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    width = num_heads + 2 * num_kv_heads
    storage = torch.zeros(LONGEST // page_size, page_size, num_kv_heads, 2 * head_dim, dtype=DTYPE, device=device)
    storage = storage.to(FP8) if in_fp8 else storage
    cache = PagedCache(*storage.split(head_dim, dim=-1), *((0.5, 0.3) if in_fp8 else ()))
    for i, lengths in enumerate(steps):
        num_tokens = sum(query_len for _, query_len in lengths)
        projected = torch.randn(num_tokens, width * head_dim, device=device).to(DTYPE)
        query = projected[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
        query = query.contiguous().to(FP8) if in_fp8 else query
        num_pages = max(-(-(c + q) // page_size) for c, q in lengths) + i  # usually not a multiple of 16
        table = torch.arange(num_pages, dtype=torch.int32, device=device).repeat(len(lengths) + 1, 1)
        for slab in memory.room.slabs(
            consecutive_rows(lengths), copy_block_table_rows(table, list(range(1, len(lengths) + 1)))
        ):
            for impl in impls:
                with arena.frame():
                    out = torch.empty_like(query, dtype=torch.bfloat16 if in_fp8 else None)
                    run(impl.layer, impl.layer.new_call(query, cache, slab.rows, impl.scale, arena), out, impl.sinks)
    assert arena.overflows == arena.used_bytes == 0
    assert 0 < arena.peak_bytes <= len(arena.buffer)


@pytest.mark.skipif(HAS_CUDA, reason="needs Triton's interpreter, whose kernels need no device")
class TestKeys:
    @pytest.fixture(autouse=True)
    def as_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run every engine and accept it: nothing is computed, so there is no result to judge."""

        def failure(engine: AttendEngine, batch: Batch, index: Any, options: Any) -> None:
            engine.attend(batch.call(index), batch.empty_out(), options=options)

        def selection_failure(engine: SelectEngine, batch: Batch, layer: Layer, heads: HeadGroup) -> None:
            engine.select(batch.call(layer.allocate_index(batch.rows), heads))

        monkeypatch.setattr(compat, "IS_CPU", False)
        monkeypatch.setattr(engine_picker, "selection_failure", selection_failure)
        monkeypatch.setattr(engine_picker, "failure", failure)
        monkeypatch.setattr(compat, "flash_attention", lambda: FlashAttention.of_version(3, uncomputed))

    @pytest.mark.full
    @pytest.mark.parametrize(("page_size", "engine"), [(16, "portable"), (128, "portable"), (128, "flash")])
    @pytest.mark.parametrize(("method", "params"), CASES, ids=str)
    def test_no_step_brings_a_kernel_that_warm_up_did_not_meet(
        self, method: str, params: dict[str, Any], page_size: int, engine: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if engine == "flash" and ("int8_scores" in params or "skip_margin" in params):
            pytest.skip("FlashAttention has no such options")
        steps = [*random_steps(seed=page_size, number=12), *SINGLE]
        served = check_keys(make_impls(method, params, CPU, engine), page_size, engine, steps, monkeypatch)
        assert {"portable": "attend_kernel", "flash": "finish_kernel"}[engine] in {name for name, _ in served}

    @pytest.mark.full
    def test_nor_does_one_on_an_engine_that_narrow_blocks_are_not_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks have the width of engines that are later found to be broken."""
        monkeypatch.setattr(compat, "flash_attention", lambda: None)
        impls = make_impls("sale", {}, CPU)
        check_keys(impls, 128, "auto", random_steps(seed=3, number=12), monkeypatch)
        assert {(impl.layer.block_tokens, impl.layer.engine.name) for impl in impls} == {(32, "portable")}

    @pytest.mark.parametrize(
        ("method", "engine"), [("sale", "flash"), ("anchor_attention", "flash"), ("vertical_slash", "portable")]
    )
    def test_nor_over_a_cache_in_fp8_or_in_a_layer_with_sinks(
        self, method: str, engine: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compat, "reads_fp8", lambda: True)
        impls = make_impls(method, {}, CPU, engine)
        impls[1].sinks = torch.randn(SHAPE.num_heads)  # next to a layer of the same plan without sinks
        served = check_keys(impls, 128, engine, random_steps(seed=5, number=8), monkeypatch, in_fp8=True)
        assert {impl.layer.engine.name for impl in impls} == {engine}
        assert any("fp8" in key for _, key in served)

    def test_nor_do_layers_with_streaming_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They have blocks of the same width as the level at which requests set p, and get engines of their own."""
        impls = make_impls("top_p", {}, CPU)
        level = impls[0].levels[ON]
        methods = [
            streaming_method(512) if head % 3 else method for head, method in enumerate(level.layer.plan.methods)
        ]
        streaming = Layer.of(layer_plan(methods), SHAPE.head_dim, CPU, block_tokens=level.layer.block_tokens)
        impls[0].levels = {ON: LayerLevel(replace(streaming, by_kernels=True)), SHARE: level}
        steps = random_steps(seed=6, number=8)
        with recorded_keys(monkeypatch) as warm:
            _warm_up(impls, 128, "auto", CPU, in_fp8=False)
        assert {level.layer.engine.name for level in impls[0].levels.values()} == {"flash"}
        with recorded_keys(monkeypatch) as served:
            run_steps(impls, 128, steps, CPU)
        assert served <= warm
        assert "_a_shape_kernel" in {name for name, _ in served}


def check_keys(
    impls: Sequence[SparsePrefillImpl], page_size: int, engine: str, steps: Steps, monkeypatch: pytest.MonkeyPatch,
    in_fp8: bool = False,
) -> set[Key]:  # fmt: skip
    """Check that steps launch only kernels that warm-up launched, and return their keys."""
    with recorded_keys(monkeypatch) as warm:
        _warm_up(impls, page_size, engine, CPU, in_fp8)
    with recorded_keys(monkeypatch) as served:
        run_steps(impls, page_size, steps, CPU, in_fp8)
    assert served <= warm
    return served


def _warm_up(
    impls: Sequence[SparsePrefillImpl], page_size: int, engine: str, device: torch.device, in_fp8: bool
) -> None:
    for impl in impls if in_fp8 else ():
        impl.out_dtype = torch.bfloat16
    spec = make_spec(page_size, torch.uint8 if in_fp8 else DTYPE)
    warm_up(impls, spec, device, engine, TOKENS_FIRST)


def check_compilations(impls: Sequence[SparsePrefillImpl], engine: str, in_fp8: bool = False) -> None:
    device = torch.device("cuda", 0)
    with set_current_vllm_config(VllmConfig()):  # FlashAttention's backend reads the cache's layout from it
        _warm_up(impls, 128, engine, device, in_fp8)
    before = dict(compile_monitor.listener().counts)
    assert before["warmup"] > 0
    run_steps(impls, 128, random_steps(seed=1, number=40), device, in_fp8)
    torch.cuda.synchronize()
    assert compile_monitor.listener().counts == before


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "portable"])
@pytest.mark.parametrize(
    ("method", "params", "in_fp8"), [(*case, False) for case in CASES] + [(*case, True) for case in IN_FP8], ids=str
)
def test_nothing_compiles_after_warm_up(method: str, params: dict[str, Any], in_fp8: bool, engine: str) -> None:
    impls = make_impls(method, params, torch.device("cuda", 0), engine)
    check_compilations(impls, engine, in_fp8)
    assert not in_fp8 or {impl.layer.engine.name for impl in impls} == {"flash" if engine == "auto" else engine}


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "flash", "portable"])
@pytest.mark.parametrize("method", ["sale", "vertical_slash"])
def test_nothing_compiles_for_sinks_after_warm_up(method: str, engine: str) -> None:
    impls = make_impls(method, {}, torch.device("cuda", 0), engine)
    impls[1].sinks = torch.randn(SHAPE.num_heads, dtype=DTYPE, device="cuda")
    check_compilations(impls, engine)


class TestListener:
    @pytest.fixture
    def heard(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """Return the events that a listener receives that was installed before ours."""
        from triton import knobs

        events: list[dict[str, Any]] = []
        monkeypatch.setattr(knobs.compilation, "listener", lambda **event: events.append(event))
        return events

    def test_kernels_of_this_project_are_counted_by_when(self, heard: list[dict[str, Any]], lines: list[str]) -> None:
        """The listener's place and arguments differ between releases of Triton."""

        def compile_for_hopper(module: str) -> None:
            kernel = JITFunction(store_kernel)
            kernel.module = module
            triton.compile(ASTSource(fn=kernel, signature={"out": "*i32", "n": "i32"}), target=HOPPER)

        assert compile_monitor.listener().counts == {"warmup": 0, "serving": 0}
        assert compile_monitor.listener() is compile_monitor.listener()
        with compile_monitor.warming_up():
            compile_for_hopper("vllm_sparse_kernels.some")
        compile_for_hopper("vllm.something")
        assert compile_monitor.listener().counts == {"warmup": 1, "serving": 0}
        assert not lines
        compile_for_hopper("vllm_sparse_kernels.some")
        assert compile_monitor.listener().counts == {"warmup": 1, "serving": 1}
        assert lines == [
            "sparse-prefill: kernel store_kernel was compiled while serving, after warm-up; please report this"
        ]
        assert len(heard) == 3


def store_kernel(out, n):
    tl.store(out, n)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3), (1, 0, 2, 3)])
def test_the_trials_cache_lies_as_the_servers_will(order: tuple[int, ...]) -> None:
    spec = make_spec(16)
    heads, head_dim = SHAPE.num_kv_heads, SHAPE.head_dim
    cache = compat.random_cache(spec, 3, torch.device("cpu"), order)
    assert cache.keys.shape == cache.values.shape == (3, 16, heads, head_dim)
    whole = torch.empty([(3, heads, 16, 2 * head_dim)[i] for i in order]).permute([order.index(i) for i in range(4)])
    page, head, token, _ = whole.stride()
    assert cache.strides == (page, token, head)
    assert not bool(cache.keys.isnan().any())


def test_pages_that_are_padded_to_those_of_other_layers_are_in_the_trial() -> None:
    spec = replace(make_spec(16), page_size_padded=3 * make_spec(16).page_size_bytes)
    plain, padded = (
        compat.random_cache(layout, 3, torch.device("cpu"), TOKENS_FIRST) for layout in (make_spec(16), spec)
    )
    assert padded.strides == (3 * plain.strides[0], *plain.strides[1:])


def test_the_order_is_vllms() -> None:
    config = VllmConfig()
    for layout, order in (("LBNHC", TOKENS_FIRST), ("LBHNC", (0, 1, 2, 3))):
        config.cache_config.kv_cache_layout = layout
        assert compat.page_order(config) == order


def test_kernels_are_tested_with_every_layout_of_vllms() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    of_kernels = {"LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"}  # tests/kernels/attention/test_engines.py
    assert set(KVCacheLayout.__members__) <= of_kernels
