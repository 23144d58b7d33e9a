# SPDX-License-Identifier: Apache-2.0
"""The switch: the level that the engine's core gives new requests, and the answers at the server's address."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.engine_client import Client
from vllm_sparse_backend.config.metrics import SWITCH_METHOD, SWITCH_PATH, WORKER_METHOD
from vllm_sparse_backend.config.request_levels import Mark, Salt
from vllm_sparse_backend.serving import hooks
from vllm_sparse_backend.serving.frontend import switch_endpoint
from vllm_sparse_backend.serving.frontend.metrics_endpoint import MetricsEndpoint


class Core:
    """vLLM's core with only the methods for incoming requests."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def preprocess_add_request(self, request: Any) -> Any:
        return request

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        return [{"rank": rank, "samples": []} for rank in range(2)]


for hook in hooks.HOOKS:
    if hook.owner == "EngineCore":
        hooks.put_around(Core, hook.function, hook.wrapper, hook.expects)


def level_of(core: Core, extra_args: Any = None) -> Any:
    """Return a new request's level in the engine, and the level whose cached blocks it reads."""
    params = SimpleNamespace(extra_args=extra_args)
    request = SimpleNamespace(sampling_params=params, abort_immediately=False)
    return Mark.read(core.preprocess_add_request(request).sampling_params.extra_args)


def test_one_rank_tells_and_requests_for_pooling_are_left_alone(configured: Callable[..., Any]) -> None:
    """tests/server/test_serve.py checks that new requests are exact until the switch is back."""
    core = Core(configured(method="a_shape", min_tokens=320))
    assert level_of(core) == Mark()
    assert core.collective_rpc(SWITCH_METHOD, None, ("exact",)) == [""]
    exact, fast = (Mark(level, None, Salt(level, 320)) for level in ("exact", "fast"))
    assert level_of(core) == level_of(core, fast.write(None)) == exact
    answers = core.collective_rpc(WORKER_METHOD, None, (True,))
    assert [rank["samples"] for rank in answers] == [[("switched_exact", [], 1.0)], []]
    core.preprocess_add_request(SimpleNamespace(sampling_params=None))


def test_a_store_that_tells_no_levels_apart_keeps_it_from_being_switched(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SimpleNamespace(kv_connector="LMCacheConnectorV1", kv_connector_extra_config={})
    monkeypatch.setattr(config := configured(method="a_shape"), "kv_transfer_config", store)
    core = Core(config)
    (refused,) = core.collective_rpc(SWITCH_METHOD, None, ("exact",))
    assert "LMCacheConnectorV1" in refused
    assert level_of(core) == Mark()


class TestAddress:
    @staticmethod
    def ask(engines: dict[int, Any], body: bytes, key: str = "k", settings: Any = None) -> tuple[int, str]:
        """Send a request to a server with the API key ``k``, through vLLM's middleware."""
        from fastapi import FastAPI
        from fastapi.testclient import TestClient
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        app, endpoint = FastAPI(), MetricsEndpoint()
        endpoint.attach_router(app)
        app.add_middleware(AuthenticationMiddleware, tokens=["k"])
        client: Any = Client(engines, SWITCH_METHOD)
        client.vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(backend=None),
            additional_config={"sparse_prefill": {"switch": True} if settings is None else settings},
            model_config=SimpleNamespace(served_model_name="m"),
        )
        asyncio.run(endpoint.init_state(client, None, None))  # type: ignore[arg-type]
        said = TestClient(app).post(SWITCH_PATH, content=body, headers={"Authorization": f"Bearer {key}"})
        return said.status_code, said.text

    @pytest.fixture(autouse=True)
    def ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_sparse_backend.serving.frontend.metrics_endpoint.is_selected", lambda _: True)
        monkeypatch.setattr(switch_endpoint, "TIMEOUT_S", 0.05)

    def test_every_engine_is_told(self) -> None:
        positions = []

        async def engine(to: str) -> list[str]:
            positions.append(to)
            return [""]

        assert self.ask({0: engine, 1: engine}, b'{"to": "exact"}') == (200, '{"sparse_prefill":"exact"}')
        assert positions == ["exact", "exact"]

    @pytest.mark.parametrize(
        ("body", "status", "said"),
        [(b"{}", 400, "given {}, expected"), (b"?", 400, "expected"), (b'{"to": "off"}', 400, "{'to': 'off'}")],
    )
    def test_a_body_that_says_something_else(self, body: bytes, status: int, said: str) -> None:
        answer_status, text = self.ask({0: [""]}, body)
        assert answer_status == status
        assert said in text

    def test_an_engine_that_can_not_or_does_not_answer(self) -> None:
        async def silent(to: str) -> list[str]:
            await asyncio.sleep(9)
            return [""]

        async def dead(to: str) -> list[str]:
            raise RuntimeError("the engine is dead")

        said = '{"error":{"message":"sparse-prefill: engine 1: no","code":409}}'
        assert self.ask({0: [""], 1: ["no"]}, b'{"to": "on"}') == (409, said)
        assert self.ask({0: [""], 1: silent}, b'{"to": "on"}')[0] == 504
        assert "RuntimeError: the engine is dead" in self.ask({0: dead}, b'{"to": "on"}')[1]

    def test_not_without_the_servers_key_and_not_unless_the_settings_say_so(self) -> None:
        assert self.ask({0: [""]}, b'{"to": "exact"}', key="other")[0] == 401
        assert self.ask({0: [""]}, b'{"to": "exact"}', settings={})[0] == 404
