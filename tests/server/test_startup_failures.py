# SPDX-License-Identifier: Apache-2.0
"""A wrong configuration: the server does not start, and its last line has the given value, the expected value and the
place."""

from pathlib import Path

import pytest

from tests.helpers.servers import Server
from tests.helpers.tiny_models import CONFIG
from vllm_sparse_backend.evaluation.vllm_server import ServerError, sparse_args

pytestmark = [pytest.mark.server, pytest.mark.full]
pytest.importorskip("vllm")

OTHER_MODEL = """\
format: 1
model: {architecture: LlamaForCausalLM, num_layers: 32, num_heads: 32, num_kv_heads: 8, head_dim: 128}
default: {method: vertical_slash}
"""


def test_the_server_does_not_start_and_says_why_at_last(small_model: Path, tmp_path: Path) -> None:
    """The error comes before a model loads. (Other tests cover other wrong settings, without a server.)"""
    (tmp_path / "other.yaml").write_text(OTHER_MODEL)
    log = tmp_path / "server.log"
    args = sparse_args({"profile": str(tmp_path / "other.yaml")})
    with (
        pytest.raises(ServerError, match=r"exited with code [^0]"),
        Server(small_model, args, log_path=log),
    ):
        pass
    said = log.read_text(errors="replace")
    last = said.rstrip().splitlines()[-1]
    for part in ("other.yaml", "32 layers", f"{CONFIG['num_hidden_layers']} layers", "num_layers"):
        assert part in last, said[-3000:]
    assert "Loading weights took" not in said
    assert "Starting to load model" not in said
