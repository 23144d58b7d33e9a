"""Time to first token and per output token of a real server, with this backend and with stock FlashAttention.

    python -m benchmarks.first_token [--out docs/results/skeleton.json]

A Llama-3.1-8B-shaped model with random weights (--load-format dummy), chunks of 8,192, CUDA graphs on. Random prompts
of token ids, prefix caching off; medians. On random weights attention is nearly uniform, so methods that look at it
keep nearly everything: only A-shape's density, which no weights change, tells something of speed.
"""

import json
import statistics
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from benchmarks.results import Results
from vllm_sparse_backend.demo.model import CONFIG, VOCAB_SIZE, write_tokenizer
from vllm_sparse_backend.demo.scrape import parse
from vllm_sparse_backend.demo.server import Server, sparse_args

SHAPE: dict[str, Any] = CONFIG | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 135168,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
PROMPTS = {1024: 9, 32768: 5, 131072: 3}
OUTPUT_TOKENS = 64
METHODS: dict[str, dict[str, Any]] = {
    "a_shape": {"method": "a_shape"},
    "vertical_slash": {"method": "vertical_slash"},
    "block_sparse": {"method": "block_sparse"},
}


def make_shape(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE, indent=1))
    write_tokenizer(folder)
    return folder


def first_token_s(server: Server, prompt: list[int], tokens: int) -> tuple[float, float]:
    """(seconds to the first streamed token, seconds per later token)."""
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0,
        "ignore_eos": True, "logprobs": 1,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    stamps = []
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"]
            for logprob in (choice[0].get("logprobs") or {}).get("token_logprobs", []) if choice else []:
                if not -1e4 < logprob <= 0:
                    raise RuntimeError(f"log-probability {logprob}: not a number that a healthy model gives")
                stamps.append(time.perf_counter())
    if len(stamps) != tokens:
        raise RuntimeError(f"{len(stamps)} tokens answered, asked for {tokens}")
    return stamps[0] - start, (stamps[-1] - stamps[0]) / max(tokens - 1, 1)


def measure(server: Server, lengths: dict[int, int], name: str) -> dict[str, float]:
    random = Random(0)
    figures = {}
    for length, repeats in lengths.items():
        prompts = [[random.randrange(2, VOCAB_SIZE) for _ in range(length)] for _ in range(repeats + 1)]
        first_token_s(server, prompts[0], 2)  # warm: kernels of this length compile or load here
        times = [first_token_s(server, prompt, OUTPUT_TOKENS) for prompt in prompts[1:]]
        figures[f"first token after {length}"] = statistics.median(first for first, _ in times)
        figures[f"per token after {length}"] = statistics.median(later for _, later in times)
        print(f"{name}: {length} tokens: " + ", ".join(f"{a:.3f} s + {b * 1e3:.2f} ms" for a, b in times), flush=True)
    return figures


def serve(folder: Path, args: tuple[str, ...], lengths: dict[int, int], name: str) -> dict[str, float]:
    common = ("--load-format", "dummy", "--max-num-batched-tokens", "8192", "--no-enable-prefix-caching")
    start = time.perf_counter()
    with Server(folder, (*common, *args)) as server:
        figures = {"start-up": time.perf_counter() - start}
        figures |= measure(server, lengths, name)
        if args:
            time.sleep(1.1)
            first_token_s(server, [5] * 16, 2)
            time.sleep(1.1)
            first_token_s(server, [5] * 16, 2)
            report = parse(server.get("/metrics"))
            figures["density"] = sum(c.kept_pairs for c in report.layers.values()) / max(
                1, sum(c.causal_pairs for c in report.layers.values())
            )
            print(f"{name}: rows {dict(report.rows)}, density {figures['density']:.4f}", flush=True)
    return figures


def main(
    out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the model folder is made.")] = Path("/tmp/llama-8b-shape"),
    methods: Annotated[str, typer.Option(help="Which of this backend's methods, by comma.")] = ",".join(METHODS),
) -> None:
    results = Results(out)
    make_shape(folder)
    stock = serve(folder, (), PROMPTS, "stock")
    for length in PROMPTS:
        results.add(f"stock: first token after {length} tokens", stock[f"first token after {length}"], "s", "lower")
        results.add(f"stock: per output token after {length}", stock[f"per token after {length}"] * 1e3, "ms", "lower")
    for method in methods.split(","):
        ours = serve(folder, sparse_args(METHODS[method]), PROMPTS, method)
        results.add(f"{method}: density over all sparse rows", ours["density"], "share", "lower")
        for length in PROMPTS:
            first, later = (f"{what} after {length}" for what in ("first token", "per token"))
            sooner, longer = stock[first] / ours[first], ours[later] / stock[later]
            bars = ({1024: 0.98, 131072: 2.2}.get(length), 1.02) if method == "a_shape" else (None, None)
            results.add(f"{method}: first token after {length} tokens", ours[first], "s", "lower")
            results.add(f"{method}: times sooner than stock after {length}", sooner, "ratio", "higher", bars[0])
            results.add(f"{method}: per output token over stock's after {length}", longer, "ratio", "lower", bars[1])
        results.add(f"{method}: start-up over stock's", ours["start-up"] / stock["start-up"], "ratio", "lower")
    results.show()


if __name__ == "__main__":
    typer.run(main)
