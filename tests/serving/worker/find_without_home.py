# SPDX-License-Identifier: Apache-2.0
"""Finds streaming heads where the user has no home and no entry in passwd, and no file can be written."""

import errno
import os
import pwd
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.streaming_model import PROMPT, SETTINGS, Model
from tests.helpers.vllm_objects import make_config, make_layers, make_model
from vllm_sparse_backend.config.keys import STREAMING
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker import streaming
from vllm_sparse_backend.serving.worker.owner import Worker

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.truncate")


def refuse_writing(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: fail like a read-only file system."""
    is_write = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITING)
    if is_write or event in CHANGING:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]))


def unknown_user(uid: int) -> Any:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


def main() -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "streaming_heads"}
    config = make_config(make_model(Path(sys.argv[1])), settings)
    config.additional_config[STREAMING] = True
    vars(compat).update(
        tensor_parallel=lambda config: (0, 1),
        pipeline_parallel=lambda config: (0, 1),
        gather_over_stages=lambda value: [value],
    )
    vars(streaming).update(_prompt=lambda vllm_config: PROMPT)
    worker = Worker(config)
    layers = make_layers(config, [0])
    model = Model(layers, {0: {1, 2}})
    torch.randn(2, 2) @ torch.randn(2, 2)  # before the audit hook
    vars(pwd).update(getpwuid=unknown_user)
    sys.addaudithook(refuse_writing)
    streaming.find_streaming_heads(worker, lambda: model)
    print({number: sorted(heads) for number, heads in worker.streaming.by_layer.items()}, flush=True)


main()
