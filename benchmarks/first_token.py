"""Time to first token and per output token of a real server, with this backend and with stock FlashAttention.

    python -m benchmarks.first_token [--out docs/results/skeleton.json]

A Llama-3.1-8B-shaped model with random weights (--load-format dummy), chunks of 8,192, CUDA graphs on. Two servers
stand on the card side by side and are asked in turn, so that nothing that drifts favours one of them. Random prompts
of token ids, prefix caching off; medians. On random weights attention is nearly uniform, so methods that look at it
keep nearly everything: only A-shape's density, which no weights change, tells something of speed; the others are
asked the same prompts to show that they answer.
"""

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
PROMPTS = {1024: 21, 32768: 7, 131072: 2}
"""How often each length of prompt is asked for many tokens."""
SHORT_TOKENS, SHORT_REPEATS = 8192, 150
"""Shorter prompts are asked for their first token alone, and as often as this: 35 ms drown in noise otherwise."""
OUTPUT_TOKENS = 64


def room(*prompt_tokens: int) -> tuple[str, ...]:
    """Room for these prompts at once: two servers fit one card, and start together without measuring each other."""
    kv_bytes_per_token = 2 * 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    max_model_len = max(prompt_tokens) + 1024
    kv_tokens = sum(prompt_tokens) + 1024 * len(prompt_tokens) + 2048
    return (
        *(
            "--gpu-memory-utilization",
            "0.3",
            "--kv-cache-memory-bytes",
            str(kv_tokens * kv_bytes_per_token),
        ),
        *("--max-model-len", str(max_model_len), "--max-num-seqs", "16", "--load-format", "dummy"),
        *("--max-num-batched-tokens", "8192", "--no-enable-prefix-caching"),
    )


METHODS: dict[str, dict[str, Any]] = {
    name: {"method": name, "min_tokens": 8192} for name in ("a_shape", "vertical_slash", "block_sparse")
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


def measure(
    servers: dict[str, Server], length: int, repeats: int, tokens: int, warm: bool = True
) -> dict[str, tuple[float, float]]:
    """Per server the medians of (seconds to the first token, seconds per later one), asked in turn, ABBA."""
    random = Random(length)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for i in range(repeats + warm):
        prompt = [random.randrange(2, VOCAB_SIZE) for _ in range(length)]
        for name in sorted(servers, reverse=i % 2 == 1):
            taken = first_token_s(servers[name], prompt, tokens)
            if i or not warm:
                times[name].append(taken)
    for name, taken_all in times.items():
        shown = ", ".join(f"{a:.4f} s + {b * 1e3:.2f} ms" for a, b in taken_all[:9])
        print(f"{name}: {length} tokens, {len(taken_all)} times: {shown}", flush=True)
    return {name: tuple(map(statistics.median, zip(*taken, strict=True))) for name, taken in times.items()}  # type: ignore[misc]


def density(server: Server) -> float:
    """Kept over causal pairs of all sparse rows that the server has told of."""
    for _ in range(2):  # counters are written when the server next steps
        time.sleep(1.2)
        first_token_s(server, [5] * 16, 2)
    layers = parse(server.get("/metrics")).layers.values()
    return sum(c.kept_pairs for c in layers) / max(1, sum(c.causal_pairs for c in layers))


@contextmanager
def serving(folder: Path, prompts: Sequence[int], arguments: dict[str, tuple[str, ...]]) -> Iterator[dict[str, Server]]:
    """Servers by name, started at the same time, each with room for prompts of these tokens at once."""
    servers = {name: Server(folder, (*room(*prompts), *args)) for name, args in arguments.items()}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        list(pool.map(stack.enter_context, servers.values()))
        yield servers


def compare(folder: Path, lengths: list[int], results: Results) -> None:
    """A-shape beside stock: the bars."""
    with serving(folder, [max(lengths)], {"stock": (), "a_shape": sparse_args(METHODS["a_shape"])}) as servers:
        for length in lengths:
            figures = measure(servers, length, PROMPTS[length], OUTPUT_TOKENS)
            first = {name: figure[0] for name, figure in figures.items()}
            if length < SHORT_TOKENS:
                first = {name: f[0] for name, f in measure(servers, length, SHORT_REPEATS, 1).items()}
            for name in servers:
                results.add(f"{name}: first token after {length} tokens", first[name], "s", "lower")
                results.add(f"{name}: per output token after {length}", figures[name][1] * 1e3, "ms", "lower")
            sooner, longer = first["stock"] / first["a_shape"], figures["a_shape"][1] / figures["stock"][1]
            bar = {1024: 0.98, 131072: 2.2}.get(length)
            results.add(f"a_shape: times sooner than stock after {length}", sooner, "ratio", "higher", bar)
            results.add(f"a_shape: per output token over stock's after {length}", longer, "ratio", "lower", 1.02)
        if max(lengths) >= SHORT_TOKENS:
            results.add("a_shape: density over all sparse rows", density(servers["a_shape"]), "share", "lower")


def answer(folder: Path, lengths: list[int], results: Results) -> None:
    """The methods that look at attention: that they answer, and how long it takes where they keep nearly everything."""
    names = ("vertical_slash", "block_sparse")
    with serving(folder, [max(lengths)], {name: sparse_args(METHODS[name]) for name in names}) as servers:
        for length in lengths:
            for name, (first, _) in measure(servers, length, 1, OUTPUT_TOKENS, warm=False).items():
                results.add(f"{name}: first token after {length} tokens, random weights", first, "s", "lower")
        for name, server in servers.items():
            results.add(f"{name}: density on random weights", density(server), "share", "lower")


def main(
    out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the model folder is made.")] = Path("/tmp/llama-8b-shape"),
    part: Annotated[str, typer.Option(help="compare, answer, or both by comma.")] = "compare,answer",
    lengths: Annotated[str, typer.Option(help="Lengths of prompts, by comma.")] = ",".join(map(str, PROMPTS)),
) -> None:
    results = Results(out)
    make_shape(folder)
    for name in part.split(","):
        {"compare": compare, "answer": answer}[name](folder, [int(length) for length in lengths.split(",")], results)
    results.show()


if __name__ == "__main__":
    typer.run(main)
