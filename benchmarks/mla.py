# SPDX-License-Identifier: Apache-2.0
"""Measure prefill with multi-head latent attention (MLA) on a single card: attention's share, and sparse against stock.

    python -m benchmarks.mla measure [--shape deepseek-r1] [--budget-s 300] [--out docs/results/cards.json] \
        [--logs build/mla]
    python -m benchmarks.mla compare [--shape deepseek-r1] [--budget-s 380] [--out docs/results/cards.json] \
        [--logs build/mla]

`measure` times the parts of stock vLLM's prefill. docs/mla.md says why: attention's share limits the TTFT speed-up of a
sparse method. This backend does not take part.

`compare` runs stock vLLM and this package's prefill backend with `a_shape` and with `top_p`. Their engines run at the
same time, and get the same prompts in turn. TTFT is the time of a prompt with one new token. Exact requests must give
stock's tokens. Weights are random, so densities are not those of a real model.

Two shapes: one GPU's part of DeepSeek-R1 (16 of 128 heads) and of Kimi-K2 (8 of 64 heads), each divided among eight
GPUs. A model has four layers with random weights. Prompts have 65,536 and 131,072 tokens, in chunks of 8,192. All
feed-forward layers are dense, and as wide as one GPU's part of the experts that a token activates, so they need no MoE
kernels.

CUDA events measure these times on the device:

* `run_prefill_new_tokens` and `run_prefill_context_chunk`, where a sparse method would save time;
* `forward_mha` around them: gathering, up-projection, concatenation and merging, which stay dense;
* the attention block, the feed-forward layer and the layer around those.

The shares of all 61 layers are calculated: the time of a layer 61 times, and the time outside of layers once. Released
weights are in fp8. A second calculation takes the layer's matrix products at the fp8 rate of a large product on the
same card. MoE kernels are slower than dense layers, and communication between GPUs is left out. Both overstate the
share, so the speed-ups are upper bounds.

Each shape runs in a separate process, and its rows are written after each prompt. If a shape fails, the reason is
printed, the other shape runs, and the exit code is 1.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import Report
from benchmarks.hybrid import ROOT, prompts_of, reason_in
from vllm_sparse_backend.evaluation.vllm_server import CPU_ENV, OFFLINE, device_name, has_cuda

GPUS = 8
"""Number of GPUs that divide a real model's heads and experts among them."""

CHUNK_TOKENS = 8192
MODEL_LAYERS = 61
SHAPES = {"deepseek-r1": 128, "kimi-k2": 64}
"""Heads of each model. Both have 61 layers, the same widths, and nine experts of 2,048 for a token."""

NEW, CONTEXT = "run_prefill_new_tokens", "run_prefill_context_chunk"
MHA, BLOCK, FEED_FORWARD, LAYER = "forward_mha", "attention block", "feed-forward layer", "layer"
PARTS_OF_MHA = ("gathering", "up-projection", "concatenation", "merging")

KEPT_PAIRS, SELECTION = 0.25, 0.2
"""Example of docs/mla.md: the share of pairs that a method keeps, and the cost of selection relative to attention's."""

SETTINGS: dict[str, dict[str, Any]] = {
    "a_shape": {"method": "a_shape", "min_tokens": CHUNK_TOKENS, "min_query_tokens": 1},
    "top_p": {"method": "top_p", "min_tokens": CHUNK_TOKENS, "min_query_tokens": 1},
}
"""Settings of the engines that `compare` runs next to stock vLLM's."""

STOCK = "stock"
EXACT_TOKENS = 8
"""New tokens of a request whose tokens are compared."""

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


def config_of(shape: str, tokens: int, small: bool) -> dict[str, Any]:
    """Return the config of one GPU's part of a model, with few layers, for prompts of up to ``tokens``."""
    heads = SHAPES[shape] // GPUS
    sizes: dict[str, Any] = {
        "hidden_size": 7168, "intermediate_size": 9 * 2048 // GPUS, "num_hidden_layers": 4,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 1536, "vocab_size": 16384,
    }  # fmt: skip
    if small:
        sizes |= {
            "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "q_lora_rank": 64, "vocab_size": 512,
        }  # fmt: skip
    # Scaled rotary positions (yarn) take many small kernels without FlashInfer. These take a single kernel.
    rotary = {"rope_type": "default", "rope_theta": 10000.0}
    return sizes | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_parameters": rotary,
        "max_position_embeddings": tokens + 1024, "n_routed_experts": 0,
        "first_k_dense_replace": sizes["num_hidden_layers"], "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "dtype": "bfloat16",
    }  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one layer for a prompt on one GPU."""

    attention: float
    linear: float
    """Operations of all matrix products, including the up-projections of context."""

    @classmethod
    def of(cls, config: Mapping[str, Any], tokens: int, chunk_tokens: int) -> "Work":
        """Count the operations of a prompt of ``tokens`` that runs in chunks of ``chunk_tokens``.

        Every chunk projects its whole context up again.
        """
        hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
        keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        values = config["v_head_dim"]
        weights = (
            hidden * (config["q_lora_rank"] + latent + config["qk_rope_head_dim"])
            + config["q_lora_rank"] * heads * keys
            + heads * values * hidden
            + 3 * hidden * config["intermediate_size"]
        )
        up_projection = latent * heads * (config["qk_nope_head_dim"] + values)
        projected = tokens + sum(range(0, tokens, chunk_tokens))
        pairs = tokens * (tokens + 1) / 2
        return cls(2.0 * (keys + values) * heads * pairs, 2.0 * (weights * tokens + up_projection * projected))


@dataclass(frozen=True)
class Prefill:
    """Seconds of a prompt: TTFT, and the time in parts of the layers, summed over all layers and chunks."""

    ttft_s: float
    spans: Mapping[str, float]
    layers: int

    @classmethod
    def median_of(cls, parts: Sequence[Mapping[str, Any]]) -> "Prefill":
        """Return the median of every time over the prompts."""
        names = parts[0]["spans"]
        spans = {name: median(part["spans"][name] for part in parts) for name in names}
        return cls(median(part["seconds"] for part in parts), spans, parts[0]["layers"])

    @property
    def attention_s(self) -> float:
        """Seconds in ``run_prefill_*``."""
        return self.spans[NEW] + self.spans.get(CONTEXT, 0.0)

    def with_layers(self, layers: int) -> "Prefill":
        """Return the times of a model with more layers. The time outside of layers does not change."""
        factor = layers / self.layers
        spans = {name: seconds * factor for name, seconds in self.spans.items()}
        return Prefill(self.ttft_s - self.spans[LAYER] + spans[LAYER], spans, layers)

    def with_faster_products(self, work: Work, measured_flops: float, faster_flops: float) -> "Prefill":
        """Return the times if all matrix products ran at ``faster_flops`` instead of ``measured_flops``."""
        saved = self.layers * work.linear * (1 / measured_flops - 1 / faster_flops)
        return Prefill(self.ttft_s - saved, self.spans, self.layers)

    @property
    def attention_share(self) -> float:
        """Share of TTFT in ``run_prefill_*``."""
        return self.attention_s / self.ttft_s

    def speed_up(self, cost: float) -> float:
        """Return the TTFT speed-up if ``run_prefill_*`` took ``cost`` times its time."""
        return 1 / (1 - self.attention_share * (1 - cost))


class SpanTimer:
    """Times of functions and modules, by CUDA events that are read only after a prompt. On a CPU, by its clock."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self._spans: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        """Return a point in time of the current stream."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function of a class or module by a function that also records its time as ``name``."""
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.mark()
            result = function(*args, **kwargs)
            self._spans.append((name, start, self.mark()))
            return result

        setattr(owner, attribute, timed)

    def watch(self, module: torch.nn.Module, name: str) -> None:
        """Record the time of every call of a module as ``name``."""
        starts: list[Any] = []
        module.register_forward_pre_hook(lambda *_: starts.append(self.mark()))
        module.register_forward_hook(lambda *_: self._spans.append((name, starts.pop(), self.mark())))

    def read(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds and the number of calls by name since the last reading. Waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        for name, start, end in self._spans:
            seconds[name] += start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
            calls[name] += 1
        self._spans.clear()
        return dict(seconds), dict(calls)


def watch_prefill(model: torch.nn.Module, timer: SpanTimer) -> dict[str, str]:
    """Record the times of a model's layers and of vLLM's prefill. Return the names of the backends.

    Raises:
        RuntimeError: If the model has no MLA layers, so nothing would be measured.
    """
    from vllm.model_executor.layers.attention import mla_attention

    layers = [layer for layer in model.modules() if type(layer).__name__.endswith("DecoderLayer")]
    attention = [module for module in model.modules() if isinstance(module, mla_attention.MLAAttention)]
    if not layers or len(layers) != len(attention):
        raise RuntimeError(
            f"{type(model).__name__}: given {len(layers)} decoder layers and {len(attention)} MLAAttention modules, "
            "expected one MLAAttention in every layer; check whether this vLLM still runs DeepSeek-V3 with MLA"
        )
    for layer in layers:
        timer.watch(layer, LAYER)
        timer.watch(layer.self_attn, BLOCK)  # type: ignore[arg-type]
        timer.watch(layer.mlp, FEED_FORWARD)  # type: ignore[arg-type]
    for module in attention:
        timer.watch(module.kv_b_proj, "up-projection")
    backend, impl = type(attention[0].prefill_backend), type(attention[0].impl)
    timer.wrap(backend, NEW, NEW)
    timer.wrap(backend, CONTEXT, CONTEXT)
    timer.wrap(impl, MHA, MHA)
    timer.wrap(impl, "_concat_k_nope_k_pe", "concatenation")
    timer.wrap(mla_attention.ops, "gather_and_maybe_dequant_cache", "gathering")
    timer.wrap(mla_attention, "merge_attn_states", "merging")
    prefill_backend: Any = attention[0].prefill_backend
    version = getattr(prefill_backend, "vllm_flash_attn_version", None)
    name = prefill_backend.get_name() + (f", FlashAttention {version}" if version else "")
    return {"prefill": name, "decode": attention[0].attn_backend.get_name()}


def check_calls(calls: Mapping[str, int], layers: int, chunks: int) -> None:
    """Check that every chunk of every layer was measured.

    Raises:
        RuntimeError: If a part did not run the expected number of times.
    """
    expected = dict.fromkeys((NEW, MHA, BLOCK, LAYER), layers * chunks)
    wrong = [f"{calls.get(name, 0)} of {name}" for name, count in expected.items() if calls.get(name, 0) != count]
    if chunks > 1 and calls.get(CONTEXT, 0) < layers * (chunks - 1):
        wrong.append(f"{calls.get(CONTEXT, 0)} of {CONTEXT}")
    if wrong:
        raise RuntimeError(
            f"calls during a prompt: given {', '.join(wrong)}, expected {layers * chunks} of each, and at least "
            f"{layers * (chunks - 1)} of {CONTEXT} ({layers} layers, {chunks} chunks); either vLLM's chunks do not "
            "follow --max-num-batched-tokens, or vLLM calls these functions in another way"
        )


def matmul_flops(config: Mapping[str, Any], tokens: int, dtype: torch.dtype, timer: SpanTimer) -> float:
    """Return the operations per second of the first product of the feed-forward layer, for ``tokens``."""
    device = "cuda" if timer.on_cuda else "cpu"
    hidden, width = config["hidden_size"], 2 * config["intermediate_size"]
    inputs = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).to(dtype)
    weights = torch.randn(width, hidden, device=device, dtype=torch.bfloat16).to(dtype).t()
    scale = torch.ones((), device=device)

    def multiply() -> None:
        if dtype == torch.bfloat16:
            torch.mm(inputs, weights)
        else:
            torch._scaled_mm(inputs, weights, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    rounds = 50 if timer.on_cuda else 2
    for _ in range(rounds // 2):
        multiply()
    start = timer.mark()
    for _ in range(rounds):
        multiply()
    end = timer.mark()
    if timer.on_cuda:
        torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1e3 if timer.on_cuda else end - start
    return 2.0 * tokens * hidden * width * rounds / seconds


@app.command(hidden=True)
def engine(
    folder: Annotated[Path, typer.Argument(help="Model folder.")],
    tokens: Annotated[str, typer.Argument(help="Lengths of the prompts, separated by commas.")],
    repeats: Annotated[int, typer.Argument(help="Prompts of each length that are timed.")],
    backend: Annotated[str, typer.Argument(help="vLLM's --attention-backend; empty for vLLM's choice.")] = "",
) -> None:
    """Run an engine. Output lines that begin with {"mla" contain the results as JSON."""
    begin = time.monotonic()
    lengths = [int(length) for length in tokens.split(",")]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    options = {"attention_backend": backend} if backend else {}
    llm, chunk_tokens = make_llm(folder, max(lengths), 0.6, **options)
    from vllm import SamplingParams, TokensPrompt

    timer = SpanTimer(has_cuda())
    backends = llm.apply_model(lambda model: watch_prefill(model, timer))[0]
    _print_part("start", seconds=time.monotonic() - begin, chunk_tokens=chunk_tokens, **backends)

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    layers = config["num_hidden_layers"]
    for length in lengths:
        prompts = prompts_of(folder, [length] * (repeats + 1), length)
        for i, prompt in enumerate(prompts):  # the first prompt is a warm-up
            timer.read()
            start = time.monotonic()
            llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
            seconds = time.monotonic() - start
            spans, calls = timer.read()
            check_calls(calls, layers, -(-length // chunk_tokens))
            if i:
                _print_part("prompt", tokens=length, seconds=seconds, spans=spans, calls=calls, layers=layers)
        if length == lengths[0]:
            _print_rates(config, min(CHUNK_TOKENS, length), timer)


def make_llm(folder: Path, longest: int, memory_share: float, **options: Any) -> tuple[Any, int]:
    """Return an engine in this process for prompts of up to ``longest`` tokens, and the tokens of its chunks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # functions of the worker are called in this process
    os.environ.update(OFFLINE)
    from vllm import LLM

    on_cuda = has_cuda()
    # The reference backend of a CPU runs every prompt as a single chunk.
    chunk_tokens = CHUNK_TOKENS if on_cuda else longest + 512
    llm = LLM(
        str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", seed=0, enforce_eager=True,
        max_num_seqs=4, max_model_len=longest + 512, max_num_batched_tokens=chunk_tokens,
        enable_prefix_caching=False, gpu_memory_utilization=memory_share if on_cuda else 0.3, **options,
    )  # fmt: skip
    return llm, chunk_tokens


@app.command(hidden=True)
def answer(
    folder: Annotated[Path, typer.Argument(help="Model folder.")],
    longest: Annotated[int, typer.Argument(help="Length of the longest prompt.")],
    settings: Annotated[str, typer.Argument(help="This package's settings as JSON; empty for stock vLLM.")] = "",
) -> None:
    """Answer prompts: each line of the input is a request as JSON, and each answer a line like those of `engine`."""
    options: dict[str, Any] = {}
    if settings:
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # LLM reads attention_config before it loads plugins
        options["attention_config"] = {"mla_prefill_backend": "sparse-prefill"}
        options["additional_config"] = {"sparse_prefill": json.loads(settings)}
    llm, _ = make_llm(folder, longest, 0.25, **options)
    from vllm import SamplingParams, TokensPrompt

    _print_part("start")
    for line in sys.stdin:
        request = json.loads(line)
        (prompt,) = prompts_of(folder, [request["tokens"]], request["seed"])
        sampling = SamplingParams(
            temperature=0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False,
            extra_args={"sparse_prefill": 0} if settings and request["exact"] else None,
        )  # fmt: skip
        start = time.monotonic()
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        seconds = time.monotonic() - start
        kept, causal = _counted_pairs(llm) if settings else (0.0, 0.0)
        token_ids = list(output.outputs[0].token_ids)
        _print_part("answer", seconds=seconds, token_ids=token_ids, kept_pairs=kept, causal_pairs=causal)


def _counted_pairs(llm: Any) -> tuple[float, float]:
    """Return the kept and causal pairs that the engine has counted. Waits for the device."""
    from vllm_sparse_backend.serving.worker.model_layers import adopted_worker

    worker = adopted_worker(llm.llm_engine.vllm_config)
    if worker is None:
        raise RuntimeError("no layer runs sparse: given this package's settings, expected a prefill backend of its own")
    worker.recorder.samples()  # begins a copy, unless an earlier one has not been read
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    worker.recorder.samples()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    samples, _ = worker.recorder.samples(start=False)
    kept, causal = (sum(value for name, _, value in samples if name == f"{kind}_pairs") for kind in ("kept", "causal"))
    return kept, causal


def _print_rates(config: Mapping[str, Any], tokens: int, timer: SpanTimer) -> None:
    rates = {"bf16": matmul_flops(config, tokens, torch.bfloat16, timer)}
    if timer.on_cuda:
        try:
            rates["fp8"] = matmul_flops(config, tokens, torch.float8_e4m3fn, timer)
        except (RuntimeError, NotImplementedError) as error:  # the bf16 rows do not need it
            print(f"no fp8 rate: torch._scaled_mm failed: {error}", flush=True)
    _print_part("rates", **rates)


def _print_part(part: str, **values: Any) -> None:
    print(json.dumps({"mla": part, **values}), flush=True)


def check_shapes(names: Sequence[str]) -> None:
    """Refuse names that are not in ``SHAPES``."""
    if unknown := set(names) - set(SHAPES):
        raise typer.BadParameter(f"--shape: given {', '.join(sorted(unknown))}, expected {' or '.join(SHAPES)}")


def make_folder(place: Path, name: str, tokens: int, small: bool) -> tuple[Path, dict[str, Any]]:
    """Write a shape's config into a new folder. Return the folder and the config."""
    folder, config = place / name, config_of(name, tokens, small)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder, config


@app.command()
def measure(
    shape: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(SHAPES)}. Default: both.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Lengths of the prompts. Default: 65536 and 131072.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length that are timed, after a warm-up.")] = 3,
    backend: Annotated[
        str, typer.Option(help="vLLM's --attention-backend, which decodes. Default: vLLM's choice.")
    ] = "",
    budget_s: Annotated[float, typer.Option(help="Seconds for everything together.")] = 300.0,
    out: Annotated[Path | None, typer.Option(help="Results file to write.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder for the engines' logs.")] = ROOT / "build/mla",
    small: Annotated[bool, typer.Option(help="A small model and short prompts, to try this program on a CPU.")] = False,
) -> None:
    """Measure stock vLLM with each shape."""
    check_shapes(shape or ())
    lengths = sorted(tokens or ([256, 512] if small else [65536, 131072]))
    end, problems = time.monotonic() + budget_s, []
    logs.mkdir(parents=True, exist_ok=True)
    report = Report("mla", device_name(), None, out)
    with TemporaryDirectory() as place:
        for name in shape or SHAPES:
            folder, config = make_folder(Path(place), name, lengths[-1], small)
            rows = Rows(report, name, config)
            log = logs / f"{name}.log"
            arguments = [str(folder), ",".join(map(str, lengths)), str(repeats), backend]
            problem = run_engine(arguments, log, end - time.monotonic(), rows.add)
            if problem is not None:
                problems.append(f"{name}: {problem}; its log: {log}")
                print(problems[-1], flush=True)
    for figure in report.figures.values():
        print(f"{figure['name']}: {figure['value']} {figure['unit']}", flush=True)
    raise typer.Exit(1 if problems else 0)


@app.command()
def compare(
    shape: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(SHAPES)}. Default: both.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Lengths of the prompts. Default: 16384, 65536 and 131072.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length that are timed, after a warm-up.")] = 3,
    budget_s: Annotated[float, typer.Option(help="Seconds for everything together.")] = 380.0,
    out: Annotated[Path | None, typer.Option(help="Results file to write.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder for the engines' logs.")] = ROOT / "build/mla",
    small: Annotated[bool, typer.Option(help="A small model and short prompts, to try this program on a CPU.")] = False,
) -> None:
    """Compare TTFT of stock vLLM and of sparse MLA prefill with each shape."""
    check_shapes(shape or ())
    lengths = sorted(tokens or ([256, 512] if small else [16384, 65536, 131072]))
    settings = {name: values | ({"min_tokens": 64} if small else {}) for name, values in SETTINGS.items()}
    end, problems = time.monotonic() + budget_s, []
    logs.mkdir(parents=True, exist_ok=True)
    report = Report("mla", device_name(), None, out)
    with TemporaryDirectory() as place:
        for name in shape or SHAPES:
            folder, config = make_folder(Path(place), name, lengths[-1], small)
            about = f"{name}'s shape, {config['num_attention_heads']} heads"
            engines = {
                kind: Answerer(folder, lengths[-1], settings.get(kind), logs / f"{name}-{kind}.log", end)
                for kind in (STOCK, *settings)
            }
            try:
                for engine_of_kind in engines.values():  # one after another: each measures the card's free memory
                    engine_of_kind.start()
                for length in lengths:
                    _compare_length(report, about, config["num_hidden_layers"], engines, length, repeats)
            except AnswererError as error:
                problems.append(f"{name}: {error}")
                print(problems[-1], flush=True)
            finally:
                for engine_of_kind in engines.values():
                    engine_of_kind.stop()
    for figure in report.figures.values():
        print(f"{figure['name']}: {figure['value']} {figure['unit']}", flush=True)
    raise typer.Exit(1 if problems else 0)


def _compare_length(
    report: Report, about: str, layers: int, engines: Mapping[str, "Answerer"], length: int, repeats: int
) -> None:
    """Compare the engines for prompts of a length, and add the figures."""
    about = f"{about}, {length:,} tokens"
    exact = {
        kind: server.ask(length, seed=length, new_tokens=EXACT_TOKENS, exact=True) for kind, server in engines.items()
    }
    for kind in engines.keys() - {STOCK}:
        are_equal = exact[kind]["token_ids"] == exact[STOCK]["token_ids"]
        report.add_figure(f"{about}: {kind}, exact requests with stock's tokens", float(are_equal), "share", "higher")
    seconds: dict[str, list[float]] = defaultdict(list)
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for round_number in range(repeats + 1):  # the first is a warm-up
        for kind, server in engines.items():
            part = server.ask(length, seed=length + round_number, new_tokens=1, exact=False)
            pairs[kind].append((part["kept_pairs"], part["causal_pairs"]))
            if round_number:
                seconds[kind].append(part["seconds"])
    for kind, times in seconds.items():
        report.add_figure(f"{about}: {kind}, TTFT of {layers} layers", median(times), "s", "lower")
        if kind != STOCK:
            speed_up = median(seconds[STOCK]) / median(times)
            report.add_figure(f"{about}: {kind}, TTFT speed-up of {layers} layers", speed_up, "ratio", "higher")
            kept, causal = (after - before for before, after in zip(pairs[kind][0], pairs[kind][-1], strict=True))
            if causal:
                report.add_figure(f"{about}: {kind}, kept share of sparse rows' pairs", kept / causal, "share", "lower")


class AnswererError(RuntimeError):
    """An engine has ended, or the budget is used up."""


class Answerer:
    """An engine in a process of its own that answers one prompt after another."""

    def __init__(self, folder: Path, longest: int, settings: Mapping[str, Any] | None, log: Path, end: float) -> None:
        self.log, self._end = log, end
        self._arguments = ["answer", str(folder), str(longest), json.dumps(settings) if settings else ""]
        self._process: subprocess.Popen[str] | None = None
        self._parts: queue.Queue[Mapping[str, Any] | None] = queue.Queue()

    def start(self) -> None:
        """Start the process, and wait until its engine is ready."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mla", *self._arguments], cwd=ROOT, env=engine_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        self._next_part()

    def ask(self, tokens: int, seed: int, new_tokens: int, exact: bool) -> Mapping[str, Any]:
        """Return the answer to a random prompt of ``tokens``."""
        assert self._process is not None
        assert self._process.stdin is not None
        request = {"tokens": tokens, "seed": seed, "new_tokens": new_tokens, "exact": exact}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended, and _next_part says why
        return self._next_part()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        with self.log.open("w", encoding="utf-8") as file:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                if line.startswith('{"mla"') and line.endswith("\n"):
                    self._parts.put(json.loads(line))
        self._parts.put(None)

    def _next_part(self) -> Mapping[str, Any]:
        try:
            part = self._parts.get(timeout=max(self._end - time.monotonic(), 0.01))
        except queue.Empty:
            raise AnswererError(f"stopped, because the budget (--budget-s) was used up; its log: {self.log}") from None
        if part is None:
            reason = reason_in(self.log.read_text(encoding="utf-8"))
            raise AnswererError(f"an engine ended: {reason}; its log: {self.log}")
        return part


def engine_environment() -> dict[str, str]:
    """Return the environment of the engines' processes."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")]
    return env | {"PYTHONPATH": os.pathsep.join(paths)} | ({} if has_cuda() else CPU_ENV)


def run_engine(
    arguments: Sequence[str], log: Path, limit_s: float, on_part: Callable[[Mapping[str, Any]], None]
) -> str | None:
    """Run an engine in a process, and pass on each part of its results at once. Return the reason if it failed."""
    if limit_s <= 0:
        return "not started, because the budget (--budget-s) is used up"
    env = engine_environment()
    command = [sys.executable, "-m", "benchmarks.mla", "engine", *arguments]
    stopped = threading.Event()
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):

        def stop() -> None:
            stopped.set()
            process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                if line.startswith('{"mla"') and line.endswith("\n"):  # an incomplete line: the process was stopped
                    on_part(json.loads(line))
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()  # if on_part failed; otherwise the process has ended
    if stopped.is_set():
        return f"stopped after {limit_s:.0f} s, when the budget (--budget-s) was used up"
    return f"ended with {code}: {reason_in(log.read_text(encoding='utf-8'))}" if code else None


class Rows:
    """Adds the figures of a shape to a report, part by part, while its engine runs."""

    def __init__(self, report: Report, shape: str, config: Mapping[str, Any]) -> None:
        self.report, self.config = report, config
        self.about = f"{shape}'s shape, {config['num_attention_heads']} heads"
        self.rates: dict[str, float] = {}
        self.chunk_tokens = CHUNK_TOKENS
        self.prompts: dict[int, list[Mapping[str, Any]]] = defaultdict(list)

    def add(self, part: Mapping[str, Any]) -> None:
        """Add the figures of a part, and replace the medians that it changes."""
        print(f"{self.about}: {json.dumps(part)}", flush=True)
        match part["mla"]:
            case "start":
                self.chunk_tokens = part["chunk_tokens"]
            case "rates":
                self.rates = {name: rate for name, rate in part.items() if name != "mla"}
                for name, rate in self.rates.items():
                    self.report.add_figure(f"{self.about}: large matrix product in {name}", rate, "FLOP/s", "higher")
                for tokens in self.prompts:
                    self._add_shares(tokens)
            case "prompt":
                self.prompts[part["tokens"]].append(part)
                self._add_times(part["tokens"])
                self._add_shares(part["tokens"])

    def _add_times(self, tokens: int) -> None:
        about = f"{self.about}, {tokens:,} tokens"
        times = Prefill.median_of(self.prompts[tokens])
        spans, layers = times.spans, times.layers
        rows = {
            "run_prefill_*": times.attention_s,
            "forward_mha without run_prefill_*": spans[MHA] - times.attention_s,
            **{f"forward_mha, {part}": spans[part] for part in PARTS_OF_MHA if part in spans},
            "attention block without forward_mha": spans[BLOCK] - spans[MHA],
            "feed-forward layer": spans[FEED_FORWARD],
            "layer": spans[LAYER],
        }
        for what, seconds in rows.items():
            self.report.add_figure(f"{about}: {what}, time per layer", seconds / layers, "s", "lower")
        self.report.add_figure(f"{about}: stock, TTFT of {layers} layers", times.ttft_s, "s", "lower")
        covered = spans[LAYER] / times.ttft_s
        self.report.add_figure(f"{about}: layers' share of this TTFT", covered, "share", "higher")
        share = times.attention_s / spans[MHA]
        self.report.add_figure(f"{about}: run_prefill_*'s share of forward_mha", share, "share", "higher")
        rate = Work.of(self.config, tokens, self.chunk_tokens).attention * layers / times.attention_s
        self.report.add_figure(f"{about}: run_prefill_*'s rate", rate, "FLOP/s", "higher")

    def _add_shares(self, tokens: int) -> None:
        """Add the shares and speed-ups of the whole model, calculated from the measured layers."""
        about = f"{self.about}, {tokens:,} tokens: {MODEL_LAYERS} layers, calculated"
        whole = {"bf16": Prefill.median_of(self.prompts[tokens]).with_layers(MODEL_LAYERS)}
        if "fp8" in self.rates:
            work = Work.of(self.config, tokens, self.chunk_tokens)
            whole["fp8"] = whole["bf16"].with_faster_products(work, self.rates["bf16"], self.rates["fp8"])
        for name, times in whole.items():
            end = f"matrix products in {name}"
            self.report.add_figure(
                f"{about}: run_prefill_*'s share of TTFT, {end}", times.attention_share, "share", "higher"
            )
            self.report.add_figure(f"{about}: highest TTFT speed-up, {end}", times.speed_up(0), "ratio", "higher")
            example = f"TTFT speed-up with {KEPT_PAIRS:g} of the pairs and selection at {SELECTION:g}"
            speed_up = times.speed_up(KEPT_PAIRS + SELECTION)
            self.report.add_figure(f"{about}: {example}, {end}", speed_up, "ratio", "higher")


if __name__ == "__main__":
    app()
