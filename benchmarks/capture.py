# SPDX-License-Identifier: Apache-2.0
"""Writes a model's queries, keys and values on a text to disk, for `benchmarks.methods`.

python -m benchmarks.capture MODEL FOLDER [--tokens 32768] [--skip 0] [--text FOLDER]
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.options import Device, Text
from vllm_sparse_backend.calibration.capture import (
    Capture,
    begin_ids,
    capture_prompts,
    default_text,
    load_tokenizer,
    prompt_tokens,
)
from vllm_sparse_backend.calibration.prompts import MOST_CHARS
from vllm_sparse_backend.cli.common import device_of, failures
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.evaluation.prompt_texts import read_prompt_text


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model in Hugging Face's format.")],
    folder: Annotated[Path, typer.Argument(help="Where the capture is written.")],
    tokens: Annotated[
        int | None, typer.Option(help="Length of the prompt; 32,768, or the model's positions.", min=1)
    ] = None,
    text: Text = None,
    skip: Annotated[int, typer.Option(help="Tokens of the text to leave out before the prompt.", min=0)] = 0,
    device: Device = None,
) -> None:
    with failures():
        ids = read_tokens(model, text or default_text(), prompt_tokens(model, tokens, 32768), skip=skip)
        made = capture(model, ids, folder, device_of(device))
        left_out = f", left out: {made.left_out}" if made.left_out else ""
        print(f"{made.num_tokens:,} tokens of {made.model} in {folder}: {len(made.scales)} layers{left_out}")


def capture(
    model: Path, token_ids: Sequence[int], folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Capture:
    """Capture one prompt; see ``capture_prompts``."""
    return next(capture_prompts(model, [token_ids], [folder], device, dtype))


def read_tokens(model: Path, text: Path, length: int, begin_token: bool = True, skip: int = 0) -> list[int]:
    """Return a prompt of ``length`` tokens from a text file or folder, without its first ``skip`` tokens.

    With ``begin_token``, the tokenizer's begin-of-sequence token comes first, if it exists. Raises ConfigurationError
    if the text is too short.
    """
    tokenizer, most_chars = load_tokenizer(model), (skip + length) * MOST_CHARS
    token_ids = tokenizer(read_prompt_text(text, most_chars), add_special_tokens=False, verbose=False).input_ids
    if len(token_ids) < skip + length:
        raise ConfigurationError(f"text: {unexpected(f'{len(token_ids)} tokens', f'at least {skip + length}')}")
    return [*(begin_ids(tokenizer) if begin_token else ()), *token_ids[skip:]][:length]


if __name__ == "__main__":
    typer.run(main)
