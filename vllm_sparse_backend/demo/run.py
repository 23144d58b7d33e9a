"""The demo: a real server on loopback, a completion and a chat over a long prompt, and a table of what ran sparse.

What runs sparse is read from the server's /metrics, nothing else; the demo fails if it does not show sparse prefill.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_sparse_backend.demo.model import make_model, project_text
from vllm_sparse_backend.demo.scrape import Report, parse
from vllm_sparse_backend.demo.server import Server, sparse_args
from vllm_sparse_backend.settings.modelcheck import read_config

PROMPT_TOKENS = 4096
ANSWER_TOKENS = 16
MAX_MODEL_LEN = 8192
MIN_TOKENS = 1024
# Chosen for the small model's random weights, which spread attention wide: each method leaves out some of 4,096 tokens.
# They say nothing of real models, which want the papers' values.
METHOD_PARAMS: dict[str, dict[str, float]] = {
    "vertical_slash": {"vertical_tokens": 256, "slash_tokens": 104},  # 100 of the slashes are always the nearest
    "a_shape": {"sink_tokens": 128, "local_tokens": 1024},
    "block_sparse": {"top_blocks": 16},
    "anchor_attention": {"theta": 5.0, "step_tiles": 4},
    "sparge_attn": {"kept_mass": 0.5, "min_similarity": 0.0},
    "sale": {"tau": 0.95},
    "share_prefill": {"gamma": 0.5, "cluster": 0},  # all heads in one cluster: they share as far as they are alike
    "flex_vertical_slash": {"gamma": 0.5},
}
# Counters are written when the server next steps, about once a second at most.
FLUSH_S = 1.2


class DemoError(RuntimeError):
    """The demo could not show what it is there to show."""


def run_demo(model: Path | None, method: str, work_dir: Path | None, console: Console) -> None:
    """Run the demo; raises ``DemoError``, ``ServerError`` or ``ConfigurationError`` with the reason if it fails."""
    if model is None:
        folder = (work_dir or _default_work_dir()) / "demo-model"
        console.print(f"Model, made locally: {escape(str(folder))}", highlight=False, soft_wrap=True)
        model = make_model(folder)
    settings = {"method": method, "min_tokens": MIN_TOKENS, "min_query_tokens": 1, "params": METHOD_PARAMS[method]}
    server = Server(model, (*sparse_args(settings), "--max-model-len", str(_max_model_len(model))))
    console.print(f"[bold]{escape(str(server))}[/]", highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        with console.status("Starting the server (about a minute) ..."):
            stack.enter_context(server)
        console.print(f"The server is ready after {time.monotonic() - began:.0f} s.")
        _ask(server, console)
        report = _read_report(server)
    _show(report, console)
    if problem := report.problem():
        raise DemoError(f"The server answered, but its /metrics show no sparse prefill: {problem}.")


def _default_work_dir() -> Path:
    in_venv = sys.prefix != sys.base_prefix
    return Path(sys.prefix if in_venv else tempfile.gettempdir()) / "sparse-prefill"


def _max_model_len(model: Path) -> int:
    longest = read_config(model).get("max_position_embeddings", MAX_MODEL_LEN)
    needed = PROMPT_TOKENS + 512
    if longest < needed:
        raise DemoError(f"{model}: max_position_embeddings is {longest}, and the demo's prompts need {needed}.")
    return min(longest, MAX_MODEL_LEN)


def _ask(server: Server, console: Console) -> None:
    import openai

    client = openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        timeout=600,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback must not go through a proxy
    )
    text = long_text(server, PROMPT_TOKENS)
    common: dict[str, Any] = {"model": server.model, "max_tokens": ANSWER_TOKENS, "temperature": 0}

    def completion() -> tuple[Any, str | None]:
        answer = client.completions.create(prompt=text, **common)
        return answer, answer.choices[0].text

    def chat() -> tuple[Any, str | None]:
        messages = [{"role": "user", "content": f"{text}\nWhat does this code do?"}]
        answer = client.chat.completions.create(messages=messages, **common)
        return answer, answer.choices[0].message.content

    try:
        for name, ask in (("completion", completion), ("chat", chat)):
            _show_answer(name, ask, console)
    except openai.OpenAIError as error:
        raise DemoError(f"A request failed: {error}. The end of the server's log:\n{server.tail()}") from error


def _show_answer(name: str, ask: Callable[[], tuple[Any, str | None]], console: Console) -> None:
    began = time.monotonic()
    with console.status(f"Waiting for the {name} ..."):
        answer, text = ask()
    took, usage, finish = time.monotonic() - began, answer.usage, answer.choices[0].finish_reason
    if usage.prompt_tokens < PROMPT_TOKENS or not usage.completion_tokens:
        raise DemoError(f"The {name} used {usage}: expected at least {PROMPT_TOKENS} prompt tokens and an answer.")
    console.print(
        f"{name}: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} answered in {took:.1f} s, "
        f"finish reason {finish}: {escape(repr(text))}",
        highlight=False,
        soft_wrap=True,
    )


def long_text(server: Server, tokens: int) -> str:
    """Text that the server's own tokenizer makes at least ``tokens`` tokens of, and not many more."""
    text = project_text()

    def count(piece: str) -> int:
        return server.post("/tokenize", {"model": server.model, "prompt": piece})["count"]

    while count(text) < tokens:
        text += text
    low, high = 0, len(text)
    while high - low > 256:  # characters
        middle = (low + high) // 2
        low, high = (low, middle) if count(text[:middle]) >= tokens else (middle, high)
    return text[:high]


def _read_report(server: Server) -> Report:
    time.sleep(FLUSH_S)
    server.post("/v1/completions", {"model": server.model, "prompt": "def", "max_tokens": 8})
    return parse(server.get("/metrics"))


def _show(report: Report, console: Console) -> None:
    rows = Table(title="Rows (requests in a step) by the way they went")
    for heading in ("path", "reason", "rows"):
        rows.add_column(heading, justify="right" if heading == "rows" else "left")
    for (path, reason), count in sorted(report.rows.items()):
        rows.add_row(path, reason, str(count))
    layers = Table(title="What the sparse rows computed")
    for heading in ("layer", "tiles", "kept pairs", "causal pairs", "density"):
        layers.add_column(heading, justify="right")
    for layer, counts in sorted(report.layers.items()):
        layers.add_row(
            str(layer),
            f"{counts.tiles:,}",
            f"{counts.kept_pairs:,}",
            f"{counts.causal_pairs:,}",
            f"{counts.density:.3f}",
        )
    console.print(rows, layers)
