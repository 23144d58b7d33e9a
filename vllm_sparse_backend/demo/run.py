# SPDX-License-Identifier: Apache-2.0
"""The demo: stock vLLM and this backend, both on loopback, answer questions inside one long prompt.

The demo fails if the server's /metrics shows no sparse prefill, or if an answer is wrong.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation.answer_run import AnswerWorkload, ask
from vllm_sparse_backend.evaluation.answer_scores import PromptScores
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError, table_of
from vllm_sparse_backend.evaluation.vllm_server import NOT_FASTER_ON_CPU, Server, has_cuda, sparse_args

PROMPT_TOKENS, FACTS = 4096, 24
SETTINGS = {"min_tokens": 1024, "min_query_tokens": 64}
"""The default method, with limits for a prompt that is shorter than prompts that gain."""

ARGS = ("--max-model-len", str(PROMPT_TOKENS + 1), "--kv-cache-memory-bytes", str(256 << 20))
"""A fixed cache, so that both servers fit on one GPU."""

CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""vLLM binds the workers of all servers to the same core, where they would wait for each other, and starts a worker
process for each engine, which takes a third of the start time."""


def run_demo(say: Callable[[str], None]) -> None:
    """Run the demo, and ``say`` its results. Raises ``BenchError`` or ``ServerError`` with the reason if it fails."""
    env = {} if has_cuda() else CPU_ENV
    servers = {
        "stock vLLM": Server(BUNDLED, ARGS, env=env),
        "sparse-prefill": Server(BUNDLED, (*sparse_args(SETTINGS), *ARGS), env=env),
    }
    for name, server in servers.items():
        say(f"{name}: {server}")
    say("Starting both servers takes about a minute.")
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            list(pool.map(stack.enter_context, servers.values()))
        endpoints = {name: Endpoint.connect(name, server.url) for name, server in servers.items()}
        scores = ask_all(endpoints)
        report = parse_metrics(endpoints["sparse-prefill"].metrics())
    say(summary(scores, report))


def ask_all(endpoints: dict[str, Endpoint]) -> dict[str, PromptScores]:
    """Send the same prompt to all servers, and return their scores."""
    workload = AnswerWorkload.from_text(None, [PROMPT_TOKENS], 1, FACTS)
    (prompt,) = workload.build_prompts(endpoints["stock vLLM"]).values()
    scores = {}
    for name, endpoint in endpoints.items():
        try:
            scores[name] = ask(endpoint, prompt)
        except RequestError as error:
            raise BenchError(f"{name} did not answer: {error}") from None
    return scores


def summary(scores: dict[str, PromptScores], report: MetricsReport) -> str:
    """Return a table of right answers, and a sentence. Raises BenchError if they show no sparse prefill, or errors."""
    rows = [
        {"server": name, "right": f"{of_server.num_right} of {FACTS}", "seconds": of_server.seconds}
        for name, of_server in scores.items()
    ]
    title = f"{FACTS} facts in a prompt of {PROMPT_TOKENS:,} tokens, each asked for and answered later in the prompt"
    table = table_of(title, {column: column for column in rows[0]}, rows)
    density = report.pairs.density
    if density is None or not 0 < density < 1:
        rows_by_reason = ", ".join(f"{path} {reason}: {count}" for (path, reason), count in report.rows.items())
        raise BenchError(
            f"{table}\nThe server answered, but its /metrics shows no sparse prefill: density {density}, rows "
            f"{rows_by_reason or 'not counted'}."
        )
    if any(of_server.num_right != FACTS for of_server in scores.values()):
        raise BenchError(
            f"{table}\nAn answer is wrong; this model should find all facts. Please report this with the output above."
        )
    return (
        f"{table}\nBoth servers answer all questions right. Past the first {SETTINGS['min_tokens']:,} tokens, "
        f"sparse-prefill computed {density:.0%} of the (query, key) pairs. {NOT_FASTER_ON_CPU}"
    )
