# SPDX-License-Identifier: Apache-2.0
"""Requests of all levels on a GPU: the rows of each request in both of vLLM's runners, vLLM's options, and load.

Exact prompts have the same length, sparse prompts have another, and each is a single row. The number of rows
of each kind is therefore known, and the counters must match. Under every option, a trained model finds its facts,
sparse and exact. Finally, eight clients send five hundred requests: exact requests have stock's tokens, and
memory does not grow.
"""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.helpers import scenario, server_levels
from tests.helpers.mixed_load import SERVER_ENV, ask_mixed, resident_bytes_of
from tests.helpers.servers import Server
from tests.helpers.tiny_models import CONFIG
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation.answer_prompts import build_prompt
from vllm_sparse_backend.evaluation.client import Endpoint
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.vllm_server import sparse_args
from vllm_sparse_backend.prompts.texts import prose

pytestmark = [pytest.mark.gpu, pytest.mark.server]
pytest.importorskip("vllm")

NUM_EACH, EXACT_TOKENS, SPARSE_TOKENS, MIN_TOKENS, RUNNER = 4, 2000, 3000, 256, "VLLM_USE_V2_MODEL_RUNNER"
PARAMS = {"sink_tokens": 64, "local_tokens": 128}
SETTINGS = {"method": "a_shape", "params": PARAMS, "min_tokens": MIN_TOKENS, "min_query_tokens": 1}
ARGS = ("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-batched-tokens", "32768")
GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'  # vLLM's compiled models are not under test
# With a fixed cache size, vLLM does not measure free memory, which other processes change.
ROOM = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30))
DETAILS = (*ROOM, "--enable-prompt-tokens-details", "--compilation-config", GRAPHS)
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LAYOUT = "VLLM_KV_CACHE_LAYOUT"


class Option(NamedTuple):
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


OPTIONS = {
    "whole and piecewise graphs": Option(("--compilation-config", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}')),
    "drafts by n-grams": Option(("--speculative-config", json.dumps(NGRAMS))),
    "asynchronous": Option(("--async-scheduling",)),
    "synchronous": Option(("--no-async-scheduling",)),
    "the older runner": Option(env=((RUNNER, "0"),)),
    "fp8 cache": Option(("--kv-cache-dtype", "fp8")),
    # Room for little more than the longest prompt, and steps that start the next prompt at the same time.
    "no room for all": Option(("--kv-cache-memory-bytes", str(22 << 20), "--max-num-batched-tokens", "4096")),
    "heads before tokens": Option(env=((LAYOUT, "LBHNC"),)),
    "blocks outermost": Option(env=((LAYOUT, "BLHNC"),)),
}
"""vLLM's options, by name. A token of the bundled model takes 2.5 KiB of the cache."""
OF_FACTS = {"min_tokens": 512, "min_query_tokens": 1, "params": {"ramp_tokens": 1}}


@pytest.mark.parametrize("runner", ["0", "1"], ids=["the older runner", "Model Runner V2"])
def test_rows_of_each_level(small_model: Path, runner: str) -> None:
    with Server(small_model, (*sparse_args(SETTINGS), *ARGS, *DETAILS), env={RUNNER: runner}) as server:
        check(server)


def check(server: Server) -> None:
    exact = {f"exact {i}": (scenario.prompt(EXACT_TOKENS, seed=i), 8, 0) for i in range(NUM_EACH)}
    sparse = {f"sparse {i}": (scenario.prompt(SPARSE_TOKENS, seed=100 + i), 8, 1) for i in range(NUM_EACH)}
    dealt = [pair for pairs in zip(exact.items(), sparse.items(), strict=True) for pair in pairs]
    answers = scenario.ask_together(server, dict(dealt))
    report = scenario.counted(server)
    assert report.rows["dense", Fallback.REQUESTED] == NUM_EACH
    assert report.by("rows", "path")["sparse"] == NUM_EACH
    assert report.by("rows", "path")["dense"] == NUM_EACH
    assert set(scenario.layers_of(report)) == set(range(CONFIG["num_hidden_layers"]))
    assert all(0 < pairs.density < 1 for pairs in scenario.layers_of(report).values())
    # An exact request does not read a sparse request's blocks, except for its first positions; its answer differs.
    prompt, *_ = sparse["sparse 0"]
    first, second, default = (scenario.ask(server, prompt, level=level) for level in (0, "exact", None))
    assert (first.cached_tokens, second.cached_tokens >= 2800, default.cached_tokens >= 2800) == (
        MIN_TOKENS,
        True,
        True,
    )
    assert first.logprobs != pytest.approx(answers["sparse 0"].logprobs, abs=1e-2)


@pytest.mark.parametrize("option", OPTIONS)
def test_facts_are_found_under_every_option(option: str) -> None:
    """Eight clients, cached prefixes, chunks of 512 tokens (4,096 if memory is short), sparse and exact."""
    settings, layout = OPTIONS[option], dict(OPTIONS[option].env).get(LAYOUT)
    if layout:
        pytest.importorskip("vllm.v1.kv_cache_layout", reason="this vLLM asks no backend for its layouts")
    if option == "fp8 cache" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fp8 caches are for GPUs of compute capability 9.0 (H100, H200)")
    args = (*sparse_args(OF_FACTS), *scenario.SERVER_ARGS, "--dtype", "bfloat16", *DETAILS, *settings.args)
    if option == "no room for all":
        args += scenario.overcommit_args()
    prompts, values = zip(*asked_for_facts(48))
    with Server(BUNDLED, args, env=dict(settings.env)) as server, ThreadPoolExecutor(8) as pool:
        for level in (None, 0):
            answers = list(pool.map(partial(scenario.ask, server, max_tokens=VALUE_TOKENS, level=level), prompts))
            num_right = sum(answer.token_ids == tuple(value) for answer, value in zip(answers, values))
            assert num_right >= 46, (option, level, num_right)
        page, log = scenario.fresh_page(server), server.log_path.read_text(errors="replace")
    report = parse_metrics(page)
    assert 0 < report.pairs.density < 1
    assert report.by("rows", "path")["sparse"] > len(prompts)
    assert report.rows["dense", Fallback.REQUESTED] > len(prompts)
    preempted = sum(float(n) for n in re.findall(r"(?m)^vllm:num_preemptions_total{.*} (\S+)$", page))
    assert (preempted > 0) == (option == "no room for all")
    if layout:
        assert f"Using {layout} KV cache layout" in log


def test_five_hundred_requests(tmp_path: Path) -> None:
    """A trained model answers questions about facts, so its answers do not depend on the last bit."""
    settings, args = (
        server_levels.write(tmp_path, "high", "fast"),
        (*scenario.SERVER_ARGS, "--dtype", "bfloat16", *DETAILS),
    )
    with (
        Server(BUNDLED, args, env={"VLLM_PLUGINS": "none"}) as stock,
        Server(BUNDLED, (*sparse_args(settings), *args, "--api-server-count", "2"), env=SERVER_ENV) as server,
    ):
        endpoint, prompts = Endpoint.connect("sparse", server.url), [ids for ids, _ in asked_for_facts(500)]
        first = ask_mixed(server, stock, endpoint, prompts[:100])
        before = resident_bytes_of(server.pid)
        second = ask_mixed(server, stock, endpoint, prompts[100:])
        after = resident_bytes_of(server.pid)
    assert (first.differing, second.differing, first.fallen, second.fallen) == ([], [], set(), set())
    assert first.exact + second.exact == 200
    assert after < 1.02 * before


VALUE_TOKENS = 7
"""Number of a value's first tokens that are compared."""


def asked_for_facts(number: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts that end before a value, and the start of the value.

    Each text has three prompts, one for each of three facts. Texts alternate, so concurrent prompts share no pages.
    """
    from tokenizers import Tokenizer

    tokenizer, facts = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), list[tuple[list[int], list[int]]]()
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    for seed in range(-(-number // 3)):
        rng = random.Random(seed)
        text = encode(prose(8000, seed))
        built = build_prompt(encode, [0], text, rng.randrange(1500, 6000), facts(rng, 12, 0).threads, rng)
        ids = built.token_ids
        facts += [(ids[:begin], ids[begin:end][:VALUE_TOKENS]) for begin, end in built.answers[-3:]]
    return [fact for turn in range(3) for fact in facts[turn::3]][:number]
