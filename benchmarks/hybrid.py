# SPDX-License-Identifier: Apache-2.0
"""Compare TTFT, exact tokens and pages of hybrids with stock vLLM's, with random weights on a single card.

    python -m benchmarks.hybrid measure [--model qwen3-next] [--tokens 65536] [--budget-s 300] \
        [--out docs/results/cards.json] [--logs build/hybrid]

Two shapes: Qwen3-Next's (three gated recurrences, then attention with head_dim 256), and Nemotron-H's (separate layers
of Mamba 2, MLP and attention). Weights are made on the card (``--load-format dummy``). Feed-forward layers of
Qwen3-Next's shape are dense, and as wide as the experts that a token activates, as in the forecast of ``doctor``.

Random weights make attention nearly uniform, so ``top_p`` keeps nearly all of it. Its row shows that the default runs,
and its cost if nothing can be left out. The speed-up is measured with A-shape, whose density does not depend on
weights. A level with a density near zero measures the largest possible speed-up, for comparison with the forecast of
``doctor``.

Stock vLLM runs with ``--block-size 128``, so its pages are as long as this backend's, and its attention sums in the
same order. Exact requests must then give stock's tokens. If they do not, compare their distance with that of a second
stock engine: two engines may tune a kernel differently. Log-probabilities at a density near zero show how much
attention affects these answers. Each engine runs in a separate process, and a model's rows are written when its engines
end. If a model cannot be loaded, its rows are missing, the reason is printed, and the exit code is 1.
"""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
import yaml

from benchmarks.figures import Report
from vllm_sparse_backend.cli.attention_share import PrefillShare, prefill_share
from vllm_sparse_backend.config.model_check import layer_reasons, read_config
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.vllm_server import CPU_ENV, OFFLINE, device_name, has_cuda, root_cause

ROOT = Path(__file__).parents[1]
STOCK, AGAIN, OURS = "stock", "stock again", "ours"
"""Engines. The second stock engine shows how far two equal engines differ: they tune some kernels at start-up."""
DEFAULT, EXACT, A_SHAPE, LEAST = "default", "exact", "a_shape", "least"
LEVELS = {DEFAULT: None, EXACT: 0, A_SHAPE: A_SHAPE, LEAST: LEAST}
"""Levels of this backend's engine, as requests name them; None stands for requests without a level."""

ANSWER_TOKENS = 16
ANSWERED_PROMPTS = (20_000, 9_000, 30_001)
"""Lengths in tokens of the prompts whose answers are compared. These prompts are not timed."""

WEIGHT_FACTOR = 24.0
"""Factor for vLLM's dummy weights, which are within ±0.001. With it, the output of a projection of 2,048 channels is
about as large as its input."""

_ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
"""Last line of a traceback. torch prefixes each line with the rank once its process group exists."""

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


def qwen3_next(small: bool) -> dict[str, Any]:
    """Return a config with attention in every fourth of 48 layers, and the fewest experts that vLLM loads."""
    layers = 4 if small else 48
    sizes: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 151936,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    if small:
        sizes |= {
            "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 80,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 512, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.4},
        }  # fmt: skip
    return sizes | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": layers,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 16 if not small else 4, "num_experts_per_tok": 10 if not small else 2,
        "mlp_only_layers": list(range(layers - 1)), "decoder_sparse_step": 1, "norm_topk_prob": True,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip


def nemotron_h(small: bool) -> dict[str, Any]:
    """Return a config with Nemotron-H 8B's layers: 24 of Mamba 2, 24 MLPs and 4 of attention."""
    pattern = "M-*M" if small else "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    sizes: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "vocab_size": 131072,
    }  # fmt: skip
    if small:
        sizes |= {
            "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 80, "mamba_num_heads": 4, "n_groups": 2, "ssm_state_size": 64, "vocab_size": 512,
        }  # fmt: skip
    return sizes | {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "layers_block_type": [kinds[letter] for letter in pattern], "conv_kernel": 4, "chunk_size": 128,
        "use_conv_bias": True, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip


SHAPES = {"qwen3-next": qwen3_next, "nemotron-h": nemotron_h}


def make_folder(name: str, folder: Path, tokens: int, small: bool) -> Path:
    """Write a model folder without weights, and a profile with the levels to measure."""
    folder.mkdir(parents=True)
    positions = {"max_position_embeddings": tokens + 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = SHAPES[name](small) | positions | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shape = ModelShape.from_config(read_config(folder))
    keys = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    local = {"sink_tokens": 128, "local_tokens": 256}
    profile = {
        "format": 1, "model": {key: getattr(shape, key) for key in keys}, "level": "high",
        "default": {"method": "top_p"},
        "levels": {A_SHAPE: {"default": {"method": "a_shape"}}, LEAST: {"default": {"method": "a_shape"} | local}},
    }  # fmt: skip
    (folder / "levels.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    return folder


def engine_arguments(run: str, folder: Path, tokens: int) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM``."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "seed": 0, "max_num_seqs": 4,
        "max_model_len": tokens + 512, "max_num_batched_tokens": 8192 if has_cuda() else 512,
        "enable_prefix_caching": False,
        # A CPU's memory holds fewer tokens, so sizes are smaller there.
        **({"gpu_memory_utilization": 0.75} if has_cuda() else {"gpu_memory_utilization": 0.3, "enforce_eager": True}),
    }  # fmt: skip
    # FlashInfer's kernel of the gated recurrence, vLLM's first choice on Hopper, is an optional package.
    additional: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if run != OURS:
        return arguments | {"block_size": 128, "additional_config": additional}
    # A small model's prompts are shorter than the default min_tokens of a GPU.
    settings: dict[str, Any] = {"profile": str(folder / "levels.yaml")}
    settings |= {} if has_cuda() else {"min_tokens": 128, "min_query_tokens": 1}
    additional["sparse_prefill"] = settings
    return arguments | {"attention_backend": "sparse-prefill", "additional_config": additional}


def prompts_of(folder: Path, lengths: Sequence[int], seed: int) -> list[list[int]]:
    vocabulary = read_config(folder)["vocab_size"]
    generator = random.Random(seed)
    return [[generator.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


@app.command(hidden=True)
def engine(
    run: Annotated[str, typer.Argument(help="stock, stock again or ours.")],
    folder: Annotated[Path, typer.Argument(help="Model folder.")],
    tokens: Annotated[int, typer.Argument(help="Length of the prompts that are timed.")],
    repeats: Annotated[int, typer.Argument(help="Prompts that are timed.")],
) -> None:
    """Run an engine. Output lines that begin with {"hybrid" contain the results as JSON."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # counters are read in this process
    os.environ.update(OFFLINE)
    begin = time.monotonic()
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(str(folder), **engine_arguments(run, folder, tokens))
    page_tokens = llm.llm_engine.vllm_config.cache_config.block_size
    _print_part("start", seconds=time.monotonic() - begin, page_tokens=page_tokens)

    llm.apply_model(widen_weights)

    def ask(prompts: Sequence[list[int]], level: str, max_tokens: int, **more: Any) -> list[Any]:
        extra = None if LEVELS[level] is None else {"sparse_prefill": LEVELS[level]}
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra, **more
        )
        return list(llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False))

    levels = list(LEVELS) if run == OURS else [DEFAULT]
    lengths = [min(length, tokens) for length in ANSWERED_PROMPTS]
    for level in (EXACT, LEAST) if run == OURS else levels:
        outputs = [ask([p], level, ANSWER_TOKENS, logprobs=0)[0].outputs[0] for p in prompts_of(folder, lengths, 1)]
        logprobs = [[next(iter(at.values())).logprob for at in output.logprobs] for output in outputs]
        _print_part("answers", level=level, tokens=[list(output.token_ids) for output in outputs], logprobs=logprobs)
    timed = prompts_of(folder, [tokens] * (repeats + 1), 2)
    for i, prompt in enumerate(timed):  # the first prompt is a warm-up
        for level in levels if i % 2 else levels[::-1]:
            before = _totals(llm) if run == OURS else {}
            start = time.monotonic()
            ask([prompt], level, 1)
            seconds = time.monotonic() - start
            counts = _difference(_totals(llm), before) if run == OURS else {}
            _print_part("ttft", level=level, seconds=seconds, is_warm_up=i == 0, **counts)


def widen_weights(model: Any) -> None:
    """Multiply the matrices of ``--load-format dummy``, which are so small that attention hardly changes an answer."""
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.data.mul_(WEIGHT_FACTOR)


def _print_part(part: str, **values: Any) -> None:
    print(json.dumps({"hybrid": part, **values}), flush=True)


def _totals(llm: Any) -> dict[str, dict[tuple[str, ...], float]]:
    from vllm_sparse_backend.serving.frontend.engine_counts import engine_totals

    return engine_totals(llm.collective_rpc("sparse_prefill_samples"))


def _difference(
    after: Mapping[str, Mapping[tuple[str, ...], float]], before: Mapping[str, Mapping[tuple[str, ...], float]]
) -> dict[str, Any]:
    """Return the layers that ran sparse during a request, and their density, from the counters."""

    def added(name: str) -> dict[tuple[str, ...], float]:
        old = before.get(name, {})
        return {labels: value - old.get(labels, 0.0) for labels, value in after.get(name, {}).items()}

    kept, causal = sum(added("kept_pairs").values()), sum(added("causal_pairs").values())
    return {
        "sparse_layers": sum(value > 0 for value in added("tiles").values()),
        "density": kept / causal if causal else None,
        "engines": {labels[-1]: value for labels, value in after.get("layers", {}).items()},
        "overflows": sum(added("arena_overflows").values()),
    }


@app.command()
def measure(
    model: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(SHAPES)}. Default: both.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the prompts that are timed.")] = 65536,
    repeats: Annotated[int, typer.Option(help="Prompts that are timed, after one that warms up.")] = 3,
    budget_s: Annotated[float, typer.Option(help="Seconds for everything together.")] = 300.0,
    out: Annotated[Path | None, typer.Option(help="Results file to write.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder for the engines' logs.")] = ROOT / "build/hybrid",
    small: Annotated[bool, typer.Option(help="Small layers, to try this program on a CPU.")] = False,
) -> None:
    """Measure stock vLLM twice, then this backend, for each model."""
    if unknown := set(model or ()) - set(SHAPES):
        raise typer.BadParameter(f"--model: given {', '.join(sorted(unknown))}, expected {' or '.join(SHAPES)}")
    end, problems = time.monotonic() + budget_s, []
    logs.mkdir(parents=True, exist_ok=True)
    report = Report("hybrid", device_name(), None, out)
    with TemporaryDirectory() as place:
        for name in model or SHAPES:
            folder = make_folder(name, Path(place) / name, tokens, small)
            results = {}
            for run in (STOCK, AGAIN, OURS):
                log = logs / f"{name}-{run.replace(' ', '-')}.log"
                timed = 0 if run == AGAIN else repeats
                results[run], problem = run_engine(run, folder, tokens, timed, log, end - time.monotonic())
                if problem is not None:
                    problems.append(f"{name}, {run}: {problem}; its log: {log}")
                    print(problems[-1], flush=True)
            add_rows(report, f"{name}'s shape, {tokens:,} tokens", folder, tokens, results)
    for figure in report.figures.values():
        print(f"{figure['name']}: {figure['value']} {figure['unit']}", flush=True)
    raise typer.Exit(1 if problems else 0)


def run_engine(
    run: str, folder: Path, tokens: int, repeats: int, log: Path, limit_s: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Run an engine in a process. Return the parts of its results, and the reason if the engine failed."""
    if limit_s <= 0:
        return [], "not started, because the budget (--budget-s) is used up"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")]
    env |= {} if has_cuda() else CPU_ENV
    command = [sys.executable, "-m", "benchmarks.hybrid", "engine", run, str(folder), str(tokens), str(repeats)]
    with log.open("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=file, stderr=subprocess.STDOUT
        )
        problem = None
        try:
            if code := process.wait(limit_s):
                file.seek(0)
                problem = f"ended with {code}: {reason_in(file.read())}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"stopped after {limit_s:.0f} s, when the budget (--budget-s) was used up"
    text = log.read_text(encoding="utf-8", errors="replace")
    return list(parts_of(text)), problem


def reason_in(log: str) -> str:
    """Return the error that ended an engine, if its log has it."""
    errors = [match[1] for match in _ERROR_LINE.finditer(log)]
    return root_cause(log) or (errors[-1] if errors else "no error in its log")


def parts_of(text: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of an engine's results from its log."""
    for line in text.splitlines():
        if line.startswith('{"hybrid"'):
            with contextlib.suppress(ValueError):  # an incomplete line: the process was stopped while it wrote
                yield json.loads(line)


def add_rows(
    report: Report, about: str, folder: Path, tokens: int, results: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Add the figures of a model. Parts are missing if an engine failed."""
    config = read_config(folder)
    forecast = prefill_share(config, tokens)
    report.add_figure(f"{about}: attention's share of prefill, forecast", forecast.attention, "share", "higher")
    report.add_figure(f"{about}: highest TTFT speed-up, forecast", forecast.best_speedup, "ratio", "higher")
    for run in (STOCK, OURS):
        for part in _parts(results[run], "start"):
            report.add_figure(f"{about}: {run}, start", part["seconds"], "s", "lower")
            report.add_figure(f"{about}: {run}, tokens of a page", part["page_tokens"], "tokens", "higher")
            if run == OURS:
                fast = float(part["page_tokens"] % 128 == 0)
                report.add_figure(f"{about}: pages that kernels read whole", fast, "share", "higher", bar=1)
    _add_answers(report, about, results)
    _add_times(report, about, forecast, results)
    sparse = sum(reason is None for reason in layer_reasons(config))
    for part in [part for part in _parts(results[OURS], "ttft") if not part["is_warm_up"]][-len(LEVELS) :]:
        level = part["level"]
        expected = 0 if level == EXACT else sparse
        what = f"{about}: {level}, layers that ran sparse (attention layers: {sparse})"
        report.add_figure(what, part["sparse_layers"], "layers", "lower" if level == EXACT else "higher", bar=expected)
        for engine_name, layers in part["engines"].items() if level == DEFAULT else ():
            report.add_figure(f"{about}: {level}, attention layers on {engine_name}", layers, "layers", "higher")
        if part["density"] is not None:
            report.add_figure(f"{about}: {level}, density", part["density"], "share", "lower")
        report.add_figure(f"{about}: {level}, allocations outside the arena", part["overflows"], "count", "lower", 0)


def _add_answers(report: Report, about: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for stock in _parts(results[STOCK], "answers"):
        for again in _parts(results[AGAIN], "answers"):
            _add_distance(report, f"{about}: second stock engine", again, stock)
            name = f"{about}: second stock engine, answers with stock's tokens"
            report.add_figure(name, _share_of_equal(again, stock), "share", "higher")
        for ours in _parts(results[OURS], "answers"):
            level = ours["level"]
            _add_distance(report, f"{about}: {level}", ours, stock)
            if level != EXACT:
                continue
            name = f"{about}: exact, answers with stock's tokens"
            report.add_figure(name, _share_of_equal(ours, stock), "share", "higher", bar=1)
            distinct = len({tuple(answer) for answer in stock["tokens"]}) / len(stock["tokens"])
            report.add_figure(f"{about}: stock, answers that differ from each other", distinct, "share", "higher")


def _add_distance(report: Report, about: str, answers: Mapping[str, Any], stock: Mapping[str, Any]) -> None:
    pairs = zip(chain(*answers["logprobs"]), chain(*stock["logprobs"]), strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    report.add_figure(f"{about}, log-probabilities' largest distance from stock's", apart, "nats", "lower")


def _share_of_equal(answers: Mapping[str, Any], stock: Mapping[str, Any]) -> float:
    pairs = zip(answers["tokens"], stock["tokens"], strict=True)
    return sum(a == b for a, b in pairs) / len(stock["tokens"])


def _add_times(
    report: Report, about: str, forecast: PrefillShare, results: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Add TTFT, speed-ups, and their ratio to the forecast."""
    stock = ttft(results[STOCK], DEFAULT)
    if stock is not None:
        report.add_figure(f"{about}: stock, TTFT", stock, "s", "lower")
    for level in LEVELS:
        seconds = ttft(results[OURS], level)
        if seconds is None:
            continue
        report.add_figure(f"{about}: {level}, TTFT", seconds, "s", "lower")
        if stock is None:
            continue
        speedup = stock / seconds
        report.add_figure(f"{about}: {level}, TTFT speed-up", speedup, "ratio", "higher")
        if level == A_SHAPE:
            name = f"{about}: {level}, TTFT speed-up ÷ the highest that doctor forecasts"
            report.add_figure(name, speedup / forecast.best_speedup, "ratio", "higher", bar=0.9)
        if level == LEAST:
            name = f"{about}: share of prefill time that a density near zero saves"
            report.add_figure(name, 1 - seconds / stock, "share", "higher")


def ttft(parts: Sequence[Mapping[str, Any]], level: str) -> float | None:
    """Return the median TTFT of a level in seconds; None if no request was timed."""
    seconds = [p["seconds"] for p in _parts(parts, "ttft") if p["level"] == level and not p["is_warm_up"]]
    return median(seconds) if seconds else None


def _parts(parts: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [part for part in parts if part["hybrid"] == kind]


if __name__ == "__main__":
    app()
