# SPDX-License-Identifier: Apache-2.0
"""Requests with a level: from the endpoint, over the hashes of cached blocks, to the rows of a step."""

import asyncio
import json
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import pytest

pytest.importorskip("vllm", reason="needs vLLM")
import numpy
import torch
import vllm
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from vllm.config import AttentionConfig, KVTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.request import Request as EngineRequest

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.crossover_cases import entry, written
from tests.helpers.folders import profile_file
from tests.helpers.mixed_batches import CLOSE, MIN_TOKENS, MIXED, SPARSE_ROWS, dense_tokens, reference
from tests.helpers.vllm_objects import make_builder, make_common, make_layers, make_step, recorder_of
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.config.request_levels import MARK, SERVER_LEVEL, Mark, RequestLevel, Salt
from vllm_sparse_backend.plugin import register
from vllm_sparse_backend.serving import compat, hooks, level_policy
from vllm_sparse_backend.serving.frontend import middleware
from vllm_sparse_backend.serving.frontend.middleware import LevelsEndpoint, LevelsMiddleware
from vllm_sparse_backend.serving.level_policy import choices
from vllm_sparse_backend.serving.worker import step_context
from vllm_sparse_backend.serving.worker.layer_adoption import LayerAdoption
from vllm_sparse_backend.serving.worker.layer_level import LayerLevel
from vllm_sparse_kernels.attention import PORTABLE

EXACT = Mark("exact", None, Salt("exact", 100))
FAST = Mark("fast", None, Salt("fast", 100))
BLOCK_TOKENS = 16
LEVELS: dict[str, Any] = {
    "level": "high",
    "dense_layers": [0, 1],
    "default": {"method": "a_shape", "sink_tokens": 16, "local_tokens": 16},
    "levels": {"fast": {"dense_layers": [0, 3], "default": {"method": "block_sparse", "top_blocks": 1}}},
}


def started(config: Any, *names: str) -> tuple[Any, None, Namespace]:
    """Return an endpoint's arguments for a server that has started."""
    return SimpleNamespace(vllm_config=config), None, Namespace(served_model_name=list(names) or None, model="m")


def asking(level: object) -> dict[str, Any]:
    return {"vllm_xargs": {"sparse_prefill": level}}


@pytest.fixture
def levels(configured: Callable[..., Any], tmp_path: Any) -> Any:
    """Return a configuration with two levels in its profile, and layers that are dense at neither, one or both of
    them."""
    profile = profile_file(tmp_path, **LEVELS)
    return configured(profile=profile, min_tokens=MIN_TOKENS, min_query_tokens=1, check_index=True)


class Owner:
    def method(self, number: int) -> int:
        return number

    @classmethod
    def of_class(cls, number: int) -> tuple[type, int]:
        return cls, number


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number: original(self, 2 * number)


def test_a_hook_is_put_around_once() -> None:
    owner = type("Owner", (Owner,), {})
    for _ in range(3):
        hooks.put_around(owner, "method", doubled, ("self", "number"))
    assert owner().method(3) == 6
    assert Owner().method(3) == 3
    hooks.put_around(owner, "of_class", lambda original: lambda cls, number: original(number + 1))
    assert owner.of_class(1) == (owner, 2)


def test_what_a_hook_does_not_fit_is_an_error() -> None:
    """Missing functions are covered in test_plugin.py."""
    said = r"Owner\.method\(self, number: int\) -> int has no more, yet, expected it as in 0\.26 to 0\.33"
    with pytest.raises(ConfigurationError, match=rf"vLLM \d.*{said}"):
        hooks.put_around(Owner, "method", doubled, ("number", "more", "yet"))


class TestBlocks:
    @pytest.fixture(autouse=True, scope="class")
    def in_core(self) -> None:
        hooks.install_in_core()
        kv_cache_utils.init_none_hash(self.hashed)

    @staticmethod
    def hashed(value: Any) -> bytes:
        import hashlib

        return hashlib.sha256(repr(value).encode()).digest()

    def blocks(self, mark: Mark | None = None, num_tokens: int = 200, decoded: int = 0, **options: Any) -> list[bytes]:
        params = SamplingParams(max_tokens=99, extra_args=None if mark is None else mark.write({"other": 1}))
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, self.hashed)
        request = EngineRequest("r", list(range(num_tokens)), params, None, block_hasher=hasher, **options)
        for token in range(num_tokens, num_tokens + decoded):
            request.append_output_token_ids(token)
        return list(request.block_hashes)

    @pytest.mark.parametrize(("exact_tokens", "shared"), [(0, 0), (15, 0), (16, 1), (17, 1), (96, 6), (500, 12)])
    def test_levels_share_the_exact_positions_and_nothing_else(self, exact_tokens: int, shared: int) -> None:
        """Hashes depend on the level from the first block on that contains more than the exact positions."""
        marks = [None, *(Mark(level, None, Salt(level, exact_tokens)) for level in ("exact", "fast"))]
        hashes_by_mark = [self.blocks(mark) for mark in marks]
        assert len({tuple(hashes[:shared]) for hashes in hashes_by_mark}) == 1
        unshared = [block_hash for hashes in hashes_by_mark for block_hash in hashes[shared:]]
        assert len({*unshared}) == len(unshared) == 3 * (12 - shared)
        assert [self.blocks(mark) for mark in marks] == hashes_by_mark

    def test_tokens_that_were_generated_too(self) -> None:
        assert self.blocks(EXACT, 70, decoded=130) == self.blocks(EXACT, 200)
        assert self.blocks(EXACT, 70, decoded=130) != self.blocks(None, 70, decoded=130)

    def test_a_requests_own_salt_counts_as_ever(self) -> None:
        salted = self.blocks(EXACT, cache_salt="user")
        assert not {*salted} & {*self.blocks(EXACT)}
        assert salted[:6] == self.blocks(cache_salt="user")[:6]

    @pytest.mark.parametrize("cache_salt", [None, "user"])
    @pytest.mark.parametrize("exact_tokens", [0, 95, 96, 97])
    def test_prompts_around_whole_blocks_share_what_longer_ones_have_cached(
        self, exact_tokens: int, cache_salt: str | None
    ) -> None:
        """vllm#51441: prompts of some lengths found no cached blocks, and left none that others could find."""
        mark = Mark("fast", None, Salt("fast", exact_tokens))
        options = {} if cache_salt is None else {"cache_salt": cache_salt}
        longest = self.blocks(mark, 200, **options)
        for num_tokens in (15, 16, 17, 79, 80, 81, 95, 96, 97, 111, 112, 113, 199):
            assert self.blocks(mark, num_tokens, **options) == longest[: num_tokens // BLOCK_TOKENS]

    @pytest.mark.parametrize(("exact_tokens", "shared"), [(0, 0), (47, 0), (48, 1), (95, 1), (96, 2), (500, 4)])
    def test_blocks_of_several_hashes_are_shared_by_levels_only_if_all_of_them_are(
        self, exact_tokens: int, shared: int
    ) -> None:
        """Mooncake#4153: hybrids have blocks of many hashes, and a store took a block if its first hashes matched.

        A block with positions past the exact ones has a different hash for each level, at any length.
        """
        merged = [
            list(kv_cache_utils.BlockHashListWithBlockSize(self.blocks(mark), BLOCK_TOKENS, 3 * BLOCK_TOKENS))
            for mark in (None, *(Mark(level, None, Salt(level, exact_tokens)) for level in ("exact", "fast")))
        ]
        assert [len(hashes) for hashes in merged] == [4] * 3
        assert len({tuple(hashes[:shared]) for hashes in merged}) == 1
        unshared = [block_hash for hashes in merged for block_hash in hashes[shared:]]
        assert len({*unshared}) == len(unshared) == 3 * (4 - shared)

    def test_events_and_hashes_have_the_same_keys(self) -> None:
        assert block_pool.generate_block_hash_extra_keys is kv_cache_utils.generate_block_hash_extra_keys
        request = SimpleNamespace(
            sampling_params=SamplingParams(extra_args=EXACT.write(None)), mm_features=[], lora_request=None,
            cache_salt=None, prompt_embeds=None,
        )  # fmt: skip
        keys = [block_pool.generate_block_hash_extra_keys(request, i, i + 16, 0)[0] for i in range(0, 160, 16)]
        assert [i for i, key in enumerate(keys) if key] == [6]
        assert keys[6] == (("sparse_prefill", "sparse_prefill=exact"),)
        if hasattr(kv_cache_utils, "to_event_extra_keys"):  # otherwise they go into events unchanged
            assert kv_cache_utils.to_event_extra_keys(keys)[6] == ("sparse_prefill=exact",)


class TestFront:
    """Levels of requests and refusals are tested in tests/config/test_request_levels.py, and on servers in
    tests/server."""

    def test_other_backends_take_what_they_are_given(self, levels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        class Front:
            vllm_config = levels

            def process_inputs(self, request_id: str, prompt: str, params: Any) -> Any:
                return SimpleNamespace(sampling_params=params.clone())

        hooks.put_around(Front, "process_inputs", hooks._marked, ("params",))
        wrong = SamplingParams(extra_args={"sparse_prefill": "fastest"})
        with pytest.raises(VLLMValidationError, match="given 'fastest', expected one of 0"):
            Front().process_inputs("r", "prompt", wrong)
        monkeypatch.setattr(levels.attention_config, "backend", None)
        assert Front().process_inputs("r", "prompt", wrong).sampling_params.extra_args == wrong.extra_args

    def test_vllms_own_are_what_the_hooks_expect(self) -> None:
        from vllm import plugins
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as NewerRunner
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        hooks.install_in_front()
        functions = [AsyncLLM.generate, InputProcessor.process_inputs, plugins.load_endpoint_plugins]
        for is_newer, runner in enumerate((GPUModelRunner, NewerRunner)):
            model = SimpleNamespace(is_hybrid=True)
            hooks.install_in_worker(SimpleNamespace(use_v2_model_runner=bool(is_newer), model_config=model))
            functions.append(runner.execute_model)
        assert all(getattr(function, hooks.OURS) for function in (*functions, NewerRunner.prepare_attn))

    def test_on_a_server_that_pools(self, configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Every row runs dense on vLLM's own path; ``on`` lets rows run sparse. Requests get the server's level."""
        for policy, server_value, other in ({}, 0, 1), ({"default": "on"}, 1, 0):
            config = configured(method="a_shape", min_tokens=MIN_TOKENS, min_query_tokens=1, requests=policy)
            monkeypatch.setattr(config.model_config, "runner_type", "pooling")
            known = choices(config)
            assert known.permit(server_value) == known.unasked()
            with pytest.raises(
                ValueError, match="but this server runs a pooling model, which has one level for all requests"
            ):
                known.permit(other)
            made = make_layers(config, range(4))
            builder = make_builder(config, made)
            assert builder.sparse_layers == (() if server_value == 0 else (0, 1, 2, 3))
            assert (made[0].impl.worker.reserve_memory() is None) == (server_value == 0)
            step = make_step(made[0], MIXED)
            metadata = builder.build(0, step.common)
            exact = torch.equal(step.forward(made[0], metadata), step.by_dense_backend(made[0], builder))
            assert exact == (server_value == 0)
        monkeypatch.setitem(config.additional_config["sparse_prefill"], "requests", {"models": {"a": "on"}})
        with pytest.raises(
            ConfigurationError, match=r"given default, exact as default, but this server runs a pooling model"
        ):
            choices(config)

    @pytest.mark.parametrize("policy", [{"default": "exact"}, {"default": "fast"}, {"models": {"a": "exact"}}])
    def test_who_gets_what_unasked_has_vllms_own_hashes(
        self, levels: Any, monkeypatch: pytest.MonkeyPatch, policy: Any
    ) -> None:
        """Routers can then find the blocks of most requests. If nothing keeps levels apart, several levels are refused
        at start."""
        monkeypatch.setitem(levels.additional_config["sparse_prefill"], "requests", policy)
        known = choices(levels)
        assert known.mark(known.unasked()).salt is None
        assert set(known.salts) == {DEFAULT, "exact", "fast"} - {known.default}
        monkeypatch.setattr(levels.parallel_config, "enable_dbo", True)
        with pytest.raises(ConfigurationError, match=r"requests: given .* but this server splits steps"):
            choices(levels)


class Asgi:
    """An app behind the middleware, like vLLM's apps. It reads bodies, or does not."""

    def __init__(self, endpoint: LevelsEndpoint, reads: bool = True) -> None:
        self.endpoint, self.reads = endpoint, reads
        self.ran = 0
        self.asked_for = 0
        """Number of messages of a body that were received."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await Request(scope, receive).body() if self.reads else b""
        self.ran += 1
        http_request = level_policy.HTTP_REQUEST.get()
        headers = {"level": str(http_request.level) if http_request is not None else ""}
        await PlainTextResponse(body, 200 if self.reads else 404, headers)(scope, receive, send)

    def post(self, path: str, body: Any, *, kind: str = "application/json", parts: int = 2) -> tuple[int, str]:
        """Return the answer's status, and either the request's level or the error."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(content) // parts) or 1
        chunks = [content[i : i + size] for i in range(0, len(content), size)] or [b""]
        messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks[:-1]]
        messages.append({"type": "http.request", "body": chunks[-1]})
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            self.asked_for += 1
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/root" + path, "root_path": "/root", "headers": headers}
        asyncio.run(LevelsMiddleware(self, self.endpoint)(scope, receive, send))
        start, *others = sent
        assert [message["type"] for message in sent].count("http.response.start") == 1
        answer = b"".join(message["body"] for message in others)
        if start["status"] == 400:
            return 400, json.loads(answer)["error"]["message"]
        assert not self.reads or answer == content
        return start["status"], dict(start["headers"])[b"level"].decode()


def nested(*keys: str, value: object = 0) -> Any:
    """Return {keys[0]: {keys[1]: … value}}; a number stands for a list that contains the remaining levels."""
    for key in reversed(keys):
        value = [value] if key.isdigit() else {key: value}
    return value


PLACES_OF_NO_LEVEL = [
    (), ("extra_body",), ("extra_body", "vllm_xargs"), ("extra_body", "extra_body", "vllm_xargs"), ("extra_args",),
    ("sampling_params",), ("sampling_params", "vllm_xargs"), ("vllm-xargs",), ("vllm_xarg",), ("vllmXargs",),
    ("metadata",), ("chat_template_kwargs",), ("messages", "0"), ("messages", "0", "vllm_xargs"),
    ("messages", "0", "content", "0", "vllm_xargs"), ("input", "0", "vllm_xargs"), ("vllm_xargs", "vllm_xargs"),
    ("mm_processor_kwargs",), ("kv_transfer_params",), ("a", "b", "c", "d", "e", "f", "g", "h"),
]  # fmt: skip
SPELLINGS = [
    "sparse_prefill",
    "sparse-prefill",
    "sparse_prefil",
    "sparsePrefill",
    "SPARSE_PREFILL",
]


T = TypeVar("T")


def counted_steps(work: Callable[[], T]) -> tuple[T, int]:
    """Return what ``work`` returns, and how many lines, calls and returns of Python it took."""
    num_steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_steps
        num_steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return result, num_steps


class TestWaysIn:
    """The middleware without a server; tests/server/test_serve.py sends requests to real servers on every path."""

    @pytest.fixture
    def app(self, levels: Any, monkeypatch: pytest.MonkeyPatch) -> Asgi:
        policy = {"models": {"b": "exact"}, "default": "fast"}
        monkeypatch.setitem(levels.additional_config["sparse_prefill"], "requests", policy)
        asyncio.run((endpoint := LevelsEndpoint()).init_state(*started(levels, "a", "b")))
        return Asgi(endpoint)

    @pytest.fixture
    def plain(self, levels: Any, monkeypatch: pytest.MonkeyPatch) -> Asgi:
        """An app of a server whose levels do not depend on the requested model, so most bodies are not parsed."""
        monkeypatch.setitem(levels.additional_config["sparse_prefill"], "requests", {})
        asyncio.run((endpoint := LevelsEndpoint()).init_state(*started(levels)))
        return Asgi(endpoint)

    @pytest.mark.parametrize(
        ("body", "level"),
        [
            ({}, "fast"), ({"model": "b"}, "exact"), ({"model": "b", **asking(1)}, DEFAULT), (asking("exact"), "exact"),
            ({"sampling_params": {"extra_args": {"sparse_prefill": 0}}}, "exact"), (b"no json at all", "fast"),
            ([1, 2], "fast"), ({"vllm_xargs": None, "model": ["b"]}, "fast"), (b"[" * 100_000, "fast"),
            (json.dumps(asking(0)).encode("utf-16"), "exact"),
            (b'{"vllm_xargs": {"sp\\u0061rse_pre\\u0066ill": 0}}', "exact"),
        ],
    )  # fmt: skip
    def test_bodies_and_the_levels_that_they_ask_for(self, app: Asgi, plain: Asgi, body: Any, level: str) -> None:
        """The middleware reports no errors that vLLM itself will report."""
        for parts in 1, 2, 40:
            assert app.post("/v1/completions", body, parts=parts) == (200, level)
        unasked = plain.post("/v1/completions", body)
        assert unasked[0] == 200
        if level == "exact" and b"model" not in (body if isinstance(body, bytes) else json.dumps(body).encode()):
            assert unasked[1] == "exact"

    @pytest.mark.parametrize(
        "body",
        [
            {"tools": [{"function": {"name": "serve", "parameters": {"properties": {"sparse_prefill": {}}}}}]},
            {"response_format": {"json_schema": {"schema": {"properties": {"sparse_prefill": {}}}}}},
            {"messages": [{"content": [{"type": "tool_use", "input": {"sparse_prefill": 0}}]}]},
            {"messages": [{"content": 'set {"sparse_prefill": 0}'}]},
            {"metadata": {"sparse": 1, "prefill": 2, "sparse_prefill_" + 40 * "x": 3}},
        ],
    )
    def test_what_users_write_where_they_like(self, plain: Asgi, body: Any) -> None:
        assert plain.post("/v1/chat/completions", body) == (200, DEFAULT)

    @pytest.mark.parametrize("kind", ["multipart/form-data", "Multipart/Form-Data", "MULTIPART/FORM-DATA"])
    def test_forms(self, app: Asgi, plain: Asgi, kind: str) -> None:
        part = '--X\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n--X--\r\n'
        for post in app.post, plain.post:
            for value, status, said in (0, 200, "exact"), (3, 400, "given 3, expected one of 0"):
                form = part.format("vllm_xargs", json.dumps({"sparse_prefill": value})).encode()
                answer = post("/v1/audio/transcriptions", form, kind=f"{kind}; boundary=X")
                assert answer[0] == status
                assert said in answer[1]
            for name, text in ("sparse_prefill", "0"), ("extra_body", json.dumps(asking(0))):
                form = part.format(name, text).encode()
                assert post("/v1/audio/transcriptions", form, kind=f"{kind}; boundary=X")[0] == 400
            assert post("/v1/audio/transcriptions", b"--X broken, sparse", kind=f"{kind}; boundary=X")[0] == 200

    @pytest.mark.parametrize(
        ("path", "body", "said"),
        [
            ("/v1/responses", {**asking("zzz"), "stream": True}, "given 'zzz', expected one of 0"),
            ("/v1/completions", {"sparse_prefill": 0}, "given 'sparse_prefill', expected it in vllm_xargs"),
            (
                "/v1/completions",
                {"extra_args": {"sparse_prefill": 0}},
                "extra_args: given 'sparse_prefill', expected it",
            ),
            ("/v1/completions", {"extra_body": {"sparse-prefill": 0}}, "extra_body: given 'sparse-prefill'"),
            ("/v1/completions", {"vllm_xargs": {MARK: ["fast", None, 0]}}, f"vllm_xargs: given '{MARK}'"),
            ("/v1/completions", {**asking(0), "sampling_params": {"extra_args": asking(0)["vllm_xargs"]}}, "one place"),
            ("/v1/completions", {"extra_body": asking(0)}, "extra_body is an argument of openai's Python client"),
            ("/v1/completions", asking([0] * 1_000_000), "given [0, 0, "),
            ("/tokenize", asking(0), "POST /tokenize prefills no prompt"),
            ("/sleep", asking(0), "POST /sleep prefills no prompt"),
        ],
    )
    def test_what_is_refused(self, app: Asgi, path: str, body: Any, said: str) -> None:
        app.reads = path != "/sleep"
        status, answer = app.post(path, body)
        assert (status, said in answer) == (400, True), answer
        assert app.ran == 0

    @pytest.mark.parametrize("spelling", SPELLINGS)
    @pytest.mark.parametrize("place", PLACES_OF_NO_LEVEL, ids=".".join)
    def test_a_level_in_a_wrong_place_is_refused_and_told_where_it_belongs(
        self, plain: Asgi, place: tuple[str, ...], spelling: str
    ) -> None:
        body = {"model": "m", "prompt": [1, 2, 3]} | nested(*place, spelling)
        for path in "/v1/completions", "/v1/chat/completions", "/tokenize":
            status, said = plain.post(path, body)
            assert status == 400
            assert f"given {spelling!r}" in said
            assert "in vllm_xargs" in said
            assert said.startswith(place[0] if place else "the request")
        assert plain.ran == 0

    def test_what_nobody_reads_costs_nothing(self, plain: Asgi, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the path does not exist or authorisation fails, no byte of the body is awaited or parsed."""
        plain.reads = False
        body = json.dumps({"sparse_prefil" + str(i): 0 for i in range(10_000)}).encode()
        for path in "/v1/completions", "/nothing", "/invocations":
            assert plain.post(path, body)[0] == 404
        assert plain.asked_for == 0

    @pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
    def test_a_body_without_our_key_is_not_parsed(
        self, plain: Asgi, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(middleware, "json_fields", None)
        text = "any prompt, even of pre-filled forms" * 10_000
        assert plain.post(path, {"prompt": text, "vllm_xargs": {"session_id": "s"}}, parts=9)[0] == 200

    def test_a_long_body_is_parsed_in_a_thread(self, plain: Asgi, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = []

        def json_fields(chunks: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return json.loads(b"".join(chunks))

        monkeypatch.setattr(middleware, "json_fields", json_fields)
        for prompt in "short", "long" * 20_000:
            assert plain.post("/v1/completions", {"prompt": prompt, **asking(0)}) == (200, "exact")
        assert threads == [True, False]

    @pytest.mark.parametrize(
        "body",
        [
            {f"sparse_prefil{i}": {} for i in range(0)} | {"spars" + str(i): [] for i in range(300_000)},
            {"x" * 10_000_000 + "spars": 0, "spars" + "y" * 10_000_000: 0},
            {"prompt": [[i] * 100 for i in range(20_000)], "a": "spars"},
            nested(*(["0"] * 400), "spars"),
        ],
        ids=["keys", "long keys", "lists", "deep"],
    )
    def test_work_on_a_body_is_bounded(self, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each inspected key runs a few lines of Python, whatever the body, and few keys are compared with ours."""
        compared = []
        monkeypatch.setattr(middleware, "looks_like", lambda key, ours: compared.append(key))
        fields = body if isinstance(body, dict) else {"a": body}
        keys, num_steps = counted_steps(lambda: list(middleware.our_keys(fields)))
        assert keys == []
        assert num_steps <= 10 * middleware.MOST_INSPECTED
        assert len(compared) <= middleware.MOST_SLIPS

    def test_a_body_of_more_keys_than_anybody_sends_is_refused_unparsed(
        self, plain: Asgi, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The parser blocks all threads. Quotes within a prompt do not count as keys."""
        keys = {str(i): 0 for i in range(middleware.MOST_KEYS)}
        quoted = json.dumps(dict.fromkeys(range(middleware.MOST_KEYS), 0))
        assert plain.post("/v1/completions", {"prompt": quoted, **asking(0)}) == (200, "exact")
        assert plain.post("/v1/completions", {"logit_bias": keys}) == (200, str(None))
        monkeypatch.setattr(middleware, "_parsed", None)
        for encoding in "utf-8", "utf-16":
            body = json.dumps({"logit_bias": keys, **asking(0)}, separators=(",", " : ")).encode(encoding)
            status, said = plain.post("/v1/completions", body)
            assert status == 400
            assert "given more than 200,000 keys" in said

    def test_an_app_that_hides_the_refusal_does_not_hide_it(self, plain: Asgi) -> None:
        """This does not depend on how an app handles the exception that ends its reading of the body."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await receive()
            except Exception:
                await PlainTextResponse("fine")(scope, receive, send)

        asgi = Asgi(plain.endpoint)
        asgi.__class__ = type("Hiding", (Asgi,), {"__call__": lambda self, *args: app(*args)})
        assert asgi.post("/v1/completions", asking("zzz"), parts=1)[0] == 400

    def test_fastapi_passes_the_refusal_on(self, plain: Asgi) -> None:
        from fastapi import FastAPI
        from pydantic import BaseModel

        class Body(BaseModel):
            prompt: str

        app = FastAPI()
        ran = []

        @app.post("/v1/completions")
        async def complete(body: Body) -> str:
            ran.append(body)
            return str(level_policy.HTTP_REQUEST.get().level)  # type: ignore[union-attr]

        app.add_middleware(LevelsMiddleware, endpoint=plain.endpoint)
        client = TestClient(app)
        assert client.post("/v1/completions", json={"prompt": "a", **asking(0)}).json() == "exact"
        refused = client.post("/v1/completions", json={"prompt": "a", **asking("zzz")})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "vllm_xargs"
        assert client.post("/v1/completions", content=b"[" * 100_000).status_code in (400, 422)
        assert client.post("/nothing", json=asking("zzz") | {"a": "b" * 70_000}).status_code == 404
        assert len(ran) == 1

    def test_a_model_that_nobody_serves_is_an_error_at_start(self, levels: Any, monkeypatch: Any) -> None:
        monkeypatch.setitem(levels.additional_config["sparse_prefill"], "requests", {"models": {"c": "exact"}})
        with pytest.raises(ConfigurationError, match=r"requests\.models: given 'c', expected one of m"):
            asyncio.run(LevelsEndpoint().init_state(*started(levels)))


def requests_of(runner: Any) -> step_context.RunnerRequests:
    requests = step_context.requests_of(runner)
    assert requests is not None
    return requests


def stored(*names: str) -> KVTransferConfig:
    """Return a configuration with a single connector, or with several."""
    name, extra = names[0], {}
    if len(names) > 1:
        name, extra = "MultiConnector", {"connectors": [{"kv_connector": connector} for connector in names]}
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


class TestStores:
    @pytest.mark.parametrize("name", ["OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector"])
    def test_with_one_by_hashes_exact_requests_have_them(
        self, levels: Any, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """Other users of the store then find the blocks that they would have computed themselves."""
        monkeypatch.setattr(levels, "kv_transfer_config", stored(name))
        known = choices(levels)
        assert known.refusal is None
        assert set(known.salts) == {DEFAULT, "fast"}
        assert len(set(known.salts.values())) == 2
        assert known.mark(known.unasked()).salt == Salt(known.salts[DEFAULT], MIN_TOKENS)
        assert known.mark(RequestLevel("exact")).salt is None

    @pytest.mark.parametrize(
        ("names", "by_tokens"),
        [
            (["LMCacheConnectorV1"], "LMCacheConnectorV1"),
            (["ExampleConnector"], "ExampleConnector"),
            (["NixlConnector", "LMCacheMPConnector"], "LMCacheMPConnector"),
            # Blocks that are handed to a single request are not a store.
            (["NixlConnector"], None),
            (["NixlPullConnector", "NixlConnector"], None),
        ],
    )
    def test_with_one_by_tokens_levels_are_refused_and_the_log_says_why(
        self, levels: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str], names: list[str], by_tokens: str | None
    ) -> None:
        monkeypatch.setattr(levels, "kv_transfer_config", stored(*names))
        known = choices(levels)
        level_policy.warn_of_stores(levels)
        assert known.permit(1) == SERVER_LEVEL
        if by_tokens is None:
            assert (known.refusal, known.salts, lines) == (None, {"exact": "exact", "fast": "fast"}, [])
            return
        with pytest.raises(ValueError, match=f"given 0, but this server stores keys and values with {by_tokens} by"):
            known.permit(0)
        assert re.search("by their tokens only.* Use a separate store", lines[0])

    @pytest.mark.parametrize(("backend", "by_token"), [("native", []), ("lmcache", ["LMCacheMPConnector"])])
    def test_offloading_is_known_before_vllm_names_its_connector(
        self, levels: Any, monkeypatch: pytest.MonkeyPatch, backend: str, by_token: list[str]
    ) -> None:
        monkeypatch.setattr(levels.cache_config, "kv_offloading_size", 4.0)
        monkeypatch.setattr(levels.cache_config, "kv_offloading_backend", backend)
        assert levels.kv_transfer_config is None
        assert level_policy.stores_by_token(levels) == by_token
        assert (DEFAULT in choices(levels).salts) == (not by_token)


def scheduled(new: dict[str, Mark | None], finished: Sequence[str] = ()) -> Any:
    """Return the part of a scheduler's output that describes requests that are new to the worker."""
    params = {req_id: SamplingParams(extra_args=mark and mark.write(None)) for req_id, mark in new.items()}
    news = [
        SimpleNamespace(req_id=req_id, sampling_params=sampling_params, prompt_token_ids=[7] * (100 + ord(req_id)))
        for req_id, sampling_params in params.items()
    ]
    return SimpleNamespace(scheduled_new_reqs=news, finished_req_ids={*finished})


PLACES = "dbca"
"""Requests in the order of their places in a runner's table."""


class TestRunners:
    """Rows are identified by the runner's batch, by the arguments of ``prepare_attn``, or by numbers in the
    metadata."""

    @staticmethod
    def of(kind: str) -> Any:
        class Runner:
            def __init__(self) -> None:
                register()
                self.vllm_config = SimpleNamespace(attention_config=AttentionConfig(backend="sparse-prefill"))
                vars(self)[step_context.REQUESTS] = step_context.RunnerRequests({"exact", DEFAULT, "fast"})
                if kind == "older":
                    self.input_batch = SimpleNamespace(req_ids=[])
                else:
                    self.req_states = SimpleNamespace(index_to_req_id=dict(enumerate(PLACES)))

            def execute_model(
                self, scheduler_output: Any, order: Sequence[str], num_rows: int, dummy_run: bool = False
            ) -> list[str] | None:
                common = SimpleNamespace(num_reqs=num_rows)
                if kind == "numbered":
                    common.req_idx = numpy.array(range(num_rows) if dummy_run else [*map(PLACES.index, order)])
                elif kind == "older":
                    self.input_batch.req_ids = [*order]
                elif not dummy_run:
                    self.prepare_attn(SimpleNamespace(req_ids=[*order]))
                levels = requests_of(self).levels_of_rows(common)
                self.prompt_lens = requests_of(self).prompt_lens_of_rows(common)
                return None if levels is None else [level.name for level in levels]

            def prepare_attn(self, input_batch: Any) -> None:
                pass

        hooks.put_around(Runner, "execute_model", hooks._known, ("scheduler_output",))
        if kind == "newer":
            hooks.put_around(Runner, "prepare_attn", hooks._batch_told, ("input_batch",))
        runner = Runner()
        execute_model = runner.execute_model

        def step(output: Any, order: Sequence[str], num_rows: int, dummy_run: bool = False) -> Any:
            output.num_scheduled_tokens = {"dummy": 1} if dummy_run else dict.fromkeys(order, 1)
            return execute_model(output, order, num_rows, dummy_run)

        runner.execute_model = step  # type: ignore[method-assign]
        return runner

    @pytest.fixture(params=["older", "newer", "numbered"])
    def runner(self, request: pytest.FixtureRequest) -> Any:
        return self.of(request.param)

    def test_rows_are_known_by_their_requests_whatever_their_order(self, runner: Any) -> None:
        marks = {"a": EXACT, "b": None, "c": FAST}
        assert runner.execute_model(scheduled(marks), "bca", 4) == [DEFAULT, "fast", "exact", DEFAULT]
        assert runner.execute_model(scheduled({}), "ac", 2) == ["exact", "fast"]
        assert runner.execute_model(scheduled({"d": EXACT}, finished="a"), "dcb", 3) == ["exact", "fast", DEFAULT]

    def test_a_name_that_comes_again_is_another_request(self, runner: Any) -> None:
        """After an abort, in the same step that reports it, or when a preempted request is sent to the worker again."""
        assert runner.execute_model(scheduled({"a": EXACT}), "a", 1) == ["exact"]
        assert runner.execute_model(scheduled({"a": FAST}, finished="a"), "a", 1) == ["fast"]
        assert runner.execute_model(scheduled({"a": FAST}), "a", 1) == ["fast"]
        assert runner.execute_model(scheduled({"a": None}), "a", 1) == [DEFAULT]
        salted = {"a": Mark(salt=Salt("salt", 100))}  # as with a store by hashes: no level, and no name for its row
        assert runner.execute_model(scheduled(salted), "ab", 1) == [DEFAULT]

    def test_each_row_knows_the_length_of_its_prompt(self, runner: Any) -> None:
        """Prompts of ``scheduled`` have 100 tokens plus the code of the request's name."""
        lengths = {name: 100 + ord(name) for name in "abcd"}
        runner.execute_model(scheduled(dict.fromkeys("abc")), "bca", 4)
        assert runner.prompt_lens == [lengths["b"], lengths["c"], lengths["a"], 0]
        runner.execute_model(scheduled({"d": EXACT}, finished="a"), "db", 2)
        assert runner.prompt_lens == [lengths["d"], lengths["b"]]
        assert requests_of(runner)._prompt_lens == {name: lengths[name] for name in "bcd"}
        runner.execute_model(scheduled({}), "db", 1)
        assert runner.prompt_lens is None  # not all rows of the step
        assert requests_of(runner).prompt_lens_of_rows(SimpleNamespace(num_reqs=3)) == [0] * 3

    def test_a_prompt_of_embeddings_has_a_length(self) -> None:
        request = SimpleNamespace(prompt_token_ids=None, prompt_embeds=torch.zeros(7, 4))
        assert compat.prompt_length(request) == 7
        assert compat.prompt_length(SimpleNamespace(prompt_token_ids=[1, 2])) == 2

    def test_between_steps_nothing_is_known(self, runner: Any) -> None:
        runner.execute_model(scheduled({"a": EXACT}), "a", 1)
        assert requests_of(runner).levels_of_rows(SimpleNamespace(num_reqs=3)) == [SERVER_LEVEL] * 3
        other = self.of("older")
        assert other.execute_model(scheduled({}), "a", 1) == [DEFAULT]  # nor in other runners of the process

    def test_of_a_batch_that_has_not_all_rows_of_its_step_nothing_is_known(self, runner: Any) -> None:
        assert runner.execute_model(scheduled({}), "ab", 1) == [DEFAULT]
        assert runner.execute_model(scheduled({"a": EXACT}), "ab", 1) is None
        assert requests_of(runner).step is None

    def test_nor_of_rows_that_are_not_told(self) -> None:
        """As in Model Runner V2 without the hook, with a model whose metadata does not number rows."""
        runner = self.of("newer")
        runner.prepare_attn = lambda batch: None
        assert runner.execute_model(scheduled({}), "a", 1) == [DEFAULT]
        assert runner.execute_model(scheduled({"a": EXACT}), "a", 1) is None

    def test_an_engine_of_another_backend_in_the_same_process_is_let_pass(self) -> None:
        """Its clients may put any value in the place of our mark."""
        register()
        other = SimpleNamespace(vllm_config=SimpleNamespace(attention_config=SimpleNamespace(backend=None)))
        execute_model = hooks._known(lambda runner, output: output)
        assert (
            execute_model(other, "an output without the fields of a step") == "an output without the fields of a step"
        )
        assert step_context.REQUESTS not in vars(other)

    def test_a_step_does_not_ask_for_the_backend_again(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every token that is generated takes such a step."""
        monkeypatch.setattr(hooks, "is_selected", None)
        assert runner.execute_model(scheduled({"a": EXACT}), "ab", 2) == ["exact", DEFAULT]

    @pytest.mark.parametrize("kind", ["newer", "numbered"])
    def test_a_dummy_batch_has_nobodys_rows(self, kind: str) -> None:
        """Its rows have the same numbers as those of requests."""
        runner = self.of(kind)
        runner.execute_model(scheduled({"a": EXACT}), "a", 1)
        assert runner.execute_model(scheduled({}), "", 4, dummy_run=True) == [DEFAULT] * 4

    @pytest.mark.parametrize("other", [None, "is_hybrid", "is_encoder_decoder"])
    def test_which_workers_tell_whose_rows_they_have(self, other: str | None) -> None:
        """From 0.30 on. vLLM's states of hybrid models and encoder-decoders leave the field empty."""
        release = tuple(map(int, vllm.__version__.split(".")[:2]))
        model = {"is_hybrid": False, "is_encoder_decoder": False, **({other: True} if other else {})}
        config = SimpleNamespace(model_config=SimpleNamespace(**model))
        assert hooks.numbers_rows(config) == (other is None and release >= (0, 30))


TAIL: dict[str, Any] = {
    "method": "anchor_attention", "params": {"theta": 0.0, "step_tiles": 1, "dense_tail": True},
    "min_tokens": MIN_TOKENS,
}  # fmt: skip


class TestRows:
    @pytest.fixture
    def layers(self, levels: Any) -> Any:
        made = make_layers(levels, range(4))
        return made, make_builder(levels, made)

    def test_each_row_of_a_step_runs_at_its_own_level(self, layers: Any, at_step: Any) -> None:
        """Exact rows equal vLLM's to the bit; other rows equal the references of their level, including dense
        layers."""
        made, builder = layers
        rows = {0: "fast", 3: "exact", 4: "fast", 6: DEFAULT}
        assert set(rows) == set(SPARSE_ROWS)
        at_step([rows.get(i, "exact") for i in range(len(MIXED))])
        sparse_at = {DEFAULT: (2, 3), "fast": (1, 2)}
        step = make_step(made[0], MIXED)
        metadata = builder.build(0, step.common)
        assert [slab.level for slab in metadata.sparse.slabs] == [DEFAULT, "fast"]
        for number, layer in enumerate(made):
            dense, out = step.by_dense_backend(layer, builder), step.forward(layer, metadata)
            for row in range(len(MIXED)):
                tokens, level = step.tokens(row), rows.get(row, "exact")
                if level == "exact" or (number == 0):
                    assert torch.equal(out[tokens], dense[tokens]), (number, row)
                    continue
                groups = layer.impl.levels[level].layer.groups
                expected, _ = reference(step, row, groups, layer.impl.scale)
                cut = dense_tokens(step, row)
                torch.testing.assert_close(out[tokens][cut:], expected, **CLOSE)
                is_dense = torch.allclose(expected, dense[tokens][cut:], atol=1e-5)
                assert is_dense == (number not in sparse_at[level]), (number, row)
        assert made[0].impl.worker.memory.arena.overflows == 0  # it has room for every level

    def test_rows_that_are_not_told_run_dense_and_are_counted(
        self, layers: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        """If a release builds metadata without naming rows, all rows are exact, and no engine ends."""
        made, builder = layers
        unnamed = step_context.Step({"0": EXACT.request_level}, {str(i): 1 for i in range(len(MIXED))})
        monkeypatch.setattr(step_context.RunnerRequests, "step", unnamed)
        step = make_step(made[0], MIXED)
        for _ in range(2):
            metadata = builder.build(0, step.common)
            assert getattr(metadata, "sparse", None) is None
            for layer in made:
                assert torch.equal(step.forward(layer, metadata), step.by_dense_backend(layer, builder))
        samples, _ = recorder_of(builder).samples()
        counted = {tuple(labels[:2]): n for name, labels, n in samples if name == "rows"}
        assert counted["dense", Fallback.UNNAMED] >= 2 * len(SPARSE_ROWS)
        assert ("sparse", "") not in counted
        assert len([line for line in lines if Fallback.UNNAMED.explain in line]) == 1

    def test_the_end_of_a_prompt_is_dense_whatever_the_chunk(self, built: Callable[..., Any], at_step: Any) -> None:
        """Two requests at the same position: the prompt of the first ends there, and that of the second continues."""
        (layer,), builder = built(0, **TAIL)
        lengths = [(333, 300), (333, 300), (600, 40), (900, 100)]
        ends = {"0": 633, "1": 5000, "2": 640, "3": 800}  # whole groups; the last prefills its output again
        at_step([DEFAULT] * 4)
        builder.row_classifier.requests._prompt_lens.update(ends)
        step = make_step(layer, lengths)
        metadata = builder.build(0, step.common)
        (slab,) = metadata.sparse.slabs
        assert slab.rows.prompt_lens == tuple(ends.values())
        out, dense = step.forward(layer, metadata), step.by_dense_backend(layer, builder)
        same = [(out[step.tokens(row)] - dense[step.tokens(row)]).abs().amax((1, 2)) < 1e-5 for row in range(4)]
        # Tiles begin at 333, 461 and 589: the last two reach into the tail, from 512 on.
        assert bool(same[0][128:].all())
        assert not bool(same[0][:128].all())
        assert not bool(same[1][128:].all())
        assert not bool(same[2].all())
        assert bool(same[3].all())

    def test_rows_of_prompts_that_are_not_known_run_dense(
        self, built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, builder = built(0, **TAIL)
        unnamed = step_context.Step({}, {str(i): 1 for i in range(len(MIXED))})
        monkeypatch.setattr(step_context.RunnerRequests, "step", unnamed)
        rows = builder.row_classifier.classify(make_common(MIXED), 0, 1)
        assert {rows[row].kind.reason for row in SPARSE_ROWS} == {Fallback.UNNAMED}
        _, builder = built(0, min_tokens=MIN_TOKENS, method="anchor_attention")
        rows = builder.row_classifier.classify(make_common(MIXED), 0, 1)
        assert {rows[row].kind.reason for row in SPARSE_ROWS} == {None}

    def test_each_row_keeps_the_share_that_its_request_gives(
        self, built: Callable[..., Any], at_step: Any, tmp_path: Any
    ) -> None:
        """Rows equal those of a server with that p, to the bit, in the same arena; heads of other methods do not
        change."""

        def made(share: float) -> Any:
            by_mass = {"method": "top_p", "kept_mass": share, "most_share": 1.0, "sink_tokens": 0, "local_tokens": 128}
            heads = {0: by_mass, 1: by_mass | {"kept_mass": share if share < 0.9 else 1.0}}
            path = profile_file(tmp_path, default={"method": "a_shape"}, layers={0: {"heads": heads}})
            (layer,), builder = built(0, profile=path, min_tokens=MIN_TOKENS)
            return layer, builder

        step, alone = make_step(made(0.9)[0], MIXED), {}
        for share in (0.1, 0.5, 0.9):
            layer, builder = made(share)
            alone[share] = step.forward(layer, builder.build(0, step.common))
        share_of_row = {0: 0.1, 4: 0.5, 6: 0.5}
        at_step([RequestLevel("p", share_of_row[row]) if row in share_of_row else DEFAULT for row in range(len(MIXED))])
        together = step.forward(layer, builder.build(0, step.common))
        for row in SPARSE_ROWS:
            tokens = step.tokens(row)
            assert torch.equal(together[tokens], alone[share_of_row.get(row, 0.9)][tokens])
            if row in (0, 6):  # the others are too short to leave much out
                assert not torch.equal(together[tokens], alone[0.9][tokens])
        assert layer.impl.worker.memory.arena.overflows == 0

    def test_each_level_is_sparse_from_where_its_own_engine_pays(
        self, configured: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a server with only this level: another level's engine and its measurements have no effect."""
        shape = {"device": compat.device_name(), "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        measured = {"portable": {"a_shape": 100, "block_sparse": 700}, "flash": {"a_shape": 900, "block_sparse": 300}}
        entries = [
            entry(tokens, tokens // 10, engine=engine, method=method, **shape)
            for engine, methods in measured.items()
            for method, tokens in methods.items()
        ]
        (table := tmp_path / "crossover.json").write_text(written(*entries))
        config = configured(profile=profile_file(tmp_path, **LEVELS), crossover=str(table))

        def on_engine(level: LayerLevel) -> LayerLevel:
            is_block_sparse = type(level.layer.groups[0].method).__name__ == "BlockSparse"
            engine = replace(PORTABLE, name="flash" if is_block_sparse else "portable")
            return replace(level, layer=replace(level.layer, engine=engine))

        def make_ready(self: Any, impls: Any, worker: Any) -> None:
            for impl in impls:
                impl.levels = {name: on_engine(level) for name, level in impl.levels.items()}

        monkeypatch.setattr(LayerAdoption, "_make_ready", make_ready)
        thresholds = make_builder(config, make_layers(config, [1, 2, 3])[1:2]).row_classifier.thresholds
        numbers = {level: (lengths.min_tokens, lengths.min_query_tokens) for level, lengths in thresholds.items()}
        assert numbers == {DEFAULT: (100, 10), "fast": (300, 30)}
