# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of a model on a text, written down for `benchmarks.methods`, `recall` and others.

python -m benchmarks.capture MODEL FOLDER [--tokens 32768] [--skip 0] [--text FOLDER]
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import Device, Text
from vllm_sparse_backend.cli.common import device_of, failures, folder_for
from vllm_sparse_backend.profiling.capture import (
    begin_ids,
    capture,
    default_text,
    load_tokenizer,
    require_model,
    text_files,
)
from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected


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


def read_tokens(model: Path, files: Sequence[Path], length: int, begin_token: bool = True, skip: int = 0) -> list[int]:
    """A prompt of ``length`` tokens from text files, one after the other, less their first ``skip`` tokens.

    With ``begin_token``, the tokenizer's own begin-of-sequence token comes first, if it has one. Raises
    ConfigurationError if the files do not have as many tokens.
    """
    tokenizer = load_tokenizer(model)
    token_ids: list[int] = []
    for path in files:
        if len(token_ids) >= skip + length:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        token_ids += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(token_ids) < skip + length:
        given = f"{len(files)} files with {len(token_ids)} tokens"
        raise ConfigurationError(f"text: {unexpected(given, f'at least {skip + length} tokens')}")
    return [*(begin_ids(tokenizer) if begin_token else ()), *token_ids[skip:]][:length]


if __name__ == "__main__":
    typer.run(main)
