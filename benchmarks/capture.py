# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of a model on a text, written down for `benchmarks.methods`, `recall` and others.

python -m benchmarks.capture MODEL FOLDER [--tokens 32768] [--skip 0] [--text FOLDER]
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import Device, Text
from vllm_sparse_backend.cli.common import device_of, failures, folder_for
from vllm_sparse_backend.profiling.capture import capture, default_text, read_tokens, require_model, text_files


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model in Hugging Face's format.")],
    folder: Annotated[Path, typer.Argument(help="Where the capture is written.")],
    tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=1)] = 32768,
    text: Text = None,
    skip: Annotated[int, typer.Option(help="Tokens of the text to leave out before the prompt.", min=0)] = 0,
    device: Device = None,
) -> None:
    with failures():
        require_model(model, tokens)
        ids = read_tokens(model, text_files(text or default_text()), tokens, skip=skip)
        made = capture(model, ids, folder_for("FOLDER", folder), device_of(device))
        left_out = f", left out: {made.left_out}" if made.left_out else ""
        print(f"{made.num_tokens:,} tokens of {made.model} in {folder}: {len(made.scales)} layers{left_out}")


if __name__ == "__main__":
    typer.run(main)
