# SPDX-License-Identifier: Apache-2.0
"""Errors of a server that does not start: the end of its log, and the engine's error from further up."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from vllm_sparse_backend.evaluation import vllm_server as server_module
from vllm_sparse_backend.evaluation.vllm_server import (
    CPU_CACHE,
    Server,
    ServerError,
    reserve_port,
    root_cause,
    sparse_args,
)

RAISED = "ValueError: To serve at least one request, 0.08 GiB KV cache is needed"
LOG = f"""\
(APIServer pid=20) WARNING 11-21 19:37:21 [system_utils.py:255] This can cause `OSError: Too many open files`.
(EngineCore pid=30) INFO 11-21 19:38:07 [core.py:133] Initializing a V1 LLM engine
(EngineCore pid=30) WARNING 11-21 19:38:09 [core.py:140] RuntimeError: tried and given up, which does no harm
(EngineCore pid=30) ERROR 11-21 19:38:48 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=30) ERROR 11-21 19:38:48 [core.py:1510]     raise ValueError("To serve ValueError: no")
(EngineCore pid=30) ERROR 11-21 19:38:48 [core.py:1510] {RAISED}
(EngineCore pid=30) ERROR 11-21 19:39:00 [core.py:1510] torch.OutOfMemoryError: a later one
""" + "".join(f"  frame {i}\n" for i in range(70))
ENDS = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=1) ERROR 11-21 19:38:48 [core.py:15] ValueError: why",
        "(EngineCore_DP0 pid=1) ValueError: why",
        "(Worker_TP0 pid=1) ERROR 11-21 19:38:48 [multiproc_executor.py:7] ValueError: why",
    ],
)
def test_the_root_cause_is_the_engines_first_exception(line: str) -> None:
    log = f"(APIServer pid=2) RuntimeError: no\n{line}\n(EngineCore pid=1) KeyError: later\n"
    assert root_cause(log) == "ValueError: why"
    assert root_cause(LOG) == RAISED
    assert root_cause(LOG.replace("(EngineCore", "(APIServer")) is None


def start(log: str, tmp_path: Path) -> ServerError:
    """Return the error of a server whose process writes ``log`` and exits instead of starting vLLM."""
    (tmp_path / "says").write_text(log)
    server = Server(tmp_path)
    server.command = [sys.executable, "-c", f"print(open({str(tmp_path / 'says')!r}).read(), end=''); exit(3)", "serve"]
    with pytest.raises(ServerError, match="exited with code 3") as caught, server:
        pass
    return caught.value


def test_the_message_ends_with_the_engines_own_error(tmp_path: Path) -> None:
    said = str(start(LOG + ENDS, tmp_path))
    assert said.count(RAISED) == 1  # the end of the log does not contain the error
    assert said.endswith(f"{ENDS}The engine's own error: {RAISED}")


def test_a_reserved_port_is_nobody_elses_but_the_servers() -> None:
    held = [reserve_port() for _ in range(200)]
    ports = {port.getsockname()[1] for port in held}
    assert len(ports) == len(held)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(held[0].getsockname())  # without sharing the port
    for port in held[:3]:
        address = port.getsockname()
        with socket.create_server(address) as server, socket.create_connection(address) as client:  # as vLLM listens
            with server.accept()[0] as got:
                got.sendall(b"x")
            assert client.recv(1) == b"x"
    for port in held:
        port.close()


def test_files_are_found_from_the_servers_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("a profile")
    monkeypatch.chdir(tmp_path)

    def given(**settings: object) -> object:
        return json.loads(sparse_args(settings)[-1])["sparse_prefill"]

    assert given(profile="mine.yaml", min_tokens=5) == {"profile": str(tmp_path / "mine.yaml"), "min_tokens": 5}
    assert given(profile="streaming", crossover=None) == {"profile": "streaming", "crossover": None}


@pytest.mark.parametrize("args", [(), ("--kv-cache-memory-bytes", "50331648"), ("--kv-cache-memory-bytes=5",)])
def test_a_cache_that_is_asked_for_is_not_overruled(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_CACHE, "3")
    monkeypatch.setattr(server_module, "has_cuda", lambda: False)
    server = Server(tmp_path, args)
    assert server._env.get(CPU_CACHE) == (None if args else "3")
    server.stop()


def test_a_server_that_is_killed_does_not_delay_its_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ignores SIGTERM, like a server that is starting. It would end by itself after a minute."""
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 600.0)
    server = Server(tmp_path)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    server.command = [sys.executable, "-c", deaf]
    server._start()
    process = server._process
    assert process is not None
    while "deaf" not in server.tail():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    server.stop()
    assert process.returncode == -signal.SIGKILL
