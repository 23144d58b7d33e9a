# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the client through which a server calls its engines."""

from types import SimpleNamespace
from typing import Any

from vllm_sparse_backend.config.metrics import WORKER_METHOD


class Client:
    """A server's client. Each engine's answer, by number, is a list of workers' answers or a function."""

    def __init__(self, engines: dict[int, Any], method: str = WORKER_METHOD) -> None:
        self.engines, self.method = engines, method
        self.asked: list[int] = []
        self.engine_core = SimpleNamespace(
            engine_ranks_managed=list(engines),
            core_engines=[number.to_bytes(2, "little") for number in engines],
            _call_utility_async=self._call,
        )

    async def collective_rpc(self, method: str) -> Any:
        """Call only the first engine, as vLLM does."""
        return await self._answer(next(iter(self.engines)), method)

    async def _call(self, utility: str, method: str, timeout: None, args: Any, kwargs: None, engine: bytes) -> Any:
        assert utility == "collective_rpc"
        return await self._answer(int.from_bytes(engine, "little"), method)

    async def _answer(self, engine: int, method: str) -> Any:
        assert method == self.method
        self.asked.append(engine)
        answer = self.engines[engine]
        return (await answer()) if callable(answer) else answer
