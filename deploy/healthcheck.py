# SPDX-License-Identifier: Apache-2.0
"""healthcheck.py [PORT]: exit 0 if the server of this container answers /health, else 1.

Without PORT, it reads --port, --host and --ssl-certfile from the arguments of the server, which is the first
process of the container, and from the file of its --config.
"""

import http.client
import ssl
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 4
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def options(command: list[str]) -> dict[str, str]:
    """Return the last value of each ``--name VALUE`` or ``--name=VALUE``. The command line wins over --config."""
    given = {}
    for argument, following in zip(command, [*command[1:], ""]):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            given[name.replace("_", "-")] = value if equals else following
    return {**config_file(given["config"]), **given} if "config" in given else given


def config_file(path: str) -> dict[str, str]:
    import yaml  # vLLM depends on it

    values: Any = yaml.safe_load(Path(path).read_text()) or {}
    return {str(name).replace("_", "-"): str(value) for name, value in values.items()}


def connection(given: dict[str, str]) -> tuple[str, http.client.HTTPConnection]:
    """Return the address of a server with these options, and a connection to it."""
    host, port = given.get("host", "127.0.0.1"), int(given.get("port", 8000))
    host = ANY_ADDRESS.get(host, host)
    if "ssl-certfile" in given:
        # The check asks its own container, by an address that no certificate names.
        unverified = ssl._create_unverified_context()
        return f"https://{host}:{port}", http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=unverified)
    return f"http://{host}:{port}", http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


def main() -> None:
    arguments = sys.argv[1:]
    command = ["--port", *arguments] if arguments else Path("/proc/1/cmdline").read_text().split("\0")
    given = options(command)
    if given.get("headless", "False") != "False":  # a further node, which serves no requests
        return
    address, server = connection(given)
    try:
        server.request("GET", "/health")
        status = server.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"no answer from {address}/health: {error}")
    if status != 200:
        sys.exit(f"status {status} from {address}/health")


if __name__ == "__main__":
    main()
