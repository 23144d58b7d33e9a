# SPDX-License-Identifier: Apache-2.0
"""Measures host time that this backend adds to a step of decodes, and the host time of sparse layers. Needs no GPU.

    python -m benchmarks.host_time decodes [--rows 64]
    python -m benchmarks.host_time prefill [--heads 9,3,64] [--method NAME:FIELD=VALUE]

A GPU waits for the host if a layer's kernels take less time than the host needs to launch them, as in small models.

``decodes`` times every function of this package that runs in each step of decodes, around functions of vLLM that do
nothing. Under full CUDA graphs a layer's ``forward`` does not run.

``prefill`` runs a chunk through all layers of a model on the engine for Hopper, on a card that runs nothing
(``null_card``): Triton's launcher runs, but CUDA's driver and the kernels do not.

Times are CPU times of one thread, and the minimum over repetitions, because other programs may share the machine.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from vllm.config import AttentionConfig, CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from benchmarks.attention_prompts import Heads
from benchmarks.method_specs import MethodSpec
from benchmarks.null_card import null_card
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.evaluation.report import table_of
from vllm_sparse_backend.plugin import register
from vllm_sparse_backend.serving import compat, hooks
from vllm_sparse_backend.serving.worker.arena import Arena, SparseRow, kernel_rows
from vllm_sparse_backend.serving.worker.counters import Recorder
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.owner import LayerLevel, Worker
from vllm_sparse_backend.serving.worker.rows import Slab, SparseStep, Step
from vllm_sparse_kernels.attention import engine as attention_engine
from vllm_sparse_kernels.attention.hopper.engine import HOPPER
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.methods.top_p import method as top_p

PAGE_TOKENS = 128
ARENA_BYTES = 1 << 30
REPETITIONS = 20
CALLS = 2000
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "dtype": "float32",
}  # fmt: skip
CPU, META = torch.device("cpu"), torch.device("meta")

app = typer.Typer(add_completion=False, help=__doc__)


def cpu_us(function: Callable[[], object], calls: int, repetitions: int = REPETITIONS) -> float:
    """Return the CPU time of a call in µs: the minimum over repetitions of the mean over calls."""
    means = []
    for _ in range(repetitions):
        began = time.process_time()
        for _ in range(calls):
            function()
        means.append((time.process_time() - began) / calls)
    return min(means) * 1e6


# --- a step of decodes ---


def nothing(*_: object, **__: object) -> None:
    """Replace a function of vLLM."""


def vllm_config(folder: Path) -> VllmConfig:
    """Return the configuration of a server of a small model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    register()
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float32"),
        cache_config=CacheConfig(block_size=PAGE_TOKENS),
        attention_config=AttentionConfig(backend="sparse-prefill"),
        additional_config={"sparse_prefill": {"min_tokens": 128}},
    )


def vllm_layer(config: VllmConfig, number: int) -> Attention:
    """Return an attention layer as models make it."""
    heads, head_dim, kv_heads = (MODEL[name] for name in ("num_attention_heads", "head_dim", "num_key_value_heads"))
    with set_current_vllm_config(config):
        name, scale = f"model.layers.{number}.self_attn.attn", head_dim**-0.5
        return Attention(heads, head_dim, scale, kv_heads, cache_config=config.cache_config, prefix=name)


def decoding_rows(num_rows: int) -> CommonAttentionMetadata:
    """Return the metadata that vLLM's runner passes to builders, for decodes after 500 tokens."""
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    seq_lens = torch.full((num_rows,), 501, dtype=torch.int32)
    pages = -(-501 // PAGE_TOKENS)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=seq_lens,
        num_reqs=num_rows,
        num_actual_tokens=num_rows,
        max_query_len=1,
        max_seq_len=501,
        block_table_tensor=torch.arange(num_rows * pages, dtype=torch.int32).view(num_rows, pages),
        slot_mapping=torch.arange(num_rows),
        seq_lens_cpu_upper_bound=seq_lens.clone(),
        is_prefilling=torch.zeros(num_rows, dtype=torch.bool),
    )


def decode_parts(num_rows: int, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield each part that this package adds to a step of decodes, and its time in µs."""
    config = vllm_config(folder)
    layers = [vllm_layer(config, number) for number in range(MODEL["num_hidden_layers"])]
    builder_class = layers[0].get_attn_backend().get_builder_cls()
    with patch.object(compat, "tensor_parallel_rank", lambda: 0):  # without process groups
        names = [layer.layer_name for layer in layers]
        worker = Worker(config)
        builder = builder_class(layers[0].get_kv_cache_spec(config), names, config, CPU)
    common = decoding_rows(num_rows)
    scheduled = {f"request-{row}": 1 for row in range(num_rows)}
    worker.requests.step = Step({"request-0": SERVER_LEVEL}, scheduled)
    with patch.object(compat.DenseBuilder, "build", nothing):
        yield "metadata: build", cpu_us(lambda: builder.build(0, common), CALLS)

    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=()))
    output = SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=(), num_scheduled_tokens=scheduled)
    execute_model = hooks.track_requests(nothing, runner, worker)
    yield "requests of the step: execute_model", cpu_us(lambda: execute_model(output), CALLS)

    forward, metadata = layers[0].impl.forward, SimpleNamespace()
    with patch.object(compat.DenseImpl, "forward", nothing):
        layer_us = cpu_us(lambda: forward(layers[0], None, None, None, None, metadata, None), CALLS)
    yield "without full graphs: forward of a layer", layer_us


@app.command()
def decodes(rows: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 1) -> None:
    """Time what this package adds to a step of decodes."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        parts = [{"part": part, "us": round(us, 2)} for part, us in decode_parts(rows, Path(folder) / "model")]
    Console().print(table_of(f"a step of {rows} decodes", {"part": "part", "us": "µs"}, parts))


# --- a sparse layer ---


@dataclass
class Pass:
    """A chunk's pass through all layers of a model, without a GPU."""

    shape: ModelShape
    impls: list[SparsePrefillImpl]
    context_len: int
    """Tokens before the chunk."""
    query_len: int

    @staticmethod
    def of(shape: ModelShape, method: str, context_len: int, query_len: int) -> "Pass":
        """Return the pass of a chunk with a method. Layers of one plan share an object, as on a server."""
        plan = MethodSpec.parse(method).plan(shape) if method else Plan.build(SparsePrefillConfig(), shape)
        recorder = Recorder(CPU)
        recorder.add_layers(range(shape.num_layers))
        recorder.device = META  # counts as on a GPU
        memory = SimpleNamespace(arena=Arena(CPU, torch.empty(ARENA_BYTES, dtype=torch.uint8)))
        resolved = SimpleNamespace(config=SimpleNamespace(check_index=False))
        worker: Any = SimpleNamespace(recorder=recorder, memory=memory, resolved=resolved)
        served: dict[Any, Layer] = {}
        impls = []
        for number, of_layer in enumerate(plan.layers):
            assert of_layer is not None
            if of_layer not in served:
                engines = tuple(group.method.select_engines[0] for group in of_layer.groups)
                layer = Layer.of(of_layer, shape.head_dim, CPU, HOPPER.name)
                served[of_layer] = replace(layer, engine=HOPPER, select_engines=engines, by_kernels=True)
            impl = object.__new__(SparsePrefillImpl)
            impl.head_size, impl.scale, impl.sinks = shape.head_dim, shape.head_dim**-0.5, None
            impl.adopt(number, {ON: LayerLevel(served[of_layer])}, worker)
            impls.append(impl)
        return Pass(shape, impls, context_len, query_len)

    def step(self) -> Callable[[], None]:
        """Return a function that runs one step through all layers, with new rows as in each step of a server."""
        shape, num_pages = self.shape, -(-(self.context_len + self.query_len) // PAGE_TOKENS)
        query = torch.zeros(self.query_len, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
        out = torch.empty_like(query)
        cache = torch.zeros(num_pages, shape.num_kv_heads, PAGE_TOKENS, 2 * shape.head_dim, dtype=torch.bfloat16)
        table = torch.arange(num_pages, dtype=torch.int32)[None]
        layer = torch.nn.Module()

        def run() -> None:
            rows = kernel_rows([SparseRow(0, 0, self.query_len, self.context_len)], table)
            metadata = SimpleNamespace(sparse=SparseStep((Slab(rows),), ()))
            with torch.inference_mode():
                for impl in self.impls:
                    impl.forward(layer, query, None, None, cache, metadata, out)

        return run


@contextmanager
def hopper_paths() -> Iterator[None]:
    """Make the host take the code paths of an H100, with tensors on this machine's CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention_engine, "capability_of", lambda device: (9, 0)))
        stack.enter_context(patch.object(top_p, "stored_dtype", lambda device: torch.float8_e4m3fn))
        stack.enter_context(patch.object(compat, "IS_CPU", False))
        yield


def counted_launches(step: Callable[[], None]) -> Counter[str]:
    """Return how often a step launches each kernel."""
    launches: Counter[str] = Counter()
    launch = JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        launches[self.fn.__name__] += 1
        return launch(self, *args, **options)

    with patch.object(JITFunction, "run", counted):
        step()
    return launches


def counted_operations(step: Callable[[], None]) -> Counter[str]:
    """Return how often a step calls each operation of torch."""
    operations: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations[str(function)] += 1
            return function(*args, **(kwargs or {}))

    with Counting():
        step()
    return operations


@app.command()
def prefill(
    heads: Annotated[str, typer.Option(help="Query heads, kv heads and head_dim.")] = "9,3,64",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 30,
    method: Annotated[str, typer.Option(help="NAME or NAME:FIELD=VALUE,…. Default: the server's default.")] = "",
    context: Annotated[int, typer.Option(min=0, help="Cached tokens before the chunk.")] = 24_576,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the chunk.")] = 8192,
) -> None:
    """Time the host's part of a sparse layer, and count its launches and operations of torch."""
    torch.set_num_threads(1)
    num_heads, num_kv_heads, head_dim = map(int, heads.split(","))
    shape = Heads(num_heads, num_kv_heads, head_dim).model(layers)
    with hopper_paths(), null_card():
        step = Pass.of(shape, method, context, tokens).step()
        step()  # compiles
        launches, operations = counted_launches(step), counted_operations(step)
        total_us = cpu_us(step, 1) / layers
        with patch.object(JITFunction, "run", nothing):
            without_us = cpu_us(step, 1) / layers
        rows = [
            {"what": "host's time, µs", "value": f"{total_us:.0f}"},
            {"what": "of it without launches, µs", "value": f"{without_us:.0f}"},
            {"what": "launches", "value": f"{sum(launches.values()) / layers:.1f}"},
            {"what": "operations of torch", "value": f"{sum(operations.values()) / layers:.1f}"},
        ]
        title = f"a sparse layer with {heads} heads, {tokens:,} tokens after {context:,}"
        Console().print(table_of(title, {"what": "per layer", "value": ""}, rows))


if __name__ == "__main__":
    app()
