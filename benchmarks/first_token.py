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
from collections.abc import Iterator
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
"""How often each length of prompt is asked."""
OUTPUT_TOKENS = 64
# Room for one prompt of 131,072 tokens in each cache, and for two servers on a card of 80 GB.
HALF_THE_CARD = (
    *("--gpu-memory-utilization", "0.48", "--kv-cache-memory-bytes", "17700000000"),
    *("--max-model-len", "132096", "--max-num-seqs", "16"),
)
COMMON = ("--load-format", "dummy", "--max-num-batched-tokens", "8192", "--no-enable-prefix-caching", *HALF_THE_CARD)
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


def measure(servers: dict[str, Server], lengths: dict[int, int], warm: bool = True) -> dict[tuple[str, str], float]:
    """Medians by (server, figure), the servers asked in turn."""
    random = Random(0)
    figures = {}
    for length, repeats in lengths.items():
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for i in range(repeats + warm):
            prompt = [random.randrange(2, VOCAB_SIZE) for _ in range(length)]
            for name, server in servers.items():
                taken = first_token_s(server, prompt, OUTPUT_TOKENS)
                if i or not warm:
                    times[name].append(taken)
        for name, taken_all in times.items():
            figures[name, f"first token after {length}"] = statistics.median(first for first, _ in taken_all)
            figures[name, f"per token after {length}"] = statistics.median(later for _, later in taken_all)
            print(f"{name}: {length}: " + ", ".join(f"{a:.4f} s + {b * 1e3:.2f} ms" for a, b in taken_all), flush=True)
    return figures


def density(server: Server) -> float:
    """Kept over causal pairs of all sparse rows that the server has told of."""
    for _ in range(2):  # counters are written when the server next steps
        time.sleep(1.2)
        first_token_s(server, [5] * 16, 2)
    layers = parse(server.get("/metrics")).layers.values()
    return sum(c.kept_pairs for c in layers) / max(1, sum(c.causal_pairs for c in layers))


@contextmanager
def serving(folder: Path, arguments: dict[str, tuple[str, ...]]) -> Iterator[dict[str, Server]]:
    """Servers by name; one after the other, as each measures the memory that is free while it starts."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Server(folder, (*COMMON, *args))) for name, args in arguments.items()}


def compare(folder: Path, results: Results) -> None:
    """A-shape beside stock: the bars."""
    with serving(folder, {"stock": (), "a_shape": sparse_args(METHODS["a_shape"])}) as servers:
        figures = measure(servers, PROMPTS)
        results.add("a_shape: density over all sparse rows", density(servers["a_shape"]), "share", "lower")
    for length in PROMPTS:
        first, later = f"first token after {length}", f"per token after {length}"
        sooner = figures["stock", first] / figures["a_shape", first]
        longer = figures["a_shape", later] / figures["stock", later]
        for name in servers:
            results.add(f"{name}: first token after {length} tokens", figures[name, first], "s", "lower")
            results.add(f"{name}: per output token after {length}", figures[name, later] * 1e3, "ms", "lower")
        bar = {1024: 0.98, 131072: 2.2}.get(length)
        results.add(f"a_shape: times sooner than stock after {length}", sooner, "ratio", "higher", bar)
        results.add(f"a_shape: per output token over stock's after {length}", longer, "ratio", "lower", 1.02)


def answer(folder: Path, results: Results) -> None:
    """The methods that look at attention: that they answer, and how long it takes where they keep nearly everything."""
    names = ("vertical_slash", "block_sparse")
    with serving(folder, {name: sparse_args(METHODS[name]) for name in names}) as servers:
        figures = measure(servers, dict.fromkeys(PROMPTS, 1), warm=False)
        for name, server in servers.items():
            results.add(f"{name}: density on random weights", density(server), "share", "lower")
            for length in PROMPTS:
                value = figures[name, f"first token after {length}"]
                results.add(f"{name}: first token after {length} tokens, random weights", value, "s", "lower")


def main(
    out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the model folder is made.")] = Path("/tmp/llama-8b-shape"),
    part: Annotated[str, typer.Option(help="compare, answer, or both by comma.")] = "compare,answer",
) -> None:
    results = Results(out)
    make_shape(folder)
    for name in part.split(","):
        {"compare": compare, "answer": answer}[name](folder, results)
    results.show()


if __name__ == "__main__":
    typer.run(main)
