# SPDX-License-Identifier: Apache-2.0
"""Processes of deploy/salting_proxy.py in front of a test's servers."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROXY = Path(__file__).parents[2] / "deploy/salting_proxy.py"


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


@contextmanager
def started_proxy(decode_url: str, prefill_url: str | None = None) -> Iterator[str]:
    """Yield the URL of a proxy in front of a decode server, paired with a prefill server if given."""
    port = free_port()
    pair = [] if prefill_url is None else ["--prefill", prefill_url]
    process = subprocess.Popen([sys.executable, PROXY, "--decode", decode_url, *pair, "--port", str(port)])
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)
