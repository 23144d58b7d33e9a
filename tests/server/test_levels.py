# SPDX-License-Identifier: Apache-2.0
"""Levels on real servers: answers and cached blocks of each level over the same prompt, and what is refused.

``test_serve.py`` mixes levels in one step, ``test_several_workers.py`` has several workers,
``test_disaggregated.py`` a prefill and a decode server.
"""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import example_package, scenario, server_levels
from tests.helpers.scenario import Answer, Servers, assert_same
from tests.helpers.servers import Server
from tests.helpers.tiny_models import CONFIG
from vllm_sparse_backend.evaluation.vllm_server import ServerError, environment

pytestmark = pytest.mark.server


def ask(server: Server, token_ids: list[int], level: object = None, **more: Any) -> Answer:
    return scenario.ask(server, token_ids, level=level, **more)


@pytest.mark.parametrize(("first", "seed"), [(None, 7000), ("fast", 7001), (0, 7002)])
def test_each_level_has_its_own_blocks_of_a_prompt(servers: Servers, first: object, seed: int) -> None:
    """Each level twice, in any order: the second time, all full blocks come from the cache."""
    token_ids = scenario.prompt(1281, seed=seed)
    levels = [first, *(level for level in (None, "fast", 0) if level != first)]
    cold = {level: ask(servers.ours, token_ids, level) for level in levels}
    cached = {level: ask(servers.ours, token_ids, level) for level in levels}
    assert [answer.cached_tokens for answer in cold.values()] == [0, 0, 0]
    assert [answer.cached_tokens for answer in cached.values()] == [1280, 1280, 1280]
    stock = [ask(servers.stock, token_ids) for _ in range(2)]
    assert (cold[0].token_ids, cold[0].logprobs) == (stock[0].token_ids, stock[0].logprobs)  # to the bit
    assert_same(cached[0], stock[1])
    for level in None, "fast":
        assert cold[level].logprobs != pytest.approx(stock[0].logprobs, abs=1e-3)
    assert ask(servers.ours, token_ids, 1).cached_tokens == 1280  # the name of the default level


X = {"vllm_xargs": {"sparse_prefill": 0}}
FEW: dict[str, Any] = {"max_tokens": 2}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, **FEW}


def text(seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(("level", "prompt", "sparse", "exact", "tokens")) for _ in range(400))


def test_beams_run_at_the_default_level_and_no_other(servers: Servers) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": text(1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text(1)}]}),
        ("/invocations", {"prompt": text(1)}),
    ):
        body = {"model": servers.ours.model, **prompt, **BEAMS}
        with pytest.raises(ServerError, match=r"answered 400: .*'sparse_prefill'.*beam search makes new sampling"):
            servers.ours.post(path, body | X)
        assert len(servers.ours.post(path, body)["choices"]) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generative_scoring", {"query": text(2), "items": ["yes", "no"], "label_token_ids": [40, 41]}),
        ("/v1/systemone", {"state": "s", "questions": {"q": {"type": "choice", "text": "?", "options": ["a", "b"]}}}),
    ],
)
def test_a_level_that_vllm_would_drop_is_refused(servers: Servers, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match=r"answered 400: .*given the key 'sparse_prefill'"):
        servers.ours.post(path, {"model": servers.ours.model, **body, **X})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": text(10), **FEW}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text(11)}], **FEW}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": text(i)}] for i in (12, 13)], **FEW}),
        ("/v1/responses", {"input": text(14), "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": text(15)}], **FEW}),
        ("/invocations", {"prompt": text(16), **FEW}),
    ],
)
def test_every_other_path_honours_a_level(servers: Servers, path: str, body: dict[str, Any]) -> None:
    assert_honours(servers.ours, path, {"model": servers.ours.model, **body})


def assert_honours(ours: Server, path: str, body: dict[str, Any]) -> None:
    def with_level(key: str, value: object) -> dict[str, Any]:
        if "sampling_params" in body:
            return body | {"sampling_params": FEW | {"extra_args": {key: value}}}
        return body | {"vllm_xargs": {key: value}}

    before = scenario.counted(ours)
    ours.post_text(path, with_level("sparse_prefill", 0))
    assert not scenario.counted(ours, before).by("rows", "path")["sparse"]
    ours.post_text(path, body)
    assert scenario.counted(ours, before).by("rows", "path")["sparse"]
    with pytest.raises(ServerError, match=r"answered 400: .*sparse_prefill: given 'zzz', expected one of 0 \(exact\)"):
        ours.post_text(path, with_level("sparse_prefill", "zzz"))
    with pytest.raises(ServerError, match=r"answered 400: .*given 'sparse-prefill', expected the key 'sparse_prefill'"):
        ours.post_text(path, with_level("sparse-prefill", 0))


def test_a_stream_reports_a_refused_level_in_its_first_event(servers: Servers) -> None:
    body = {"model": servers.ours.model, "prompt": text(20), "stream": True, "vllm_xargs": {"sparse_prefill": "zzz"}}
    first, *_ = servers.ours.post_text("/v1/completions", body).splitlines()
    error = json.loads(first.removeprefix("data: "))["error"]
    assert (error["code"], error["message"].split(",")[0]) == (400, "vllm_xargs sparse_prefill: given 'zzz'")


STRIDED = {"method": "strided", "sink_tokens": 64, "local_tokens": 128, "stride_tokens": 512}
"""Setting of the method that docs/adding_a_method.md adds in a package of its own."""


@pytest.mark.full
class TestConfiguredByNestedYaml:
    """A server with an adapter, a method of another package, and a cache too small for all requests, configured by a
    file with nested settings (vllm#33193)."""

    @pytest.fixture(scope="class")
    def ours(
        self, small_model: Path, lora_args: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("yaml")
        levels = {"everything": server_levels.ALL["everything"], "strided": {"default": STRIDED}}
        env = example_package.install(folder / "installed")
        profile = {"format": 1, "model": "any", "min_tokens": server_levels.MIN_TOKENS, "min_query_tokens": 1}
        profile |= {
            "level": "mass",
            "default": {"method": "top_p", "kept_mass": 0.6, "ramp_tokens": 1, "peak_share": 0.2},
            "levels": levels,
        }
        (folder / "profile.yaml").write_text(yaml.safe_dump(profile))
        config = {
            "attention-backend": "sparse-prefill",
            "additional-config": {
                "sparse_prefill": {"profile": str(folder / "profile.yaml"), "requests": {"default": "everything"}}
            },
            "max-model-len": 4096,
            "max-num-batched-tokens": scenario.CHUNK_TOKENS,
            "long-prefill-token-threshold": 128,
            "scheduling-policy": "priority",
        }
        (path := folder / "config.yaml").write_text(yaml.safe_dump(config))
        args = ("--config", str(path), "--enable-prompt-tokens-details", "--enable-scale-out", *lora_args)
        args += ("--kv-cache-memory-bytes", str(32 << 20))  # room for 8,192 tokens
        with Server(small_model, (*args, *scenario.overcommit_args()), env=env) as server:
            yield server

    def test_the_settings_are_those_of_the_file(self, ours: Server) -> None:
        assert scenario.counted(ours).by("layers", "attention") == {"torch": CONFIG["num_hidden_layers"]}

    def test_p_and_exact_over_the_same_prompt(self, ours: Server, servers: Servers) -> None:
        token_ids = scenario.prompt(1281, seed=7200)
        order: list[object] = [0.9, 0, 0.3, "mass", 0.9, 0, 0.3, "mass"]
        answers = [ask(ours, token_ids, level) for level in order]
        assert [answer.cached_tokens for answer in answers] == [0] * 4 + [1280] * 4
        assert_same(answers[1], ask(servers.stock, token_ids))
        assert_same(answers[5], ask(servers.stock, token_ids))
        differences = [abs(a.logprobs[0] - answers[1].logprobs[0]) for a in (answers[0], answers[2])]
        assert differences[0] < differences[1] > 1e-3

    def test_a_method_of_another_package(self, ours: Server) -> None:
        before = scenario.counted(ours)
        ask(ours, scenario.prompt(2001, seed=11), "strided")
        report = scenario.counted(ours, before)
        assert set(scenario.layers_of(report)) == set(range(CONFIG["num_hidden_layers"]))
        assert all(0 < layer.density < 0.7 for layer in scenario.layers_of(report).values())

    def test_tokens_in_and_out(self, ours: Server) -> None:
        body = {"model": ours.model, "token_ids": [2, *range(5, 700)], "sampling_params": FEW}
        assert_honours(ours, "/inference/v1/generate", body)
        with pytest.raises(ServerError, match=r"answered 400: .*reads a level from sampling_params\.extra_args"):
            ours.post("/inference/v1/generate", body | X)

    def test_levels_beside_an_adapter(self, ours: Server, bystander: Server) -> None:
        token_ids = scenario.prompt(1281, seed=7300)
        names = ("adapter", ours.model)
        for _ in range(2):
            for name, level in product(names, ("mass", 0)):
                answer = ask(ours, token_ids, level, model=name)
                expected = ask(bystander, token_ids, model=name)
                if level == 0:
                    assert_same(answer, expected)
                else:
                    assert answer.logprobs != pytest.approx(expected.logprobs, abs=1e-3)
            assert answer.cached_tokens in (0, 1280)
        exact = [ask(ours, token_ids, 0, model=name) for name in names]
        assert exact[0].logprobs != pytest.approx(exact[1].logprobs, abs=1e-3)

    def test_beams(self, ours: Server, servers: Servers) -> None:
        """Several sequences that continue the same prompt past ``min_tokens``, at the server's default level."""
        body = {"prompt": scenario.prompt(600, seed=1003), "n": 3, "max_tokens": 4, "ignore_eos": True}
        body |= {"use_beam_search": True, "temperature": 0}
        texts = []
        for server in (servers.stock, ours):
            choices = server.post("/v1/completions", body | {"model": server.model})["choices"]
            texts.append([choice["text"] for choice in choices])
        assert len(texts[0]) == 3
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("level", ["exact", "everything"])
    def test_preemption_by_priority(self, ours: Server, servers: Servers, level: str) -> None:
        """vllm#9342: later requests with a higher priority take the memory of running requests."""
        prompts = [scenario.prompt(1000 + 7 * i, seed=5000 + i) for i in range(12)]

        def preempted() -> float:
            page = ours.get("/metrics")
            return sum(float(value) for value in re.findall(r"(?m)^vllm:num_preemptions_total{.*} (\S+)$", page))

        def ask_urgently(number: int) -> Answer:
            return ask(ours, prompts[number], level, priority=-number, max_tokens=48)

        before = preempted()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask_urgently, range(len(prompts))))
        assert preempted() > before
        for token_ids, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == ask(servers.stock, token_ids, max_tokens=48).token_ids


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
settings, prompt = json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(sys.argv[1], max_model_len=8192, max_num_batched_tokens=512, dtype="float32", enforce_eager=True,
          kv_cache_memory_bytes=256 << 20, attention_backend="sparse-prefill",
          additional_config={"sparse_prefill": settings})
def ask(level):
    extra_args = None if level is None else {"sparse_prefill": level}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0, extra_args=extra_args)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (choice,) = output.outputs
    logprobs = [step[token].logprob for step, token in zip(choice.logprobs, choice.token_ids)]
    return [list(choice.token_ids), logprobs, output.num_cached_tokens or 0]
answers = [ask(level) for level in (None, 0, 0, None)]
try:
    ask("fastest")
except Exception as error:
    answers.append(str(error))
print("ANSWERS", json.dumps(answers))
"""


@pytest.mark.full
def test_offline(servers: Servers, small_model: Path) -> None:
    """``LLM`` in one process, in which the front process, the core and the worker are the same."""
    token_ids = scenario.prompt(1281, seed=7400)
    settings = {"method": "a_shape", "params": {"sink_tokens": 64, "local_tokens": 128}, "min_tokens": 256,
                "min_query_tokens": 1}  # fmt: skip
    command = [sys.executable, "-c", OFFLINE, str(small_model), json.dumps(settings), json.dumps(token_ids)]
    env = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    *answers, refused = json.loads(line.removeprefix("ANSWERS "))
    sparse, exact, cached, again = (Answer(tuple(tokens), tuple(logprobs), n) for tokens, logprobs, n in answers)
    stock = ask(servers.stock, token_ids)
    assert exact == stock
    assert_same(cached, stock)
    assert sparse.logprobs != pytest.approx(stock.logprobs, abs=1e-3)
    assert [answer.cached_tokens for answer in (sparse, exact, cached, again)] == [0, 0, 1280, 1280]
    assert "given 'fastest', expected one of 0 (exact)" in refused
