# SPDX-License-Identifier: Apache-2.0
"""The demo: asks stock vLLM and this backend, both on loopback, about a long text, and shows the sparse work in tables.

The tables come from the server's /metrics. The demo fails if these show no sparse prefill, or if the bundled model's
answer is wrong.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_sparse_backend.config.metrics import FRESH_METRICS_PATH
from vllm_sparse_backend.config.model_check import read_config
from vllm_sparse_backend.demo.model import BUNDLED, CANNOT_FIND, FINDING_LAYER
from vllm_sparse_backend.demo.question import make_questions
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError, table_of
from vllm_sparse_backend.evaluation.vllm_server import Server, sparse_args
from vllm_sparse_kernels.methods import METHODS

PROMPT_TOKENS = 4096
ANSWER_TOKENS = 16
MAX_MODEL_LEN = 8192
MIN_TOKENS = 1024


class DemoError(BenchError):
    """The demo could not show sparse prefill."""


def run_demo(model: Path | None, method: str, console: Console) -> None:
    """Run the demo. Raises ``DemoError``, ``ServerError`` or ``ConfigurationError`` with the reason if it fails.

    The bundled model also runs on stock vLLM, and its answers must be right. A user's model runs only on this backend,
    because starting it twice may take long, and its answers are not checked.
    """
    known, chosen = model is None, model or BUNDLED
    length = ("--max-model-len", str(_max_model_len(chosen)))
    settings = demo_settings(method, bundled=known)
    right = []
    if "dense_layers" in settings:
        console.print(
            f"Layer {FINDING_LAYER} of this model, which finds facts, stays dense: {method} loses facts there."
        )
    if known:
        with _started("stock vLLM", Server(chosen, length), console) as stock:
            right += _ask(stock, console)
    with _started("sparse-prefill", Server(chosen, (*sparse_args(settings), *length)), console) as server:
        right += _ask(server, console)
        report = parse_metrics(server.get(FRESH_METRICS_PATH))
    if report.rows:
        _show(report, console)
    if problem := report.problem():
        raise DemoError(f"The server answered, but its /metrics shows no sparse prefill: {problem}.")
    if known and not all(right):
        raise DemoError(
            "An answer is wrong; this model should find the facts. Please report this with the output above."
        )


def demo_settings(method: str, *, bundled: bool) -> dict[str, Any]:
    """Return the server's settings for the bundled model (``bundled``) or another model."""
    dense = {"dense_layers": [FINDING_LAYER]} if bundled and method in CANNOT_FIND else {}
    params = dict(METHODS[method].demo)
    return {"method": method, "min_tokens": MIN_TOKENS, "min_query_tokens": 1, "params": params, **dense}


@contextlib.contextmanager
def _started(name: str, server: Server, console: Console) -> Iterator[Server]:
    console.print(f"{name}: [bold]{escape(str(server))}[/]", highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        with console.status("Starting the server (about a minute) ..."):
            stack.enter_context(server)
        console.print(f"The server is ready after {time.monotonic() - began:.0f} s.")
        yield server


def _max_model_len(model: Path) -> int:
    longest = read_config(model).get("max_position_embeddings") or MAX_MODEL_LEN
    needed = PROMPT_TOKENS + 512
    if longest < needed:
        raise DemoError(f"{model}: max_position_embeddings is {longest}, but the demo's prompts need {needed}.")
    return min(longest, MAX_MODEL_LEN)


def _ask(server: Server, console: Console) -> list[bool]:
    """Ask for two facts of one text by chat, and return whether each answer is right."""

    def count_tokens(text: str) -> int:
        return server.post("/tokenize", {"model": server.model, "prompt": text})["count"]

    right = []
    for question in make_questions(count_tokens, PROMPT_TOKENS):
        began, text = time.monotonic(), f"{question.text}\n{question.question}"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER_TOKENS, "temperature": 0}
        with console.status("Waiting for an answer ..."):
            answer = server.post("/v1/chat/completions", {"model": server.model, **body})
        said, usage = answer["choices"][0]["message"]["content"], answer["usage"]
        if usage["prompt_tokens"] < PROMPT_TOKENS or not usage["completion_tokens"]:
            raise DemoError(f"The request used {usage}, expected at least {PROMPT_TOKENS} prompt tokens and an answer.")
        took, is_right = time.monotonic() - began, question.is_answered_by(said)
        tokens = f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} answered in {took:.1f} s"
        verdict = "[green]right[/]" if is_right else f"[red]wrong[/], it is {question.value}"
        subject = f"the magic number of {question.name}"
        console.print(f"{tokens}: {subject}: {escape(repr(said))} {verdict}", highlight=False, soft_wrap=True)
        right.append(is_right)
    return right


def _show(report: MetricsReport, console: Console) -> None:
    rows = [{"path": path, "reason": why, "rows": count} for (path, why), count in sorted(report.rows.items())]
    console.print(table_of("Rows (requests in a step) by path", {n: n for n in rows[0]}, rows))
    attention = ", ".join(f"{count} layers by {name}" for name, count in sorted(report.attention.items()))
    columns = {"layer": "layer", "tiles": "tiles", "kept_pairs": "kept pairs", "causal_pairs": "causal pairs"}
    layers = [
        {"layer": layer, **vars(counts), "density": counts.density} for layer, counts in sorted(report.layers.items())
    ]
    title = f"Pairs computed by sparse rows (attention: {attention})"
    console.print(table_of(title, columns | {"density": "density"}, layers))
