# SPDX-License-Identifier: Apache-2.0
"""Requests of a front process without this plugin, such as vLLM's in Rust: JSON values in vLLM's MessagePack."""

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import zmq
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.folders import profile_file
from vllm_sparse_backend.config.request_levels import FIELD, MARK, Mark, Salt
from vllm_sparse_backend.serving import hooks, level_policy, rust_frontend
from vllm_sparse_backend.serving.worker.step_context import RunnerRequests

EXACT_TOKENS = 100
LEVELS: dict[str, Any] = {
    "level": "high",
    "default": {"method": "top_p"},
    "levels": {"fast": {"default": {"method": "a_shape", "sink_tokens": 16, "local_tokens": 16}}},
}


def sent(vllm_xargs: object, request_id: str = "r", **fields: Any) -> list[Any]:
    """Return a request in the form in which an engine core gets it from its front process."""
    params = SamplingParams(max_tokens=1, extra_args=json.loads(json.dumps(vllm_xargs)))
    values: dict[str, Any] = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    values |= {"request_id": request_id, "prompt_token_ids": [1, 2, 3], "arrival_time": 0.0, "sampling_params": params}
    return list(MsgpackEncoder().encode(EngineCoreRequest(**(values | fields))))


class Core:
    """vLLM's core as the hooks and its input thread use it. It prepares requests and runs none."""

    _handle_request_preproc_error = EngineCoreProc._handle_request_preproc_error
    _send_error_outputs_to_client = EngineCoreProc._send_error_outputs_to_client
    _send_finish_outputs_to_client = EngineCoreProc._send_finish_outputs_to_client
    _handle_request_validation_error = getattr(EngineCoreProc, "_handle_request_validation_error", None)
    process_input_sockets = EngineCoreProc.process_input_sockets
    tensor_ipc_receiver = None

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.prepared: list[str] = []
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        self.prepared.append(request.request_id)
        return request, 0

    def _make_ready_response(self) -> dict[str, str]:
        return {"status": "ready"}


hooks.put_around(Core, "preprocess_add_request", hooks._marked_in_core, ("request",))


@pytest.fixture
def core(configured: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Core]:
    """Return a function: more settings → a core of a server with the levels ``exact``, ``high`` (its default) and
    ``fast``."""
    monkeypatch.delenv(rust_frontend.VARIABLE, raising=False)
    profile = profile_file(tmp_path, **LEVELS)
    return lambda **settings: Core(configured(profile=profile, min_tokens=EXACT_TOKENS, min_query_tokens=1, **settings))


def taken(core: Core, vllm_xargs: object, **fields: Any) -> dict[str, Any]:
    """Return the ``extra_args`` of a request in the core and in workers."""
    request, _ = core.preprocess_add_request(MsgpackDecoder(EngineCoreRequest).decode(sent(vllm_xargs, **fields)))
    extra_args: dict[str, Any] = request.sampling_params.extra_args
    return extra_args


def salted(level: str, kept_mass: float | None = None) -> Mark:
    text = level if kept_mass is None else f"p={kept_mass!r}"
    return Mark(level, kept_mass, Salt(text, EXACT_TOKENS))


VALUES = [
    ({}, Mark()), (None, Mark()), ({"other": 1}, Mark()),
    ({FIELD: 0}, salted("exact")), ({FIELD: False}, salted("exact")), ({FIELD: 0.0}, salted("exact")),
    ({FIELD: "exact"}, salted("exact")),
    ({FIELD: 1}, Mark()), ({FIELD: True}, Mark()), ({FIELD: "on"}, Mark()), ({FIELD: "high"}, Mark()),
    ({FIELD: "fast"}, salted("fast")), ({FIELD: 0.97}, salted("p", 0.97)), ({FIELD: 1e-300}, salted("p", 1e-300)),
]  # fmt: skip


@pytest.mark.parametrize(("vllm_xargs", "mark"), VALUES)
def test_a_level_becomes_the_mark_that_our_front_process_makes(
    core: Callable[..., Core], vllm_xargs: Any, mark: Mark
) -> None:
    extra_args = taken(engine := core(), vllm_xargs)
    assert Mark.read(extra_args) == mark
    assert FIELD not in extra_args
    assert extra_args.get("other") == (vllm_xargs or {}).get("other")
    front = SimpleNamespace(vllm_config=engine.vllm_config)
    assert level_policy.mark_of(front, SamplingParams(extra_args=vllm_xargs)) == mark


def test_a_worker_reads_it(core: Callable[..., Core]) -> None:
    """The request travels a second time, in the scheduler's output."""
    requests = RunnerRequests({"exact", "default", "p", "fast"})
    for vllm_xargs, mark in VALUES:
        extra_args = MsgpackDecoder().decode(MsgpackEncoder().encode(taken(core(), vllm_xargs)))
        assert requests._level_of(extra_args) == mark.request_level


HOSTILE = [
    2, -1, 1.5, -0.5, 1e308, 2**63 - 1, -(2**63), 2**64 - 1, "", "0", "Exact", "default", "p", "x" * 100_000, "\0",
    None, [], [0], ["exact"], [[[[]]]], {}, {"level": "exact"}, {"__class__": "Mark"}, [{"a": [None, {}]}] * 1000,
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_any_other_value_is_refused_with_what_is_allowed(core: Callable[..., Core], value: object) -> None:
    said = rf"^sparse-prefill: vllm_xargs {FIELD}: given .{{1,99}}, expected one of 0 \(exact\), 1 .*'fast'"
    with pytest.raises(VLLMValidationError, match=said):
        taken(core(), {FIELD: value})


@pytest.mark.parametrize("key", ["sparse-prefill", "sparsePrefill", "sparse_prefil"])
def test_a_misspelt_key_is_refused(core: Callable[..., Core], key: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"vllm_xargs: given '{key}', expected the key 'sparse_prefill'"):
        taken(core(), {key: 0})


FORGED = [
    ["exact", None, None, 0], ["default", None, "exact", 100], ["fast", None, "", 0], ["p", 0.5, None, 0], "exact", 5,
    None, [], {}, [["exact"], None, None, 0], ["exact", None, "x" * 100_000, 2**63],
]  # fmt: skip


@pytest.mark.parametrize("mark", FORGED, ids=lambda value: repr(value)[:20])
def test_a_mark_that_a_client_sends_counts_for_nothing(core: Callable[..., Core], mark: object) -> None:
    """Otherwise it could write sparse keys under the hashes of exact blocks, or choose a level that is not allowed."""
    assert Mark.read(taken(core(), {MARK: mark})) == Mark()
    assert Mark.read(taken(core(), {MARK: mark, FIELD: 0})) == salted("exact")
    denied = core(requests={"default": "exact", "allow": []})
    assert Mark.read(taken(denied, {MARK: mark})) == Mark("exact")


class TestPolicy:
    def test_the_operators_default_and_what_it_allows(self, core: Callable[..., Core]) -> None:
        engine = core(requests={"default": "exact", "allow": ["on"]})
        assert Mark.read(taken(engine, {})) == Mark("exact")
        assert Mark.read(taken(engine, {FIELD: 1})) == salted("default")
        with pytest.raises(VLLMValidationError, match=r"given 'fast', but this server's settings \(requests.allow\)"):
            taken(engine, {FIELD: "fast"})

    def test_names_of_models_do_not_reach_the_core(self, core: Callable[..., Core]) -> None:
        engine = core(requests={"default": "exact", "models": {"canary": "on"}})
        for vllm_xargs in {}, {FIELD: 0}:
            with pytest.raises(
                VLLMValidationError, match=r"requests\.models gives levels by served model names, which"
            ):
                taken(engine, vllm_xargs)
        marked = salted("default").write(None)  # by our front process, which knows the name
        params = SimpleNamespace(extra_args=marked)
        request = SimpleNamespace(request_id="r", sampling_params=params, abort_immediately=False)
        engine.preprocess_add_request(request)
        assert params.extra_args == marked


def test_requests_that_prefill_nothing_stay_as_they_are(core: Callable[..., Core], lines: list[str]) -> None:
    """Requests for pooling, which have no level, and vLLM's own requests that free another server's blocks."""
    engine = core(requests={"models": {"canary": "exact"}})
    assert taken(engine, {"kv_transfer_params": {}}, abort_immediately=True) == {"kv_transfer_params": {}}
    pooled = SimpleNamespace(request_id="r", sampling_params=None)
    assert engine.preprocess_add_request(pooled) == (pooled, 0)
    assert lines == []


def test_the_log_says_once_what_such_requests_miss(
    core: Callable[..., Core], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``vllm-rs serve`` started the engine, so no variable indicated this at the start."""
    engine = core()
    for _ in range(3):
        taken(engine, {})
    assert [line for line in lines if "front end in Rust" in line] == [f"sparse-prefill: {rust_frontend.MISSING}"]
    monkeypatch.setenv(rust_frontend.VARIABLE, "1")
    taken(core(), {})
    assert len([line for line in lines if "front end in Rust" in line]) == 1


class TestInputThread:
    """vLLM's input thread, with requests from its socket: a refusal ends a request, but neither the thread nor the
    engine."""

    DEADLINE_S = 120.0

    @pytest.fixture
    def running(self, core: Callable[..., Core], tmp_path: Any) -> Iterator[tuple[Core, zmq.Socket[bytes]]]:
        engine, address = core(), f"ipc://{tmp_path}/input"
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            ready = threading.Event()

            def run() -> None:
                with suppress(zmq.ContextTerminated):
                    engine.process_input_sockets([address], None, b"core", ready)  # type: ignore[arg-type]

            threading.Thread(target=run, daemon=True).start()
            assert ready.wait(self.DEADLINE_S)
            socket.recv_multipart()
            yield engine, socket

    def test_it_outlives_all_hostile_requests(self, running: tuple[Core, zmq.Socket[bytes]]) -> None:
        engine, socket = running
        refused = [{FIELD: value} for value in HOSTILE] + [{"sparse-prefill": 0}]
        requests = {f"bad {i}": vllm_xargs for i, vllm_xargs in enumerate(refused)} | {"good": {FIELD: 0}}
        for request_id, vllm_xargs in requests.items():
            frames = [b"core", EngineCoreRequestType.ADD.value, *sent(vllm_xargs, request_id)]
            socket.send_multipart(frames)
        kind, (request, _) = engine.input_queue.get(timeout=self.DEADLINE_S)
        assert (kind, request.request_id) == (EngineCoreRequestType.ADD, "good")
        assert Mark.read(request.sampling_params.extra_args) == salted("exact")
        assert engine.input_queue.empty()
        outputs = [engine.output_queue.get_nowait()[1].outputs for _ in refused]
        assert [output.request_id for (output,) in outputs] == [f"bad {i}" for i in range(len(refused))]
        assert {output.finish_reason for (output,) in outputs} == {FinishReason.ERROR}
        # vLLM's own preparation takes images into the core's cache, so it must also run for refused requests.
        assert engine.prepared == list(requests)
