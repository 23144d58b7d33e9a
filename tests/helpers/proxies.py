# SPDX-License-Identifier: Apache-2.0
"""Processes of deploy/salting_proxy.py in front of a test's servers."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_sparse_backend.evaluation.vllm_server import reserve_port

PROXY = Path(__file__).parents[2] / "deploy/salting_proxy.py"
DEADLINE_S = 300.0
"""Seconds in which a proxy must start, and in which it must end."""


@contextmanager
def closed_port() -> Iterator[int]:
    """Yield a port on which no process listens."""
    with reserve_port() as held:
        yield held.getsockname()[1]


@contextmanager
def started_proxy(decode_url: str, prefill_url: str | None = None) -> Iterator[str]:
    """Yield the URL of a proxy in front of a decode server, paired with a prefill server if given."""
    pair = [] if prefill_url is None else ["--prefill", prefill_url]
    with reserve_port() as held:
        address = held.getsockname()
        process = subprocess.Popen([sys.executable, PROXY, "--decode", decode_url, *pair, "--port", str(address[1])])
        try:
            wait_until_it_listens(process, address)
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def wait_until_it_listens(process: "subprocess.Popen[bytes]", address: tuple[str, int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_connection(address).close()
            return
        except OSError:
            assert process.poll() is None, f"the proxy ended with {process.returncode}"
            assert time.monotonic() < deadline, f"the proxy does not listen after {DEADLINE_S:.0f} s"
            time.sleep(0.1)
