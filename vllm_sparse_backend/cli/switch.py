# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill switch`: makes all new requests of a running server exact, or undoes that."""

import json
import os
import urllib.error
import urllib.request
from enum import StrEnum
from typing import Annotated

import typer

from vllm_sparse_backend.cli.common import failures, say
from vllm_sparse_backend.config.metrics import SWITCH_PATH

TIMEOUT_S = 90


class To(StrEnum):
    EXACT = "exact"
    ON = "on"


def switch(
    url: Annotated[str, typer.Argument(help="Address of the server, such as http://localhost:8000.")],
    to: Annotated[To, typer.Argument(help="exact: all new requests run dense; on: levels apply again.")],
) -> None:
    """Make all new requests of a running server exact, or let them run sparse again.

    The server's settings must have "switch": true. If the server has an API key, set OPENAI_API_KEY to it.
    """
    from vllm_sparse_backend.evaluation.client import server_url

    with failures():
        ask(server_url(url, "URL"), to)
    say(f"{url}: all new requests run {'exact' if to is To.EXACT else 'at their own levels'}")


def ask(url: str, to: To) -> None:
    """Send the switch request. Raises ServerError if the server does not switch."""
    from vllm_sparse_backend.evaluation.vllm_server import ServerError

    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(url + SWITCH_PATH, json.dumps({"to": to.value}).encode(), headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(request, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        why = {
            401: "it requires a key; set OPENAI_API_KEY",
            404: 'it has no switch; start it with --additional-config \'{"sparse_prefill": {"switch": true, ...}}\'',
        }.get(error.code, said)
        raise ServerError(f"{url} answered {error.code}: {why}") from None
    except (OSError, ValueError) as error:
        raise ServerError(f"{url}: no answer: {error}") from None
