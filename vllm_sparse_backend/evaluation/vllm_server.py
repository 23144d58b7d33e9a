# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` processes of stock vLLM and of this backend: starts, awaits, queries and always stops them."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from vllm_sparse_backend.evaluation.client import RequestError, connected
from vllm_sparse_backend.evaluation.report import BenchError

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""Variable for the cache's size in GiB. If it is set, vLLM ignores ``--kv-cache-memory-bytes``."""

# vLLM's default share of memory fails on a CPU. A small cache leaves memory free on a test machine.
CPU_ENV = {CPU_CACHE: "1"}
CPU_ARGS = ("--gpu-memory-utilization", "0.3", "--dtype", "float32", "--enforce-eager")
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The `vllm` command of this Python."""
FILES = ("profile", "crossover")
"""Settings that may be paths."""

_ENGINE_ERROR = re.compile(
    r"^\((?:EngineCore|Worker|VllmWorker)\S* pid=\d+\) (?:ERROR \S+ \S+ \[\S+\] )?"
    r"((?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt): \S.*)$",
    re.MULTILINE,
)
"""Last line of a traceback in an engine process's log: the exception's name and message."""


class ServerError(BenchError):
    """The server did not start, or it died. The message ends with the end of its log and the engine's error."""


def root_cause(log: str) -> str | None:
    """Return the first exception that the engine logged. Later exceptions only say that the engine is gone."""
    match = _ENGINE_ERROR.search(log)
    return match[1] if match else None


NOT_FASTER_ON_CPU = "On a CPU, this is not faster than stock vLLM. README.md has the speed-ups on a GPU."


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def sparse_args(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments of `vllm serve` that select this backend with ``settings``, the ``sparse_prefill`` object.

    Relative paths in it become absolute, because the server runs in its own folder.
    """
    absolute = dict(settings)
    for name in FILES:
        if settings.get(name) and Path(settings[name]).is_file():
            absolute[name] = str(Path(settings[name]).resolve())
    return ("--attention-backend", "sparse-prefill", "--additional-config", json.dumps({"sparse_prefill": absolute}))


def device_name() -> str:
    """Return the name of this machine's GPU, or its number of CPU cores."""
    if has_cuda():
        import torch

        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores"


class Server:
    """Context manager that runs one `vllm serve MODEL` on loopback.

    ``args`` follow the model on the command line, before the arguments that a CPU needs. ``env`` overrides this
    process's environment. The server's files are deleted when it stops.

    Raises ``ServerError`` on entry if the server exits, or does not answer /health within ``READY_TIMEOUT_S``.
    """

    def __init__(
        self,
        model: Path | str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.model = str(Path(model).resolve()) if Path(model).exists() else str(model)
        self._port = reserve_port()
        self.port: int = self._port.getsockname()[1]
        on_cpu = not has_cuda()
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.command = [*VLLM, "serve", self.model, *address, *args, *(CPU_ARGS if on_cpu else ())]
        self._folder = tempfile.TemporaryDirectory(prefix="sparse-prefill-")
        self.log_path = Path(self._folder.name) / "server.log"
        self._env = {**(CPU_ENV if on_cpu else {}), **environment(), **(env or {})}
        if any(arg.partition("=")[0] == "--kv-cache-memory-bytes" for arg in args):
            self._env.pop(CPU_CACHE, None)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __str__(self) -> str:
        return shlex.join(["vllm", *self.command[len(VLLM) :]])

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready(self._start())
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> "subprocess.Popen[bytes]":
        folder = Path(self._folder.name)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._env | {"VLLM_RPC_BASE_PATH": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )
        return self._process

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if (code := process.poll()) is not None:
                raise ServerError(f"{self}\nexited with code {code} before it was ready. {self._end_of_log()}")
            try:
                with connected(self.url, timeout_s=5) as send:
                    send("/health")
                return
            except RequestError:
                time.sleep(0.25)
        raise ServerError(f"{self}\nwas not ready after {READY_TIMEOUT_S:.0f} s. {self._end_of_log()}")

    def tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-60:])

    def _end_of_log(self) -> str:
        """Return the log's last lines, and the engine's error, which is often further up."""
        cause = root_cause(self.log_path.read_text(errors="replace"))
        return f"The end of its log:\n{self.tail()}" + (f"\nThe engine's own error: {cause}" if cause else "")

    def stop(self) -> None:
        """Ask the server to end, then kill the rest of its process group."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):  # all of its processes may have ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._port.close()
        self._folder.cleanup()


def reserve_port() -> socket.socket:
    """Reserve a loopback port until the socket is closed. No other process gets the port, but a server may listen on
    it.

    A port that is merely free now may be taken minutes later, when the server has finished importing.
    """
    held = socket.socket()
    # Two sockets with this option may share a port as long as at most one of them listens. This one never listens.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def environment() -> dict[str, str]:
    """Return this process's environment for vLLM's commands."""
    # Tests switch Triton's interpreter on, but servers must not inherit it.
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | OFFLINE
