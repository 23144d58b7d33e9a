# SPDX-License-Identifier: Apache-2.0
"""A prefill server and a decode server, connected by vLLM's NixlConnector, on CPUs.

This needs the package `nixl`, whose UCX transfers between processes of a machine without RDMA. The decode server runs
this backend too: vLLM's stock CPU attention would treat keys from a server with another backend as a GPU's, and
rearrange them. Its decodes run on vLLM's own attention.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Answer, Servers, assert_same
from tests.helpers.servers import Server
from vllm_sparse_backend.evaluation.vllm_server import has_cuda, reserve_port, sparse_args

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.skipif(has_cuda(), reason="one GPU is not enough for a pair"),
]

pytest.importorskip("nixl", reason="the pair needs: pip install nixl")

LEVELS, TOLERANCE = ("high", "fast"), 5e-5
# One token more than whole pages: a single server that finds these pages in its cache computes the last token like a
# decode server, densely.
LENGTHS = (63, 8 * scenario.PAGE_TOKENS + 1)


class Pair(Server):
    """The decode server, to which each prompt comes from the prefill server, as a router sends them."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.model, self.prefill, self.decode = decode.model, prefill, decode

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 600) -> dict[str, Any]:
        to_prefill = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        prefilled = self.prefill.post(path, to_prefill, timeout_s=timeout_s)
        to_decode = {**body, "kv_transfer_params": prefilled["kv_transfer_params"]}
        return self.decode.post(path, to_decode, timeout_s=timeout_s)

    def ask(self, token_ids: list[int], level: object) -> Answer:
        return scenario.ask(self, token_ids, level=level)


def transfer_args(role: str) -> tuple[str, ...]:
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return "--kv-transfer-config", json.dumps(config)


@pytest.fixture(scope="module")
def pair(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    settings = server_levels.write(tmp_path_factory.mktemp("pair"), *server_levels.ALL)
    with ExitStack() as stack:
        servers = []
        for role in ("kv_producer", "kv_consumer"):
            side_channel = stack.enter_context(reserve_port())
            env = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel.getsockname()[1]),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "UCX_TLS": "tcp,self",
            }
            args = (*sparse_args(settings), *scenario.SERVER_ARGS, *transfer_args(role))
            servers.append(Server(small_model, args, env=env))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, servers))
        prefill, decode = servers
        yield Pair(prefill, decode)


def prompts() -> dict[int, list[int]]:
    return {length: scenario.prompt(length, seed=3000 + length) for length in LENGTHS}


def test_sparse_answers_are_those_of_a_single_server_and_exact_answers_are_stock(pair: Pair, servers: Servers) -> None:
    """Each prompt at every level in turn, so no level may read another level's blocks in the decode server."""
    before = scenario.counted(pair.decode)
    for length, token_ids in prompts().items():
        answers = {level: pair.ask(token_ids, level) for level in (*LEVELS, "exact")}
        assert_same(answers["exact"], scenario.ask(servers.stock, token_ids), TOLERANCE)
        for level in LEVELS:
            scenario.ask(servers.ours, token_ids, level=level)  # fills the cache
            assert_same(answers[level], scenario.ask(servers.ours, token_ids, level=level), TOLERANCE)
            if length > server_levels.MIN_TOKENS:
                assert answers[level].logprobs != pytest.approx(answers["exact"].logprobs, abs=1e-3)
        # Blocks from the connector are in the decode server's prefix cache, marked with their level.
        assert_same(pair.ask(token_ids, "high"), answers["high"], TOLERANCE)
    # The decode server computed only decodes: all prompts came through the connector.
    decoded = scenario.counted(pair.decode, before)
    assert {path for (path, _), count in decoded.rows.items() if count} == {"decode"}


def test_the_prefill_servers_refusal_reaches_the_client(pair: Pair) -> None:
    with pytest.raises(Exception, match="answered 400") as refused:
        pair.ask(scenario.prompt(300, seed=5), "no such level")
    assert "no such level" in str(refused.value)
