# SPDX-License-Identifier: Apache-2.0
"""Levels from the front process to the hashes of cached blocks, without a server."""

import asyncio
import hashlib
import json
import queue
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")
import zmq
from fastapi import FastAPI, Request
from starlette.testclient import TestClient
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request as EngineRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.folders import profile_file
from tests.helpers.mixed_batches import MIN_TOKENS
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.request_levels import FIELD, RequestLevel, level_in, with_level
from vllm_sparse_backend.serving import hooks, level_policy as policies
from vllm_sparse_backend.serving.frontend import middleware
from vllm_sparse_backend.serving.frontend.endpoint import SparsePrefillEndpoint
from vllm_sparse_backend.serving.level_policy import level_policy

LEVELS: dict[str, Any] = {
    "level": "high",
    "default": {"method": "top_p"},
    "levels": {"fast": {"default": {"method": "a_shape", "sink_tokens": 16, "local_tokens": 16}}},
}
BLOCK_TOKENS = 16


@pytest.fixture
def levels(configured: Callable[..., Any], tmp_path: Any) -> Callable[..., Any]:
    """Return a function: a policy → the configuration of a server with the levels ``exact``, ``high`` and ``fast``."""
    profile = profile_file(tmp_path, **LEVELS)
    return lambda **policy: configured(profile=profile, min_tokens=MIN_TOKENS, min_query_tokens=1, requests=policy)


class Front:
    """vLLM's input processor as the hook uses it."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def process_inputs(self, prompt: str, params: Any, cache_salt: str | None = None, resumable: bool = False) -> Any:
        return SimpleNamespace(sampling_params=params.clone(), cache_salt=cache_salt)


hooks.put_around(Front, "process_inputs", hooks.set_levels)


def sent(front: Front, level: object = None, **options: Any) -> tuple[str, str | None]:
    """Return the level that workers read, and the salt, of a request."""
    extra_args = {"other": 1} if level is None else {"other": 1, FIELD: level}
    params = SamplingParams(extra_args=extra_args, skip_clone=True)
    requests = [front.process_inputs("prompt", params, **options) for _ in range(2)]  # as for two prompts of a body
    assert params.extra_args == extra_args
    (first, again) = (MsgpackDecoder().decode(MsgpackEncoder().encode(r.sampling_params.extra_args)) for r in requests)
    assert first == again
    assert first["other"] == 1
    return str(level_in(first)), requests[0].cache_salt


class TestFrontProcess:
    def test_a_level_becomes_a_value_and_a_salt(self, levels: Callable[..., Any]) -> None:
        front = Front(levels())
        assert [sent(front, level) for level in (None, 1, "high")] == [(ON, None)] * 3
        assert sent(front, 0) == ("exact", "sparse_prefill:exact")
        assert sent(front, 0.97) == ("p=0.97", "sparse_prefill:p=0.97")
        assert sent(front, "on", cache_salt="user") == (ON, "user")
        level, salt = sent(front, "fast", cache_salt="user")
        assert (level, salt) == ("fast", "sparse_prefill:fast:" + hashlib.sha256(b"user").hexdigest()[:32])

    @pytest.mark.parametrize("default", ["exact", "fast"])
    def test_requests_of_the_default_level_keep_vllms_hashes(self, levels: Callable[..., Any], default: str) -> None:
        """Routers can then find the blocks of most requests."""
        front = Front(levels(default=default))
        assert sent(front) == (default, None)
        assert sent(front, 1) == (ON, f"sparse_prefill:{ON}")

    @pytest.mark.parametrize(
        ("level", "options", "parameter", "said"),
        [
            ("fastest", {}, "vllm_xargs", "given 'fastest', expected one of 0"),
            (0, {"cache_salt": "sparse_prefill:exact"}, "cache_salt", "does not begin with 'sparse_prefill:'"),
            (None, {"cache_salt": "sparse_prefill:exact"}, "cache_salt", "does not begin with 'sparse_prefill:'"),
            # Parts of a streamed input replace the level, and keep the salt of the first part.
            (0, {"resumable": True}, "vllm_xargs", "given 0, but this request streams its input"),
        ],
    )
    def test_what_is_refused(
        self, levels: Callable[..., Any], level: object, options: Any, parameter: str, said: str
    ) -> None:
        with pytest.raises(VLLMValidationError, match=said) as refused:
            sent(Front(levels()), level, **options)
        assert refused.value.parameter == parameter
        assert sent(Front(levels()), 1, resumable=True) == (ON, None)

    def test_other_backends_take_what_they_are_given(
        self, levels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr((config := levels()).attention_config, "backend", None)
        params = SamplingParams(extra_args={FIELD: "fastest"})
        request = Front(config).process_inputs("prompt", params, cache_salt="sparse_prefill:")
        assert (request.sampling_params.extra_args, request.cache_salt) == (params.extra_args, "sparse_prefill:")


def salted_request(salt: str | None, **options: Any) -> EngineRequest:
    def hashed(value: Any) -> bytes:
        return hashlib.sha256(repr(value).encode()).digest()

    kv_cache_utils.init_none_hash(hashed)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, hashed)
    params = SamplingParams(max_tokens=9)
    return EngineRequest("r", list(range(200)), params, None, cache_salt=salt, block_hasher=hasher, **options)


def image(identifier: str) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=40, length=20)
    return [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)]


def test_levels_share_no_block_whatever_else_is_in_its_hash(levels: Callable[..., Any]) -> None:
    """Clients' salts, images and adapters keep their meaning at every level."""
    front = Front(levels())
    adapter = LoRARequest("adapter", 1, "/adapter")
    kinds: list[dict[str, Any]] = [
        {}, {"mm_features": image("a")}, {"mm_features": image("b")}, {"lora_request": adapter},
        {"lora_request": adapter, "mm_features": image("a")},
    ]  # fmt: skip
    hashes: dict[tuple[int, object, str | None], tuple[bytes, ...]] = {}
    for number, kind in enumerate(kinds):
        for level in None, 0, "fast", 0.5, 0.97:
            for client_salt in None, "a", "b":
                salt = sent(front, level, cache_salt=client_salt)[1]
                blocks = tuple(salted_request(salt, **kind).block_hashes)
                assert blocks == tuple(salted_request(salt, **kind).block_hashes)
                if level is None:  # exactly vLLM's own
                    assert blocks == tuple(salted_request(client_salt, **kind).block_hashes)
                hashes[number, level, client_salt] = blocks
    assert len({blocks[-1] for blocks in hashes.values()}) == len(hashes)
    # An image begins in the third block. Requests of a level and client share the blocks before it.
    shared = {(level, salt): {blocks[1] for (kind, *key), blocks in hashes.items() if key == [level, salt] and kind < 3}
              for _, level, salt in hashes}  # fmt: skip
    assert {len(blocks) for blocks in shared.values()} == {1}
    assert len({block for blocks in shared.values() for block in blocks}) == len(shared)


def stored(*names: str) -> KVTransferConfig:
    """Return a configuration with a single connector, or with several."""
    name, extra = names[0], {}
    if len(names) > 1:
        name, extra = "MultiConnector", {"connectors": [{"kv_connector": connector} for connector in names]}
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


class TestStores:
    @pytest.mark.parametrize(
        "name", ["OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "LMCacheMPConnector"]
    )
    def test_a_store_that_includes_salts_gets_exact_blocks_under_vllms_hashes(
        self, levels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """Other users of the store then find the blocks that they would have computed themselves."""
        monkeypatch.setattr(config := levels(), "kv_transfer_config", stored(name))
        salts = [sent(Front(config), level)[1] for level in (0, None, "fast", 0.97)]
        prefixes = [None, f"sparse_prefill:{ON}:", "sparse_prefill:fast:", "sparse_prefill:p=0.97:"]
        fingerprints = [(salt or "").removeprefix(prefix or "") for salt, prefix in zip(salts, prefixes, strict=True)]
        assert [len(text) for text in fingerprints] == [0, 16, 16, 16]
        assert fingerprints[1] != fingerprints[2]

    @pytest.mark.parametrize(
        ("names", "by_tokens"),
        [
            (["LMCacheConnectorV1"], "LMCacheConnectorV1"),
            (["HF3FSKVConnector"], "HF3FSKVConnector"),
            (["NixlConnector", "ExampleConnector"], "ExampleConnector"),
            # Blocks that are handed to a single request are not a store.
            (["NixlConnector"], None),
            (["NixlPullConnector", "MooncakeConnector"], None),
        ],
    )
    def test_with_a_store_by_tokens_levels_are_refused_and_the_log_says_why(
        self, levels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, lines: list[str], names: list[str],
        by_tokens: str | None,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(config := levels(), "kv_transfer_config", stored(*names))
        policies.warn_of_stores(config)
        front = Front(config)
        assert sent(front, 1) == (ON, None)
        if by_tokens is None:
            assert sent(front, 0) == ("exact", "sparse_prefill:exact")
            assert lines == []
            return
        with pytest.raises(VLLMValidationError, match=f"given 0, but this server stores .* with {by_tokens} by their"):
            sent(front, 0)
        assert "by their tokens only" in lines[0]

    @pytest.mark.parametrize(
        ("backend", "name"), [("native", "OffloadingConnector"), ("lmcache", "LMCacheMPConnector")]
    )
    def test_offloading_is_known_before_vllm_names_its_connector(
        self, levels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, backend: str, name: str
    ) -> None:
        config = levels()
        monkeypatch.setattr(config.cache_config, "kv_offloading_size", 4.0)
        monkeypatch.setattr(config.cache_config, "kv_offloading_backend", backend)
        assert policies.kv_connectors(config) == {name}

    def test_a_default_that_not_all_requests_can_have_is_refused(
        self, levels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = levels(default="exact")
        monkeypatch.setattr(config.parallel_config, "enable_dbo", True)
        with pytest.raises(ConfigurationError, match=r"requests.default: given 'exact', but this server splits steps"):
            level_policy(config)


class Core:
    """vLLM's core as the hook and its input thread use it. It prepares requests and runs none."""

    _handle_request_preproc_error = EngineCoreProc._handle_request_preproc_error
    _send_error_outputs_to_client = EngineCoreProc._send_error_outputs_to_client
    _send_finish_outputs_to_client = EngineCoreProc._send_finish_outputs_to_client
    _handle_request_validation_error = getattr(EngineCoreProc, "_handle_request_validation_error", None)
    process_input_sockets = EngineCoreProc.process_input_sockets
    tensor_ipc_receiver = None

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_executor = SimpleNamespace()
        self._initialize_kv_caches(vllm_config)
        self.prepared: list[str] = []
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()

    def _initialize_kv_caches(self, vllm_config: Any) -> None:
        pass

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        self.prepared.append(request.request_id)
        return request, 0

    def _make_ready_response(self) -> dict[str, str]:
        return {"status": "ready"}


hooks.put_around(Core, "_initialize_kv_caches", hooks.begin_core)


def in_messagepack(extra_args: Any, request_id: str = "r", **fields: Any) -> list[Any]:
    """Return a request in the form in which an engine core gets it from its front process."""
    params = SamplingParams(max_tokens=1, extra_args=extra_args)
    values: dict[str, Any] = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    values |= {"request_id": request_id, "prompt_token_ids": [1, 2, 3], "arrival_time": 0.0, "sampling_params": params}
    return list(MsgpackEncoder().encode(EngineCoreRequest(**(values | fields))))


UNCHECKED: list[Any] = [
    None, {}, {"other": 1}, {FIELD: 0}, {FIELD: "exact"}, {FIELD: None}, {FIELD: ["exact", None]}, {FIELD: {}},
    {FIELD: "x" * 100_000},
]  # fmt: skip


class TestEngineCore:
    """Requests of a front process without this package, such as vLLM's in Rust."""

    DEADLINE_S = 120.0

    def take(self, core: Core, extra_args: Any, **fields: Any) -> Any:
        return core.preprocess_add_request(
            MsgpackDecoder(EngineCoreRequest).decode(in_messagepack(extra_args, **fields))
        )

    @pytest.mark.parametrize("extra_args", UNCHECKED, ids=lambda value: repr(value)[:20])
    def test_what_our_front_process_has_not_checked_is_refused(
        self, levels: Callable[..., Any], extra_args: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM prepares it nevertheless, which takes its images into the core's cache."""
        core = Core(config := levels())
        with pytest.raises(
            VLLMValidationError, match=r"no front process of this package has checked, expected .*Python"
        ):
            self.take(core, extra_args)
        assert core.prepared == ["r"]
        monkeypatch.setattr(config.attention_config, "backend", None)
        self.take(Core(config), extra_args)

    def test_a_level_of_another_nodes_settings_is_refused(self, levels: Callable[..., Any]) -> None:
        core = Core(levels())
        with pytest.raises(
            VLLMValidationError, match="given level 'faster', which this engine does not have, expected"
        ):
            self.take(core, with_level({}, RequestLevel("faster")))

    def test_requests_that_have_no_level_are_taken(self, levels: Callable[..., Any]) -> None:
        """vLLM's own requests that free another server's blocks."""
        core = Core(levels())
        self.take(core, with_level({}, RequestLevel("fast")))
        self.take(core, {"kv_transfer_params": {}}, abort_immediately=True)
        assert len(core.prepared) == 2

    @pytest.fixture
    def running(self, levels: Callable[..., Any], tmp_path: Any) -> Iterator[tuple[Core, zmq.Socket[bytes]]]:
        core, address = Core(levels()), f"ipc://{tmp_path}/input"
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            ready = threading.Event()

            def run() -> None:
                with suppress(zmq.ContextTerminated):
                    core.process_input_sockets([address], None, b"core", ready)  # type: ignore[arg-type]

            threading.Thread(target=run, daemon=True).start()
            assert ready.wait(self.DEADLINE_S)
            socket.recv_multipart()
            yield core, socket

    def test_a_refusal_ends_the_request_and_not_the_engine(self, running: tuple[Core, zmq.Socket[bytes]]) -> None:
        core, socket = running
        requests = {f"bad {i}": extra_args for i, extra_args in enumerate(UNCHECKED)}
        for request_id, extra_args in (requests | {"good": with_level({}, RequestLevel("exact"))}).items():
            frames = [b"core", EngineCoreRequestType.ADD.value, *in_messagepack(extra_args, request_id)]
            socket.send_multipart(frames)
        kind, (request, _) = core.input_queue.get(timeout=self.DEADLINE_S)
        assert (kind, request.request_id) == (EngineCoreRequestType.ADD, "good")
        outputs = [core.output_queue.get_nowait()[1].outputs for _ in requests]
        assert [output.request_id for (output,) in outputs] == list(requests)
        assert {output.finish_reason for (output,) in outputs} == {FinishReason.ERROR}


X = {"vllm_xargs": {FIELD: 0, "session_id": "s"}}
BEAMS = {"use_beam_search": True, "n": 2}


class TestMiddleware:
    @pytest.fixture
    def client(self, levels: Callable[..., Any]) -> TestClient:
        return self.served(levels())

    def served(self, config: Any) -> TestClient:
        """Return a client of an app that answers with the number of bytes that it read, or reads nothing."""
        app, endpoint = FastAPI(), SparsePrefillEndpoint()

        @app.post("/unread")
        async def unread() -> int:
            return -1

        @app.post("/{path:path}")
        async def read(request: Request) -> int:
            return len(await request.body())

        endpoint.attach_router(app)
        asyncio.run(endpoint.init_state(SimpleNamespace(vllm_config=config), None, Namespace()))
        return TestClient(app)

    @pytest.mark.parametrize(
        ("path", "body", "said"),
        [
            ("/v1/chat/completions", X | BEAMS | {"messages": [{"content": "a" * 100_000}]}, "beam search"),
            ("/cohere/v2/chat", X, "no field for it"),
        ],
    )  # fmt: skip
    def test_a_level_that_vllm_would_drop_is_refused(self, client: TestClient, path: str, body: Any, said: str) -> None:
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["detail"].startswith("vllm_xargs: given the key 'sparse_prefill', expected no level: ")
        assert said in answer.json()["detail"]
        assert client.post(path, json=body | {"vllm_xargs": {"session_id": "s"}}).status_code == 200

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", X),
            ("/v1/completions", X | {"use_beam_search": False}),
            ("/v1/completions", BEAMS | {"prompt": '"vllm_xargs": {"sparse_prefill": 0}'}),
            ("/v1/completions", BEAMS | {"metadata": X, FIELD: 0}),  # ignored, as vLLM ignores them
            ("/v1/responses", X | BEAMS),  # has no beam search
            ("/cohere/v2/chat", {"message": "sparse_prefill", "vllm_xargs": [FIELD]}),
            ("/tokenize", X), ("/unread", X),
        ],
    )  # fmt: skip
    def test_everything_else_passes(self, client: TestClient, path: str, body: Any) -> None:
        assert client.post(path, json=body).status_code == 200

    @pytest.mark.parametrize(
        "text",
        [
            b"no json, sparse_prefill use_beam_search",
            b'["sparse_prefill", "use_beam_search"]',
            b'{"sparse_prefill": "use_beam_search", "a": ' + b"[" * 100_000,
        ],
    )
    def test_vllm_reports_what_it_cannot_parse(self, client: TestClient, text: bytes) -> None:
        assert client.post("/v1/completions", content=text).json() == len(text)

    def test_a_body_without_both_keys_is_not_parsed(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(middleware, "top_fields", None)
        large = {"prompt": "a word " * 1_000_000}
        for body in large | X, large | BEAMS, {"sparse_prefil" + str(i): 0 for i in range(100_000)} | BEAMS:
            assert client.post("/v1/completions", json=body).status_code == 200

    @pytest.mark.parametrize("beams", ["true", "True", "1", "on"])
    @pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
    def test_beams_in_a_form(self, client: TestClient, path: str, beams: str) -> None:
        level, audio = {"vllm_xargs": json.dumps(X["vllm_xargs"])}, {"file": ("call.wav", b"\0RIFF\n" * 100_000)}
        assert client.post(path, data=level | {"use_beam_search": beams}, files=audio).status_code == 400
        for data in level, level | {"use_beam_search": "false", "a": beams}, {"use_beam_search": beams}:
            assert client.post(path, data=data, files=audio).status_code == 200

    def test_bodies_of_other_backends_are_not_inspected(
        self, levels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr((config := levels()).attention_config, "backend", None)
        monkeypatch.setattr(middleware, "JsonBody", None)
        for path in ("/v1/completions", "/cohere/v2/chat"):
            assert self.served(config).post(path, json=X | BEAMS).status_code == 200
