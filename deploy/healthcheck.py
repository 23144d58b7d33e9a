# SPDX-License-Identifier: Apache-2.0
"""healthcheck.py [PORT]: exit 0 if the server of this container answers /health, else 1.

Without PORT, it reads port and TLS from the arguments of the server, which is the first process of the container.
"""

import ssl
import sys
import urllib.request
from pathlib import Path


def option(command: list[str], name: str) -> str | None:
    """Return the last value of ``--name VALUE`` or ``--name=VALUE``; None if there is none."""
    value = None
    for argument, following in zip(command, [*command[1:], ""]):
        if argument == name:
            value = following
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def address(arguments: list[str], command: list[str]) -> str:
    port = arguments[0] if arguments else option(command, "--port") or "8000"
    scheme = "https" if option(command, "--ssl-certfile") else "http"
    return f"{scheme}://127.0.0.1:{port}/health"


def main() -> None:
    arguments = sys.argv[1:]
    command = [] if arguments else Path("/proc/1/cmdline").read_text().split("\0")
    url = address(arguments, command)
    # The check asks its own container by a loopback address, which no certificate names.
    unverified = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({}), unverified).open(url, timeout=4).close()
    except OSError as error:
        sys.exit(f"no answer from {url}: {error}")


if __name__ == "__main__":
    main()
