# SPDX-License-Identifier: Apache-2.0
"""The demo: real servers on loopback, stock's and ours, asked about a long text, and a table of what ran sparse.

What runs sparse is read from the server's /metrics, nothing else; the demo fails if it does not show sparse prefill, or
if the model that is brought along answers wrong.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_sparse_backend.demo.model import BUNDLED, CANNOT_FIND, FINDING_LAYER
from vllm_sparse_backend.demo.question import Question, make_questions
from vllm_sparse_backend.measure.scrape import Report, parse
from vllm_sparse_backend.measure.server import Server, sparse_args
from vllm_sparse_backend.settings.modelcheck import read_config
from vllm_sparse_kernels.methods import METHODS

PROMPT_TOKENS = 4096
ANSWER_TOKENS = 16
MAX_MODEL_LEN = 8192
MIN_TOKENS = 1024


class DemoError(RuntimeError):
    """The demo could not show what it is there to show."""


@dataclass(frozen=True)
class Given:
    """One answer of one server."""

    server: str
    way: str
    question: Question
    answer: str | None

    @property
    def is_right(self) -> bool:
        return self.question.is_answered_by(self.answer)


def run_demo(model: Path | None, method: str, console: Console) -> None:
    """Run the demo; raises ``DemoError``, ``ServerError`` or ``ConfigurationError`` with the reason if it fails.

    The model that is brought along is asked through stock vLLM too, and has to be right. A model of the user's is
    asked through this backend alone, as starting it twice may take long, and may answer what it will.
    """
    known, chosen = model is None, model or BUNDLED
    length = ("--max-model-len", str(_max_model_len(chosen)))
    settings = settings_of(method, bundled=known)
    given = []
    if "dense_layers" in settings:
        console.print(
            f"Layer {FINDING_LAYER} of this model, which finds facts, stays dense: {method} loses them there."
        )
    if known:
        with _started("stock vLLM", Server(chosen, length), console) as stock:
            given += _ask("stock vLLM", stock, console)
    with _started("sparse-prefill", Server(chosen, (*sparse_args(settings), *length)), console) as server:
        given += _ask("sparse-prefill", server, console)
        report = parse(server.get("/metrics"))
    _show(report, console)
    _show_answers(given, console)
    if problem := report.problem():
        raise DemoError(f"The server answered, but its /metrics show no sparse prefill: {problem}.")
    if known and not all(one.is_right for one in given):
        raise DemoError("An answer is wrong, and this model knows better.")


def settings_of(method: str, *, bundled: bool) -> dict[str, Any]:
    """What the demo's server is given, for the model that is brought along (``bundled``) or another."""
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
        raise DemoError(f"{model}: max_position_embeddings is {longest}, and the demo's prompts need {needed}.")
    return min(longest, MAX_MODEL_LEN)


def _ask(name: str, server: Server, console: Console) -> list[Given]:
    """A completion and a chat, which ask for two facts of one text."""
    import openai

    client = openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        timeout=600,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback must not go through a proxy
    )
    common: dict[str, Any] = {"model": server.model, "max_tokens": ANSWER_TOKENS, "temperature": 0}

    def completion(asked: str) -> tuple[Any, str | None]:
        answer = client.completions.create(prompt=f"{asked} Answer:", **common)
        return answer, answer.choices[0].text

    def chat(asked: str) -> tuple[Any, str | None]:
        answer = client.chat.completions.create(messages=[{"role": "user", "content": asked}], **common)
        return answer, answer.choices[0].message.content

    def count_tokens(text: str) -> int:
        return server.post("/tokenize", {"model": server.model, "prompt": text})["count"]

    given = []
    try:
        ways = {"completion": completion, "chat": chat}
        for (way, ask), question in zip(ways.items(), make_questions(count_tokens, PROMPT_TOKENS)):
            asked = partial(ask, f"{question.text}\n{question.question}")
            given.append(Given(name, way, question, _show_answer(way, asked, console)))
    except openai.OpenAIError as error:
        raise DemoError(f"A request failed: {error}. The end of the server's log:\n{server.tail()}") from error
    return given


def _show_answer(way: str, ask: Callable[[], tuple[Any, str | None]], console: Console) -> str | None:
    began = time.monotonic()
    with console.status(f"Waiting for the {way} ..."):
        answer, text = ask()
    took, usage, finish = time.monotonic() - began, answer.usage, answer.choices[0].finish_reason
    if usage.prompt_tokens < PROMPT_TOKENS or not usage.completion_tokens:
        raise DemoError(f"The {way} used {usage}: expected at least {PROMPT_TOKENS} prompt tokens and an answer.")
    console.print(
        f"{way}: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} answered in {took:.1f} s, "
        f"finish reason {finish}: {escape(repr(text))}",
        highlight=False,
        soft_wrap=True,
    )
    return text


def _show_answers(given: Sequence[Given], console: Console) -> None:
    """A row for each question, a column for each server; as wide as a terminal of 80 characters."""
    table = Table(title=f"Asked at the end of a text of {PROMPT_TOKENS:,} tokens that holds the answers")
    for heading in ("magic number of", "is", *dict.fromkeys(one.server for one in given)):
        table.add_column(heading, overflow="fold")
    for question in dict.fromkeys(one.question for one in given):
        answers = (_judged(one) for one in given if one.question == question)
        table.add_row(question.name, question.value, *answers)
    console.print(table)


def _judged(one: Given) -> str:
    verdict = "[green]right[/]" if one.is_right else "[red]wrong[/]"
    return f"{escape((one.answer or '').strip())} {verdict}"


def _show(report: Report, console: Console) -> None:
    rows = Table(title="Rows (requests in a step) by the way they went")
    for heading in ("path", "reason", "rows"):
        rows.add_column(heading, justify="right" if heading == "rows" else "left")
    for (path, reason), count in sorted(report.rows.items()):
        rows.add_row(path, reason, str(count))
    attention = ", ".join(f"{count} layers by {name}" for name, count in sorted(report.attention.items()))
    layers = Table(title=f"What the sparse rows computed (attention: {attention})")
    for heading in ("layer", "tiles", "kept pairs", "causal pairs", "density", "pairs/s"):
        layers.add_column(heading, justify="right")
    for layer, counts in sorted(report.layers.items()):
        layers.add_row(
            str(layer),
            f"{counts.tiles:,}",
            f"{counts.kept_pairs:,}",
            f"{counts.causal_pairs:,}",
            f"{counts.density:.3f}",
            f"{counts.pairs_per_s:.1e}" if counts.seconds else "not timed",
        )
    console.print(rows, layers)
