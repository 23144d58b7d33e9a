# SPDX-License-Identifier: Apache-2.0
"""What commands share: options, how they read lists and levels, and what they print."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def output(path: Path | None) -> Path | None:
    """An option's check: what cannot be written is found out before anything is measured."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise typer.BadParameter(f"given {path}, expected a file in a folder that is there and can be written to")
    return path


def folder_for(option: str, path: Path) -> Path:
    """A folder that is there or can be made: found out before anything is done. Raises BenchError."""
    from vllm_sparse_backend.measure.report import BenchError

    there = next(one for one in (path.absolute(), *path.absolute().parents) if os.path.lexists(one))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BenchError(f"{option}: given {str(path)!r}, expected a folder that can be written to, or made")
    return path


Json = Annotated[
    Path | None, typer.Option("--json", help="File for all that was measured, with versions.", callback=output)
]
ServedModel = Annotated[Path | None, typer.Argument(help="Model to serve; not needed where servers run.")]
SparseSettings = Annotated[
    list[str] | None, typer.Option(help="sparse_prefill as JSON, or a profile; may be repeated. Nothing is set.")
]
Level = Annotated[list[str] | None, typer.Option(help="Level that requests ask for; may be repeated.")]
Text = Annotated[Path | None, typer.Option(help="Text file, or folder of *.py and *.md, for prompts.")]
ServerArgs = Annotated[str, typer.Option("--server-args", help="More arguments for all servers, as one text.")]


@contextmanager
def failures() -> Iterator[None]:
    """What an operator can mend is one red line, not a traceback."""
    from vllm_sparse_backend.measure.report import BenchError
    from vllm_sparse_backend.measure.server import ServerError
    from vllm_sparse_backend.settings.errors import ConfigurationError

    try:
        yield
    except (BenchError, ConfigurationError, ServerError) as error:
        raise failure(error) from error


def failure(error: object, code: int = 1) -> typer.Exit:
    """Says it in red; to be raised."""
    Console(stderr=True).print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
    return typer.Exit(code)


def exit_on_sigterm() -> None:
    """As an exception, so that what must be stopped or closed is: servers, GPUs, vLLM's workers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def wide_console() -> Console:
    """Wide enough for a table where there is no terminal to fit into."""
    return Console(width=None if sys.stdout.isatty() else 180)


def say(text: str) -> None:
    Console().print(escape(text), highlight=False, soft_wrap=True)


@contextmanager
def bar(of: str, total: int | None, done: int = 0) -> Iterator[tuple[Console, Callable[[], None]]]:
    """A bar on stderr: what prints above it, and what moves it on by one."""
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(of, total=total, completed=done)
        yield progress.console, lambda: progress.advance(task)


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def level_of(text: str) -> int | str:
    """As requests have it."""
    return int(text) if text in ("0", "1") else text


def token_counts(option: str, text: str, or_none: bool = False, least: int = 1) -> list[int]:
    """Whole numbers from ``least`` on. ``or_none``: an empty text is none of them."""
    from vllm_sparse_backend.measure.report import BenchError

    parts = split(text)
    if all(part.isdecimal() and int(part) >= least for part in parts) and (parts or or_none):
        return [int(part) for part in parts]
    expected = "above 0" if least == 1 else f"from {least} on"
    raise BenchError(f"{option}: given {text!r}, expected whole numbers {expected}, with commas between")


def device_of(text: str | None) -> str:
    """What --device names, and otherwise the GPU where there is one. Raises BenchError where torch has none such."""
    import torch

    from vllm_sparse_backend.measure.report import BenchError

    if text is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise BenchError(f"--device: given {text!r}, expected cuda, cuda with a number, or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise BenchError(f"--device: given {text!r}, expected cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BenchError(f"--device: given {text!r}, and torch sees {torch.cuda.device_count()} CUDA devices")
    return text


def text_of(path: Path | None) -> str | None:
    """What --text names, if it is given."""
    from vllm_sparse_backend.measure.texts import read_text

    return None if path is None else read_text(path)


def refuse_without_model(given: Mapping[str, object]) -> None:
    """Options by name, of those that say how servers are started: where servers run already, they would do nothing."""
    from vllm_sparse_backend.measure.report import BenchError

    if names := [name for name, value in given.items() if value]:
        raise BenchError(f"{', '.join(names)}: given with running servers, expected only with a MODEL to serve")
